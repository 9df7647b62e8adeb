// The bulk loops, compiled once per instruction-set level. NVX_LEVEL is the level's name.

#include "kernel/reduce/level.h"

#include "kernel/reduce/reduce.h"

#ifdef __x86_64__
#include <immintrin.h>
#endif

#ifdef __clang__
#define NVX_INDEPENDENT _Pragma("clang loop vectorize(assume_safety)")
#define NVX_SCALAR
#else
#define NVX_INDEPENDENT _Pragma("GCC ivdep")
#define NVX_SCALAR [[gnu::optimize("no-tree-vectorize")]]
#endif

namespace nvx::kernel {
inline namespace NVX_LEVEL {

#if defined(__AVX512F__)
constexpr size_t kVector = 64;
#elif defined(__AVX__)
constexpr size_t kVector = 32;
#else
constexpr size_t kVector = 16;
#endif
typedef float Floats [[gnu::vector_size(kVector)]];
typedef uint32_t Words [[gnu::vector_size(kVector)]];

/// An element in the caller's memory, at any address.
template <class T>
struct [[gnu::packed, gnu::may_alias]] Loose {
  T value;
};

// The destination may equal one of the sources. The elements are still independent, and this hint to the compiler
// avoids an overlap check that would send exactly that case down a slow path.

/// Types that accumulate in their own type. More than two ranks are reduced block by block, so that the accumulators
/// stay in the innermost cache.
template <class T, ReduceOp kOp>
struct Loop {
  static constexpr size_t kBlock = 2048 / sizeof(T);
  using Acc = typename Rule<T>::Acc;
  using In = const Loose<T>*;
  using Out = Loose<T>*;

  static Acc factor(const double* factors, int rank) {
    if constexpr (kOp == ReduceOp::kPremulSum) return Acc(factors[rank]);
    return Acc();
  }

  static void one(Out dst, In a, size_t n, Acc fa) {
    NVX_INDEPENDENT
    for (size_t i = 0; i < n; ++i) dst[i].value = finish<kOp, T>(term<kOp>(a[i].value, fa), 1);
  }

  static void two(Out dst, In a, In b, size_t n, Acc fa, Acc fb) {
    NVX_INDEPENDENT
    for (size_t i = 0; i < n; ++i) {
      dst[i].value = finish<kOp, T>(combine<kOp>(term<kOp>(a[i].value, fa), term<kOp>(b[i].value, fb)), 2);
    }
  }

  [[gnu::noinline]] static void start(Acc* __restrict acc, In a, In b, size_t n, Acc fa, Acc fb) {
    for (size_t i = 0; i < n; ++i) acc[i] = combine<kOp>(term<kOp>(a[i].value, fa), term<kOp>(b[i].value, fb));
  }
  [[gnu::noinline]] static void next(Acc* __restrict acc, In x, size_t n, Acc fx) {
    for (size_t i = 0; i < n; ++i) acc[i] = combine<kOp>(acc[i], term<kOp>(x[i].value, fx));
  }
  [[gnu::noinline]] static void end(Out dst, const Acc* acc, In x, size_t n, Acc fx, int ranks) {
    NVX_INDEPENDENT
    for (size_t i = 0; i < n; ++i)
      dst[i].value = finish<kOp, T>(combine<kOp>(acc[i], term<kOp>(x[i].value, fx)), ranks);
  }

  static void element(Out dst, const void* const* srcs, int ranks, size_t i, const double* factors) {
    const auto x = [&](int r) { return term<kOp>(static_cast<In>(srcs[r])[i].value, factor(factors, r)); };
    Acc acc = x(0);
    for (int r = 1; r < ranks; ++r) acc = combine<kOp>(acc, x(r));
    dst->value = finish<kOp, T>(acc, ranks);
  }

  static void run(void* dst, const void* const* srcs, int ranks, size_t n, const double* factors) {
    const auto source = [&](int r, size_t at) { return static_cast<In>(srcs[r]) + at; };
    const auto f = [&](int r) { return factor(factors, r); };
    const Out out = static_cast<Out>(dst);
    if (ranks == 1) return one(out, source(0, 0), n, f(0));
    if (ranks == 2) return two(out, source(0, 0), source(1, 0), n, f(0), f(1));
    Acc acc[kBlock];
    for (size_t at = 0; at < n; at += kBlock) {
      const size_t m = n - at < kBlock ? n - at : kBlock;
      start(acc, source(0, at), source(1, at), m, f(0), f(1));
      for (int r = 2; r < ranks - 1; ++r) next(acc, source(r, at), m, f(r));
      end(out + at, acc, source(ranks - 1, at), m, f(ranks - 1), ranks);
    }
  }
};

/// The other narrow types are widened and rounded block by block and share the loops of float.
template <class T>
[[gnu::noinline]] void widen(float* __restrict to, const Loose<T>* from, size_t n) {
  for (size_t i = 0; i < n; ++i) to[i] = T::widen(from[i].value);
}
template <class T>
[[gnu::noinline]] void round(Loose<T>* to, const float* from, size_t n) {
  NVX_INDEPENDENT
  for (size_t i = 0; i < n; ++i) to[i].value = T::round(from[i]);
}

template <class T, ReduceOp kOp>
struct NarrowLoop {
  static void run(void* dst, const void* const* srcs, int ranks, size_t n, const double* factors) {
    using Wide = Loop<float, kOp>;
    constexpr size_t kBlock = Wide::kBlock;
    float acc[kBlock], x[kBlock];
    for (size_t at = 0; at < n; at += kBlock) {
      const size_t m = n - at < kBlock ? n - at : kBlock;
      widen<T>(acc, static_cast<const Loose<T>*>(srcs[0]) + at, m);
      if constexpr (kOp == ReduceOp::kPremulSum) scale(acc, m, float(factors[0]));
      for (int r = 1; r < ranks; ++r) {
        widen<T>(x, static_cast<const Loose<T>*>(srcs[r]) + at, m);
        Wide::next(acc, reinterpret_cast<const Loose<float>*>(x), m, Wide::factor(factors, r));
      }
      if constexpr (kOp == ReduceOp::kAvg) divide_all(acc, m, ranks);
      round<T>(static_cast<Loose<T>*>(dst) + at, acc, m);
    }
  }

  [[gnu::noinline]] static void scale(float* acc, size_t n, float factor) {
    for (size_t i = 0; i < n; ++i) acc[i] = term<kOp>(acc[i], factor);
  }
  [[gnu::noinline]] static void divide_all(float* acc, size_t n, int ranks) {
    for (size_t i = 0; i < n; ++i) acc[i] = finish<kOp, float>(acc[i], ranks);
  }
};

/// Two vectors of accumulators that stay in registers over all ranks. The 16-bit floats use them, because their
/// conversions would otherwise cost more than the memory accesses. Each type chooses which element is in which vector.
struct Lanes {
  static constexpr size_t kCount = 2 * kVector / sizeof(float);
  Floats x, y;

  friend Lanes operator+(Lanes a, Lanes b) { return {a.x + b.x, a.y + b.y}; }
  friend Lanes operator*(Lanes a, Lanes b) { return {a.x * b.x, a.y * b.y}; }
  friend Lanes operator*(Lanes a, float b) { return {a.x * b, a.y * b}; }
  friend Lanes operator/(Lanes a, float b) { return {a.x / b, a.y / b}; }
  friend Lanes lower(Lanes a, Lanes b) { return {lower_of(a.x, b.x), lower_of(a.y, b.y)}; }
  friend Lanes higher(Lanes a, Lanes b) { return {higher_of(a.x, b.x), higher_of(a.y, b.y)}; }

 private:
  static Floats lower_of(Floats a, Floats b) { return ((a < b) | (a != a)) ? a : b; }
  static Floats higher_of(Floats a, Floats b) { return ((a > b) | (a != a)) ? a : b; }
};

/// BF16::round() with the result in the upper half of each word.
inline Words rounded_to_bf16(Floats f) {
  const Words u = (Words)f, nan = u - u + 0x7fc00000u;
  return f == f ? u + 0x7fffu + (u >> 16 & 1) : nan;
}

/// The even elements and the odd ones: one shift or mask of a word of two elements makes a float of either.
inline Lanes load(const Loose<BF16>* from) {
  const Words pairs = reinterpret_cast<const Loose<Words>*>(from)->value;
  return {(Floats)(pairs << 16), (Floats)(pairs & 0xffff0000u)};
}
inline void store(Loose<BF16>* to, Lanes a) {
  const Words pairs = rounded_to_bf16(a.x) >> 16 | (rounded_to_bf16(a.y) & 0xffff0000u);
  reinterpret_cast<Loose<Words>*>(to)->value = pairs;
}

#if defined(__F16C__)
/// The first and the second half of the elements. gcc 12 does not generate these instructions by itself.
#if defined(__AVX512F__)
inline Floats widened(const Loose<F16>* from) {
  return _mm512_maskz_cvtph_ps(0xffff, _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
}
inline void store_rounded(Loose<F16>* to, Floats f) {
  const __m256i halves = _mm512_maskz_cvtps_ph(0xffff, f, _MM_FROUND_TO_NEAREST_INT);
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), halves);
}
#else
inline Floats widened(const Loose<F16>* from) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
}
inline void store_rounded(Loose<F16>* to, Floats f) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(to), _mm256_cvtps_ph(f, _MM_FROUND_TO_NEAREST_INT));
}
#endif
inline Lanes load(const Loose<F16>* from) { return {widened(from), widened(from + Lanes::kCount / 2)}; }
inline void store(Loose<F16>* to, Lanes a) { store_rounded(to, a.x), store_rounded(to + Lanes::kCount / 2, a.y); }
#endif

/// Whether load() and store() above support the type.
template <class T>
constexpr bool kHasLanes = kSame<T, BF16>;
#ifdef __F16C__
template <>
constexpr bool kHasLanes<F16> = true;
#endif

template <class T, ReduceOp kOp>
struct LanesLoop {
  static Lanes input(const void* src, size_t at, const double* factors, int rank) {
    const Lanes x = load(static_cast<const Loose<T>*>(src) + at);
    if constexpr (kOp == ReduceOp::kPremulSum) return x * float(factors[rank]);
    return x;
  }

  static void run(void* dst, const void* const* srcs, int ranks, size_t n, const double* factors) {
    constexpr size_t kHalf = Lanes::kCount, kStep = 2 * kHalf;
    const auto out = static_cast<Loose<T>*>(dst);
    size_t i = 0;
    for (; i + kStep <= n; i += kStep) {
      Lanes a = input(srcs[0], i, factors, 0), b = input(srcs[0], i + kHalf, factors, 0);
      for (int r = 1; r < ranks; ++r) {
        a = combine<kOp>(a, input(srcs[r], i, factors, r));
        b = combine<kOp>(b, input(srcs[r], i + kHalf, factors, r));
      }
      if constexpr (kOp == ReduceOp::kAvg) a = a / float(ranks), b = b / float(ranks);
      store(out + i, a), store(out + i + kHalf, b);
    }
    for (; i < n; ++i) Loop<T, kOp>::element(out + i, srcs, ranks, i, factors);
  }
};

/// Complex numbers add and scale like twice as many real numbers.
template <class F, ReduceOp kOp>
void by_parts(void* dst, const void* const* srcs, int ranks, size_t n, const double* factors) {
  Loop<F, kOp>::run(dst, srcs, ranks, 2 * n, factors);
}

/// Not vectorised: gcc 12 would turn the alternating sums into fused multiply-adds even with contraction off.
template <class F>
NVX_SCALAR void product_of_complex(void* dst, const void* const* srcs, int ranks, size_t n, const double* factors) {
  using Product = Loop<Complex<F>, ReduceOp::kProduct>;
  for (size_t i = 0; i < n; ++i) Product::element(static_cast<typename Product::Out>(dst) + i, srcs, ranks, i, factors);
}

template <class T, ReduceOp kOp>
constexpr ReduceFn loop_of_float() {
  if constexpr (kIsFloat<T>)
    return Loop<T, kOp>::run;
  else if constexpr (kHasLanes<T>)
    return LanesLoop<T, kOp>::run;
  else
    return NarrowLoop<T, kOp>::run;
}

template <class T>
ReduceFn of_float(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum: return loop_of_float<T, ReduceOp::kSum>();
    case ReduceOp::kAvg: return loop_of_float<T, ReduceOp::kAvg>();
    case ReduceOp::kProduct: return loop_of_float<T, ReduceOp::kProduct>();
    case ReduceOp::kMin: return loop_of_float<T, ReduceOp::kMin>();
    case ReduceOp::kMax: return loop_of_float<T, ReduceOp::kMax>();
    case ReduceOp::kPremulSum: return loop_of_float<T, ReduceOp::kPremulSum>();
    default: return nullptr;
  }
}

/// Where the sign does not matter, the signed type shares the code of the unsigned one.
template <class T, class Unsigned>
ReduceFn of_integer(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum: return Loop<Unsigned, ReduceOp::kSum>::run;
    case ReduceOp::kAvg: return Loop<T, ReduceOp::kAvg>::run;
    case ReduceOp::kProduct: return Loop<Unsigned, ReduceOp::kProduct>::run;
    case ReduceOp::kMin: return Loop<T, ReduceOp::kMin>::run;
    case ReduceOp::kMax: return Loop<T, ReduceOp::kMax>::run;
    case ReduceOp::kBand: return Loop<Unsigned, ReduceOp::kBand>::run;
    case ReduceOp::kBor: return Loop<Unsigned, ReduceOp::kBor>::run;
    case ReduceOp::kBxor: return Loop<Unsigned, ReduceOp::kBxor>::run;
    default: return nullptr;
  }
}

template <class F>
ReduceFn of_complex(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum: return by_parts<F, ReduceOp::kSum>;
    case ReduceOp::kAvg: return by_parts<F, ReduceOp::kAvg>;
    case ReduceOp::kProduct: return product_of_complex<F>;
    case ReduceOp::kPremulSum: return by_parts<F, ReduceOp::kPremulSum>;
    default: return nullptr;
  }
}

inline ReduceFn of_bool(ReduceOp op) {
  switch (op) {
    case ReduceOp::kSum:
    case ReduceOp::kMax:
    case ReduceOp::kBor: return Loop<Bool, ReduceOp::kBor>::run;
    case ReduceOp::kProduct:
    case ReduceOp::kMin:
    case ReduceOp::kBand: return Loop<Bool, ReduceOp::kBand>::run;
    case ReduceOp::kBxor: return Loop<Bool, ReduceOp::kBxor>::run;
    default: return nullptr;
  }
}

template <class T>
void divide_each(void* data, size_t n, double by) {
  using Acc = typename Rule<T>::Acc;
  auto* d = static_cast<Loose<T>*>(data);
  if constexpr (kIsFloat<Acc>) {
    const auto divisor = Acc(by);
    for (size_t i = 0; i < n; ++i) d[i].value = Rule<T>::round(Rule<T>::widen(d[i].value) / divisor);
  } else {
    const auto ranks = int(by);
    for (size_t i = 0; i < n; ++i) d[i].value = finish<ReduceOp::kAvg, T>(Rule<T>::widen(d[i].value), ranks);
  }
}
template <class F>
void divide_parts(void* data, size_t n, double by) {
  divide_each<F>(data, 2 * n, by);
}

/// The loops of a type. A type without kAvg has no `divide`.
struct Loops {
  ReduceFn (*reduce)(ReduceOp) = nullptr;
  DivideFn divide = nullptr;
};
template <class T>
constexpr Loops kFloat{of_float<T>, divide_each<T>};
template <class T, class Unsigned>
constexpr Loops kInteger{of_integer<T, Unsigned>, divide_each<T>};
template <class F>
constexpr Loops kComplex{of_complex<F>, divide_parts<F>};

constexpr Loops loops_of(DType type) {
  switch (type) {
    case DType::kBytes: return {};
    case DType::kBool: return {of_bool};
    case DType::kU8: return kInteger<uint8_t, uint8_t>;
    case DType::kI8: return kInteger<int8_t, uint8_t>;
    case DType::kU16: return kInteger<uint16_t, uint16_t>;
    case DType::kI16: return kInteger<int16_t, uint16_t>;
    case DType::kU32: return kInteger<uint32_t, uint32_t>;
    case DType::kI32: return kInteger<int32_t, uint32_t>;
    case DType::kU64: return kInteger<uint64_t, uint64_t>;
    case DType::kI64: return kInteger<int64_t, uint64_t>;
    case DType::kF16: return kFloat<F16>;
    case DType::kBF16: return kFloat<BF16>;
    case DType::kF32: return kFloat<float>;
    case DType::kF64: return kFloat<double>;
    case DType::kC64: return kComplex<float>;
    case DType::kC128: return kComplex<double>;
    case DType::kF8E4M3FN: return kFloat<F8E4M3FN>;
    case DType::kF8E5M2: return kFloat<F8E5M2>;
    case DType::kF8E4M3FNUZ: return kFloat<F8E4M3FNUZ>;
    case DType::kF8E5M2FNUZ: return kFloat<F8E5M2FNUZ>;
    case DType::kF8E8M0FNU: return kFloat<F8E8M0FNU>;
  }
  return {};
}

inline ReduceFn reduce(DType type, ReduceOp op) {
  const Loops loops = loops_of(type);
  return loops.reduce ? loops.reduce(op) : nullptr;
}
inline DivideFn divide(DType type) { return loops_of(type).divide; }

inline Words words_at(const char* at) { return reinterpret_cast<const Loose<Words>*>(at)->value; }

/// A plain loop. The C library's copy is slower when another core has just written the source.
inline void copy(void* dst, const void* src, size_t n) {
  auto* d = static_cast<char*>(dst);
  auto* s = static_cast<const char*>(src);
  const auto put = [](char* at, Words w) { reinterpret_cast<Loose<Words>*>(at)->value = w; };
  if (n < kVector) {
    for (size_t i = 0; i < n; ++i) d[i] = s[i];
    return;
  }
  char* const last = d + n - kVector;
  const Words tail = words_at(s + n - kVector);
  for (; d + 3 * kVector < last; d += 4 * kVector, s += 4 * kVector) {
    const Words w = words_at(s), x = words_at(s + kVector), y = words_at(s + 2 * kVector),
                z = words_at(s + 3 * kVector);
    put(d, w), put(d + kVector, x), put(d + 2 * kVector, y), put(d + 3 * kVector, z);
  }
  for (; d < last; d += kVector, s += kVector) put(d, words_at(s));
  put(last, tail);
}

// ThreadSanitizer does not see non-temporal stores.
#if defined(__SANITIZE_THREAD__) || !defined(__x86_64__)
constexpr CopyFn kCopyPast = nullptr;
#else
inline void put_past(void* at, Words w) {
#if defined(__AVX512F__)
  _mm512_stream_si512(static_cast<__m512i*>(at), (__m512i)w);
#elif defined(__AVX2__)
  _mm256_stream_si256(static_cast<__m256i*>(at), (__m256i)w);
#else
  _mm_stream_si128(static_cast<__m128i*>(at), (__m128i)w);
#endif
}

inline void copy_past(void* dst, const void* src, size_t n) {
  auto* d = static_cast<char*>(dst);
  auto* s = static_cast<const char*>(src);
  const size_t least = -reinterpret_cast<uintptr_t>(d) % kVector, head = n < least ? n : least;
  copy(d, s, head);
  for (d += head, s += head, n -= head; n >= 4 * kVector; d += 4 * kVector, s += 4 * kVector, n -= 4 * kVector) {
    const Words w = words_at(s), x = words_at(s + kVector), y = words_at(s + 2 * kVector),
                z = words_at(s + 3 * kVector);
    put_past(d, w), put_past(d + kVector, x), put_past(d + 2 * kVector, y), put_past(d + 3 * kVector, z);
  }
  for (; n >= kVector; d += kVector, s += kVector, n -= kVector) put_past(d, words_at(s));
  _mm_sfence();  // non-temporal stores are not ordered with later stores otherwise
  copy(d, s, n);
}
constexpr CopyFn kCopyPast = copy_past;
#endif

#define NVX_NAME(x) NVX_NAME_(x)
#define NVX_NAME_(x) #x
extern const Level kLevel;
const Level kLevel = {NVX_NAME(NVX_LEVEL), copy, kCopyPast, reduce, divide};

}  // namespace NVX_LEVEL
}  // namespace nvx::kernel
