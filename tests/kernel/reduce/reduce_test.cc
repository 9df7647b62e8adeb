// Every type, operator and number of ranks, on every instruction-set level of this machine, against a scalar reference
// that shares no code with the kernels: it decodes the narrow formats by their definition (sign * significand *
// 2^exponent) and rounds by searching the format's numbers.

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <complex>
#include <cstring>
#include <limits>
#include <map>
#include <random>
#include <string>
#include <vector>

#include "kernel/reduce/float_bits.h"
#include "kernel/reduce/level.h"

namespace nvx::kernel {
namespace {

// ---- the narrow formats, from their definition

struct Format {
  int exponent_bits, mantissa_bits, bias;
  bool is_ieee, is_fnuz;
};
constexpr Format kF16Format = {5, 10, 15, true, false};
constexpr Format kBF16Format = {8, 7, 127, true, false};

Format format_of(DType t) {
  switch (t) {
    case DType::kF16: return kF16Format;
    case DType::kBF16: return kBF16Format;
    case DType::kF8E4M3FN: return {4, 3, 7, false, false};
    case DType::kF8E5M2: return {5, 2, 15, true, false};
    case DType::kF8E4M3FNUZ: return {4, 3, 8, false, true};
    default: return {5, 2, 16, false, true};
  }
}

double value_of(const Format& f, uint32_t code) {
  const uint32_t sign_bit = 1u << (f.exponent_bits + f.mantissa_bits);
  const uint32_t magnitude = code & (sign_bit - 1);
  const int exponent = int(magnitude >> f.mantissa_bits);
  const uint32_t mantissa = magnitude & ((1u << f.mantissa_bits) - 1);
  const double sign = code & sign_bit ? -1 : 1;
  if (f.is_fnuz && code == sign_bit) return NAN;
  if (f.is_ieee && exponent == (1 << f.exponent_bits) - 1) return mantissa ? NAN : sign * INFINITY;
  if (!f.is_ieee && !f.is_fnuz && magnitude == sign_bit - 1) return NAN;
  if (exponent == 0) return sign * std::ldexp(double(mantissa), 1 - f.bias - f.mantissa_bits);
  return sign * std::ldexp(double(mantissa + (1u << f.mantissa_bits)), exponent - f.bias - f.mantissa_bits);
}

/// The finite magnitudes by their codes, which is also the order of the values.
const std::vector<double>& magnitudes_of(const Format& f, uint32_t largest) {
  static std::map<std::pair<int, int>, std::vector<double>> known;
  auto& numbers = known[{f.mantissa_bits, f.bias}];
  for (uint32_t code = uint32_t(numbers.size()); code <= largest; ++code) numbers.push_back(value_of(f, code));
  return numbers;
}

/// The code of the number nearest to x; of two, the even code. Overflow: infinity, NaN (fnuz) or the largest (e4m3fn).
uint32_t code_of(const Format& f, double x) {
  const uint32_t sign_bit = 1u << (f.exponent_bits + f.mantissa_bits);
  const uint32_t largest =
      f.is_ieee ? (((1u << f.exponent_bits) - 1) << f.mantissa_bits) - 1 : sign_bit - (f.is_fnuz ? 1 : 2);
  if (std::isnan(x)) return f.is_fnuz ? sign_bit : sign_bit - 1;
  const double a = std::fabs(x);
  const auto& numbers = magnitudes_of(f, largest);
  uint32_t low = uint32_t(std::upper_bound(numbers.begin(), numbers.end(), a) - numbers.begin()) - 1;
  const double below = numbers[low];
  if (a > below) {
    const double step = numbers[largest] - numbers[largest - 1];
    const double above = low == largest ? below + step : numbers[low + 1];
    const double middle = below + (above - below) / 2;
    if (a > middle || (a == middle && (low & 1))) ++low;
  }
  if (low > largest) {
    if (f.is_fnuz) return sign_bit;
    low = f.is_ieee ? largest + 1 : largest;
  }
  if (f.is_fnuz && low == 0) return 0;
  return low | (std::signbit(x) ? sign_bit : 0);
}

double e8m0_value(uint32_t code) { return code == 255 ? NAN : std::ldexp(1.0, int(code) - 127); }

/// Halves round up, as in torch, except between 0 and 2^-126, where the code of a subnormal float is rounded to even.
uint32_t e8m0_code(double x) {
  const double a = std::fabs(x);
  if (!(a < std::ldexp(1.5, 127))) return 255;
  if (a <= std::ldexp(1.0, -127)) return 0;
  uint32_t code = 0;
  while (code < 254 && a >= std::ldexp(code == 0 ? 1.0 : 1.5, int(code) - 127) &&
         !(code == 0 && a <= std::ldexp(1.0, -127)))
    ++code;
  return code;
}

// ---- a reference reduction of one element

bool is_narrow(DType t) { return t == DType::kF16 || t == DType::kBF16 || t >= DType::kF8E4M3FN; }
bool is_complex(DType t) { return t == DType::kC64 || t == DType::kC128; }
bool is_float(DType t) { return is_narrow(t) || t == DType::kF32 || t == DType::kF64; }

template <class T>
T read(const void* at) {
  T x;
  std::memcpy(&x, at, sizeof x);
  return x;
}

float narrow_value(DType t, uint32_t code) {
  return float(t == DType::kF8E8M0FNU ? e8m0_value(code) : value_of(format_of(t), code));
}
uint32_t narrow_code(DType t, float x) { return t == DType::kF8E8M0FNU ? e8m0_code(x) : code_of(format_of(t), x); }

float read_narrow(DType t, const void* at) {
  return narrow_value(t, size_of(t) == 1 ? read<uint8_t>(at) : read<uint16_t>(at));
}
void write_narrow(DType t, void* at, float x) {
  const uint16_t code = uint16_t(narrow_code(t, x));
  if (size_of(t) == 1)
    *static_cast<uint8_t*>(at) = uint8_t(code);
  else
    std::memcpy(at, &code, sizeof code);
}

template <class F>
F fold_floats(ReduceOp op, const std::vector<F>& xs, const double* factors) {
  volatile F acc = op == ReduceOp::kPremulSum ? xs[0] * F(factors[0]) : xs[0];
  for (size_t r = 1; r < xs.size(); ++r) {
    const F a = acc, x = xs[r];
    switch (op) {
      case ReduceOp::kSum:
      case ReduceOp::kAvg: acc = a + x; break;
      case ReduceOp::kProduct: acc = a * x; break;
      case ReduceOp::kMin: acc = std::isnan(a) || std::isnan(x) ? F(NAN) : a < x ? a : x; break;
      case ReduceOp::kMax: acc = std::isnan(a) || std::isnan(x) ? F(NAN) : a > x ? a : x; break;
      default: {
        volatile F scaled = x * F(factors[r]);
        acc = a + scaled;
      }
    }
  }
  if (op == ReduceOp::kAvg) acc = acc / F(xs.size());
  return acc;
}

template <class F>
std::complex<F> fold_complex(ReduceOp op, const std::vector<std::complex<F>>& xs, const double* factors) {
  if (op == ReduceOp::kProduct) {
    volatile F re = xs[0].real(), im = xs[0].imag();
    for (size_t r = 1; r < xs.size(); ++r) {
      volatile F ac = re * xs[r].real(), bd = im * xs[r].imag(), ad = re * xs[r].imag(), bc = im * xs[r].real();
      re = ac - bd;
      im = ad + bc;
    }
    return {re, im};
  }
  std::vector<F> re, im;
  for (auto& x : xs) re.push_back(x.real()), im.push_back(x.imag());
  return {fold_floats<F>(op, re, factors), fold_floats<F>(op, im, factors)};
}

/// In 128 bits, reduced to T's range after each step. (The product of two u64 needs the unsigned type.)
template <class T>
T fold_integers(ReduceOp op, const std::vector<T>& xs) {
  __int128 acc = xs[0];
  for (size_t r = 1; r < xs.size(); ++r) {
    const __int128 x = xs[r];
    switch (op) {
      case ReduceOp::kSum:
      case ReduceOp::kAvg: acc += x; break;
      case ReduceOp::kProduct: acc = __int128((unsigned __int128)acc * (unsigned __int128)x); break;
      case ReduceOp::kMin: acc = x < acc ? x : acc; break;
      case ReduceOp::kMax: acc = x > acc ? x : acc; break;
      case ReduceOp::kBand: acc &= x; break;
      case ReduceOp::kBor: acc |= x; break;
      default: acc ^= x;
    }
    acc = T(acc);
  }
  return T(op == ReduceOp::kAvg ? acc / __int128(xs.size()) : acc);
}

bool fold_bools(ReduceOp op, const std::vector<bool>& xs) {
  int ones = 0;
  for (bool x : xs) ones += x;
  if (op == ReduceOp::kBxor) return ones & 1;
  if (op == ReduceOp::kSum || op == ReduceOp::kMax || op == ReduceOp::kBor) return ones > 0;
  return ones == int(xs.size());
}

template <class T, class Fold>
void write_fold(void* out, const std::vector<const void*>& in, Fold fold) {
  std::vector<T> xs;
  for (auto* p : in) xs.push_back(read<T>(p));
  const T y = fold(xs);
  std::memcpy(out, &y, sizeof y);
}

void reference(DType t, ReduceOp op, void* out, const std::vector<const void*>& in, const double* factors) {
  const auto floats = [&](auto& xs) { return fold_floats(op, xs, factors); };
  const auto complexes = [&](auto& xs) { return fold_complex(op, xs, factors); };
  const auto integers = [&](auto& xs) { return fold_integers(op, xs); };
  if (is_narrow(t)) {
    std::vector<float> xs;
    for (auto* p : in) xs.push_back(read_narrow(t, p));
    return write_narrow(t, out, fold_floats(op, xs, factors));
  }
  switch (t) {
    case DType::kBool: {
      std::vector<bool> xs;
      for (auto* p : in) xs.push_back(read<uint8_t>(p) != 0);
      *static_cast<uint8_t*>(out) = fold_bools(op, xs);
      break;
    }
    case DType::kU8: return write_fold<uint8_t>(out, in, integers);
    case DType::kI8: return write_fold<int8_t>(out, in, integers);
    case DType::kU16: return write_fold<uint16_t>(out, in, integers);
    case DType::kI16: return write_fold<int16_t>(out, in, integers);
    case DType::kU32: return write_fold<uint32_t>(out, in, integers);
    case DType::kI32: return write_fold<int32_t>(out, in, integers);
    case DType::kU64: return write_fold<uint64_t>(out, in, integers);
    case DType::kI64: return write_fold<int64_t>(out, in, integers);
    case DType::kF32: return write_fold<float>(out, in, floats);
    case DType::kF64: return write_fold<double>(out, in, floats);
    case DType::kC64: return write_fold<std::complex<float>>(out, in, complexes);
    case DType::kC128: return write_fold<std::complex<double>>(out, in, complexes);
    default: FAIL() << name(t);
  }
}

// ---- comparison: the same bits, except that all NaNs are equal

bool is_nan(DType t, const void* at) {
  if (is_narrow(t)) return std::isnan(read_narrow(t, at));
  if (t == DType::kF32 || t == DType::kC64) return std::isnan(read<float>(at));
  if (t == DType::kF64 || t == DType::kC128) return std::isnan(read<double>(at));
  return false;
}

bool same(DType t, const uint8_t* a, const uint8_t* b) {
  const size_t part = is_complex(t) ? size_of(t) / 2 : size_of(t);
  for (size_t at = 0; at < size_of(t); at += part) {
    if (is_nan(t, a + at) && is_nan(t, b + at)) continue;
    if (std::memcmp(a + at, b + at, part) != 0) return false;
  }
  return true;
}

std::string hex(DType t, const uint8_t* at) {
  std::string s;
  for (size_t i = size_of(t); i-- > 0;) s += "0123456789abcdef"[at[i] >> 4], s += "0123456789abcdef"[at[i] & 15];
  return s;
}

// ---- inputs

/// Random bits, so that NaN, infinities, subnormals and overflow occur in the narrow types. In the wide types half of
/// the elements are ordinary numbers, with special values among them.
template <class F>
void fill_wide(uint8_t* at, size_t n, std::mt19937_64& random) {
  using Limits = std::numeric_limits<F>;
  const F special[] = {0,
                       -F(0),
                       Limits::infinity(),
                       -Limits::infinity(),
                       Limits::quiet_NaN(),
                       Limits::denorm_min(),
                       -Limits::min(),
                       Limits::max(),
                       Limits::lowest(),
                       1,
                       Limits::min() / 4};
  for (size_t i = 0; i < n; ++i) {
    F x = F(int64_t(random())) / F(1ull << 60);
    if (random() % 8 == 0) x = special[random() % std::size(special)];
    if (random() % 4 == 0) x = std::ldexp(x, int(random() % 200) - 100);
    std::memcpy(at + i * sizeof x, &x, sizeof x);
  }
}

void fill(DType t, uint8_t* at, size_t n, std::mt19937_64& random) {
  for (size_t i = 0; i < n * size_of(t); ++i) at[i] = uint8_t(random());
  if (t == DType::kF32 || t == DType::kC64) fill_wide<float>(at, n * size_of(t) / 4, random);
  if (t == DType::kF64 || t == DType::kC128) fill_wide<double>(at, n * size_of(t) / 8, random);
  if (t == DType::kBool) {
    for (size_t i = 0; i < n; ++i) at[i] = at[i] < 128 ? 0 : at[i] < 250 ? 1 : at[i];
  }
}

std::vector<DType> all_types() {
  std::vector<DType> all;
  for (size_t i = 0; i < kDTypeCount; ++i) all.push_back(DType(i));
  return all;
}

std::vector<ReduceOp> all_ops() {
  std::vector<ReduceOp> all;
  for (size_t i = 0; i < kReduceOpCount; ++i) all.push_back(ReduceOp(i));
  return all;
}

constexpr double kFactors[] = {0.5, -3.0, 1.0 / 3.0, 1e-3, 7.25, 0.0, 1.0, -0.125};

/// One reduction with guard bytes around the destination. `in_place`: the source that is also the destination, or -1.
struct Case {
  DType type;
  ReduceOp op;
  int ranks;
  size_t n;
  size_t offset;
  int in_place;

  std::string text(const Level& l) const {
    return std::string(l.name) + " " + name(type) + " " + name(op) + " ranks " + std::to_string(ranks) + " n " +
           std::to_string(n) + " offset " + std::to_string(offset) + " in place " + std::to_string(in_place);
  }

  /// Every level, with the same inputs.
  void check(std::mt19937_64& random) const {
    const size_t bytes = n * size_of(type);
    const std::vector<uint8_t> untouched(bytes + 2 * kGuard + 64, kMark);
    std::vector<std::vector<uint8_t>> inputs(size_t(ranks) + 1, untouched);
    for (int r = 0; r < ranks; ++r) fill(type, place(inputs, r), n, random);
    std::vector<uint8_t> want(bytes);
    std::vector<const void*> element(static_cast<size_t>(ranks));
    for (size_t i = 0; i < n; ++i) {
      for (int r = 0; r < ranks; ++r) element[size_t(r)] = place(inputs, r) + i * size_of(type);
      reference(type, op, want.data() + i * size_of(type), element, kFactors);
    }
    for (const Level* l : levels()) {
      check(*l, inputs, want);
      if (testing::Test::HasFatalFailure()) return;
    }
  }

 private:
  static constexpr size_t kGuard = 64;
  static constexpr uint8_t kMark = 0xa5;

  uint8_t* place(std::vector<std::vector<uint8_t>>& memory, int r) const {
    return memory[size_t(r)].data() + kGuard + (r == 0 ? offset : offset * (size_t(r) + 1)) % 64;
  }

  void check(const Level& l, std::vector<std::vector<uint8_t>> memory, const std::vector<uint8_t>& want) const {
    std::vector<const void*> srcs;
    for (int r = 0; r < ranks; ++r) srcs.push_back(place(memory, r));
    uint8_t* const dst = place(memory, in_place < 0 ? ranks : in_place);
    l.reduce(type, op)(dst, srcs.data(), size_t(ranks), n, op == ReduceOp::kPremulSum ? kFactors : nullptr);
    for (size_t i = 0; i < n; ++i) {
      const uint8_t *got = dst + i * size_of(type), *expect = want.data() + i * size_of(type);
      ASSERT_TRUE(same(type, got, expect))
          << text(l) << ": element " << i << " is " << hex(type, got) << ", not " << hex(type, expect);
    }
    for (size_t i = 1; i <= 32; ++i) {
      ASSERT_EQ(dst[-ptrdiff_t(i)], kMark) << text(l) << ": wrote before the destination";
      ASSERT_EQ(dst[want.size() + i - 1], kMark) << text(l) << ": wrote behind the destination";
    }
  }
};

// ---- the tests

bool is_defined(DType t, ReduceOp op) {
  const bool bitwise = op == ReduceOp::kBand || op == ReduceOp::kBor || op == ReduceOp::kBxor;
  if (t == DType::kBytes) return false;
  if (t == DType::kBool) return op != ReduceOp::kAvg && op != ReduceOp::kPremulSum;
  if (is_complex(t)) return !bitwise && op != ReduceOp::kMin && op != ReduceOp::kMax;
  if (is_float(t)) return !bitwise;
  return op != ReduceOp::kPremulSum;
}

TEST(Levels, TheBestIsThePickedOne) {
  ASSERT_FALSE(levels().empty());
  EXPECT_STREQ(levels().front()->name, "base");
  EXPECT_EQ(&level(), levels().back());
}

TEST(Reduce, ExistsExactlyWhereThePairHasAMeaning) {
  for (const Level* l : levels()) {
    for (DType t : all_types()) {
      for (ReduceOp op : all_ops()) {
        EXPECT_EQ(l->reduce(t, op) != nullptr, is_defined(t, op)) << l->name << " " << name(t) << " " << name(op);
      }
    }
  }
}

class Reduce : public testing::TestWithParam<DType> {};

TEST_P(Reduce, GivesTheReferencesBitsOnEveryLevel) {
  for (ReduceOp op : all_ops()) {
    if (!is_defined(GetParam(), op)) continue;
    for (int ranks : {1, 2, 3, 4, 5, 8}) {
      for (size_t n : {0, 1, 17, 130, 1027}) {
        std::mt19937_64 random(n * 8 + ranks);
        for (size_t offset : {0, 1, 7}) Case{GetParam(), op, ranks, n, offset, -1}.check(random);
        for (int r : {0, ranks - 1}) Case{GetParam(), op, ranks, n, 0, r}.check(random);
        if (HasFatalFailure()) return;
      }
    }
  }
}

TEST_P(Reduce, CrossesItsBlocks) {
  std::mt19937_64 random(5);
  Case{GetParam(), is_defined(GetParam(), ReduceOp::kSum) ? ReduceOp::kSum : ReduceOp::kBor, 6, 9001, 3, 4}.check(
      random);
}

INSTANTIATE_TEST_SUITE_P(Types, Reduce,
                         testing::Values(DType::kBool, DType::kU8, DType::kI8, DType::kU16, DType::kI16, DType::kU32,
                                         DType::kI32, DType::kU64, DType::kI64, DType::kF16, DType::kBF16, DType::kF32,
                                         DType::kF64, DType::kC64, DType::kC128, DType::kF8E4M3FN, DType::kF8E5M2,
                                         DType::kF8E4M3FNUZ, DType::kF8E5M2FNUZ, DType::kF8E8M0FNU),
                         [](const auto& info) { return std::string(name(info.param)); });

/// n codes pass through a reduction over one rank and come back unchanged.
void round_trip(const Level& l, DType t, size_t codes) {
  std::vector<uint8_t> in(codes * size_of(t)), out(in.size());
  for (size_t i = 0; i < codes; ++i) std::memcpy(in.data() + i * size_of(t), &i, size_of(t));
  const void* src = in.data();
  l.reduce(t, ReduceOp::kSum)(out.data(), &src, 1, codes, nullptr);
  for (size_t i = 0; i < in.size(); i += size_of(t)) {
    ASSERT_TRUE(same(t, out.data() + i, in.data() + i)) << l.name << " " << name(t) << " code " << i / size_of(t);
  }
}

TEST(Convert, EveryCodeComesBack) {
  for (const Level* l : levels()) {
    for (DType t : {DType::kF16, DType::kBF16}) round_trip(*l, t, 65536);
    for (DType t : all_types()) {
      if (is_narrow(t) && size_of(t) == 1) round_trip(*l, t, 256);
    }
  }
}

template <class N>
void widens_as_defined(DType t, uint32_t codes) {
  for (uint32_t code = 0; code < codes; ++code) {
    const auto bits = decltype(N::bits)(code);
    const float got = N::widen(N{bits}), want = narrow_value(t, code);
    if (std::isnan(want))
      ASSERT_TRUE(std::isnan(got)) << name(t) << " " << code;
    else
      ASSERT_EQ(std::bit_cast<uint32_t>(got), std::bit_cast<uint32_t>(want)) << name(t) << " " << code;
  }
}

/// Around every number of the format and every midpoint, and over all exponents.
template <class N>
void rounds_as_defined(DType t, uint32_t codes) {
  const auto check = [&](float f) {
    const uint32_t want = narrow_code(t, f), code = N::round(f).bits;
    ASSERT_TRUE(std::isnan(narrow_value(t, want)) ? std::isnan(narrow_value(t, code)) : code == want)
        << name(t) << " of " << std::hexfloat << f << " is " << code << ", not " << want;
  };
  for (uint32_t code = 0; code + 1 < codes; ++code) {
    const float a = narrow_value(t, code), b = narrow_value(t, code + 1), middle = a / 2 + b / 2;
    for (float f : {a, middle}) {
      check(f), check(std::nextafter(f, INFINITY)), check(std::nextafter(f, -INFINITY)), check(-f);
    }
    if (testing::Test::HasFatalFailure()) return;
  }
  for (uint64_t u = 0; u < (1ull << 32); u += 65521) check(std::bit_cast<float>(uint32_t(u)));
}

TEST(Convert, WidensAndRoundsAsTheFormatsAreDefined) {
  const auto both = [](auto n, DType t, uint32_t codes) {
    widens_as_defined<decltype(n)>(t, codes);
    rounds_as_defined<decltype(n)>(t, codes);
  };
  both(F16{}, DType::kF16, 65536);
  both(BF16{}, DType::kBF16, 65536);
  both(F8E4M3FN{}, DType::kF8E4M3FN, 256);
  both(F8E5M2{}, DType::kF8E5M2, 256);
  both(F8E4M3FNUZ{}, DType::kF8E4M3FNUZ, 256);
  both(F8E5M2FNUZ{}, DType::kF8E5M2FNUZ, 256);
  both(F8E8M0FNU{}, DType::kF8E8M0FNU, 256);
}

TEST(Convert, KnownValues) {
  EXPECT_EQ(F16::round(65504.f).bits, 0x7bff);
  EXPECT_EQ(F16::round(65519.f).bits, 0x7bff);
  EXPECT_EQ(F16::round(65520.f).bits, 0x7c00);
  EXPECT_EQ(F16::round(0x1p-25f).bits, 0);
  EXPECT_EQ(F16::round(0x1.8p-25f).bits, 1);
  EXPECT_EQ(F16::round(NAN).bits, 0x7e00);
  EXPECT_EQ(BF16::round(1.00390625f).bits, 0x3f80);
  EXPECT_EQ(BF16::round(3.4028234e38f).bits, 0x7f80);
  EXPECT_EQ(BF16::round(std::bit_cast<float>(0x7f800001u)).bits, 0x7fc0);
  EXPECT_EQ(F8E4M3FN::round(448.f).bits, 0x7e);
  EXPECT_EQ(F8E4M3FN::round(1000.f).bits, 0x7e);
  EXPECT_EQ(F8E4M3FN::round(-INFINITY).bits, 0xfe);
  EXPECT_EQ(F8E4M3FN::round(NAN).bits, 0x7f);
  EXPECT_EQ(F8E5M2::round(61440.f).bits, 0x7c);
  EXPECT_EQ(F8E4M3FNUZ::round(1000.f).bits, 0x80);
  EXPECT_EQ(F8E4M3FNUZ::round(-1e-9f).bits, 0);
  EXPECT_EQ(F8E8M0FNU::round(0.f).bits, 0);
  EXPECT_EQ(F8E8M0FNU::round(3.f).bits, 129);
  EXPECT_EQ(F8E8M0FNU::round(INFINITY).bits, 255);
}

TEST(Reduce, RoundsNarrowTypesOnceAtTheEnd) {
  // 2048 + 1 + 1: with rounding after each step, the sum would stay at 2048.
  const uint16_t big = 0x6800, one = 0x3c00;
  const void* srcs[] = {&big, &one, &one};
  for (const Level* l : levels()) {
    uint16_t out = 0;
    l->reduce(DType::kF16, ReduceOp::kSum)(&out, srcs, 3, 1, nullptr);
    EXPECT_EQ(out, 0x6801) << l->name;
  }
}

void moves_exactly_the_bytes(const char* level, CopyFn copy) {
  std::mt19937_64 random(1);
  for (size_t n : {0, 1, 15, 63, 64, 255, 256, 257, 1000, 1024, 4096, 70001}) {
    for (size_t offset : {0, 1, 13}) {
      std::vector<uint8_t> from(n + 64), to(n + 128, 0xa5);
      for (auto& b : from) b = uint8_t(random());
      copy(to.data() + 32 + offset, from.data() + offset, n);
      ASSERT_EQ(std::memcmp(to.data() + 32 + offset, from.data() + offset, n), 0) << level << " " << n;
      for (size_t i = 0; i < 32 + offset; ++i) ASSERT_EQ(to[i], 0xa5) << level << " " << n;
      for (size_t i = 32 + offset + n; i < to.size(); ++i) ASSERT_EQ(to[i], 0xa5) << level << " " << n;
    }
  }
}

TEST(Copy, MovesExactlyTheBytes) {
  for (const Level* l : levels()) {
    moves_exactly_the_bytes(l->name, l->copy);
    if (l->copy_past) moves_exactly_the_bytes(l->name, l->copy_past);
  }
}

}  // namespace
}  // namespace nvx::kernel
