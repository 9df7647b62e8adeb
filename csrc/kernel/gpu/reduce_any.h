#pragma once

#include <cstddef>
#include <cstdint>

#include "kernel/gpu/packs.h"

/// Reductions of general kernels: all types and operators, distinguished at run time, one element at a time. Code for
/// each of them would make these kernels ten times as large.
namespace nvx::kernel {

/// log2 of the bytes of each type's elements, two bits each. A complex number is two elements.
inline constexpr uint64_t kElementBytes = [] {
  uint64_t all = 0;
  for (size_t t = 0; t < kDTypeCount; ++t) {
    const size_t bytes = kDTypes[t].bytes / (DType(t) == DType::kC64 || DType(t) == DType::kC128 ? 2 : 1);
    all |= uint64_t(bytes == 8 ? 3 : bytes / 2) << 2 * t;
  }
  return all;
}();
NVX_HD inline uint32_t element_bits(DType type) { return 8u << (kElementBytes >> 2 * uint32_t(type) & 3); }

/// The types that accumulate as F, float or double.
template <class F>
struct Floats {
  using Acc = F;
  DType type;

  NVX_HD bool is_complex() const { return type == DType::kC64 || type == DType::kC128; }
  NVX_HD F widen(uint64_t x) const {
    if constexpr (sizeof(F) == sizeof(double)) return __builtin_bit_cast(double, x);
    return with_narrow(float_of(uint32_t(x)), [&](auto t) {
      using T = decltype(t);
      return T::widen({decltype(t.bits)(x)});
    });
  }
  NVX_HD uint64_t round(F a) const {
    if constexpr (sizeof(F) == sizeof(double)) return __builtin_bit_cast(uint64_t, a);
    return with_narrow(bits_of(a), [&](auto t) { return uint32_t(decltype(t)::round(a).bits); });
  }
  NVX_HD F combine(ReduceOp op, F a, F b) const {
    switch (op) {
      case ReduceOp::kProduct: return multiply(a, b);
      case ReduceOp::kMin: return lower(a, b);
      case ReduceOp::kMax: return higher(a, b);
      default: return add(a, b);
    }
  }
  NVX_HD F average(F a, uint32_t ranks) const { return divide(a, int(ranks)); }

 private:
  template <class Result, class What>
  NVX_HD Result with_narrow(Result otherwise, What what) const {
    switch (type) {
      case DType::kF16: return what(F16());
      case DType::kBF16: return what(BF16());
      case DType::kF8E4M3FN: return what(F8E4M3FN());
      case DType::kF8E5M2: return what(F8E5M2());
      case DType::kF8E4M3FNUZ: return what(F8E4M3FNUZ());
      case DType::kF8E5M2FNUZ: return what(F8E5M2FNUZ());
      case DType::kF8E8M0FNU: return what(F8E8M0FNU());
      default: return otherwise;
    }
  }
};

/// Integers and bools, in 64 bits: the lower bits of sums and products are those of any narrower type.
struct Integers {
  using Acc = uint64_t;
  DType type;

  NVX_HD bool is_complex() const { return false; }
  NVX_HD bool is_signed() const {
    return type == DType::kI8 || type == DType::kI16 || type == DType::kI32 || type == DType::kI64;
  }
  NVX_HD uint64_t widen(uint64_t x) const {
    const uint32_t above = 64 - element_bits(type);
    x <<= above;
    if (type == DType::kBool) return x != 0;
    return is_signed() ? uint64_t(int64_t(x) >> above) : x >> above;
  }
  NVX_HD uint64_t round(uint64_t a) const { return a; }
  NVX_HD uint64_t combine(ReduceOp op, uint64_t a, uint64_t b) const {
    const uint64_t sign = is_signed() ? uint64_t(1) << 63 : 0;
    const bool is_bool = type == DType::kBool, is_lower = (a ^ sign) < (b ^ sign);
    switch (op) {
      case ReduceOp::kProduct: return a * b;
      case ReduceOp::kMin: return is_lower ? a : b;
      case ReduceOp::kMax: return is_lower ? b : a;
      case ReduceOp::kBand: return a & b;
      case ReduceOp::kBor: return a | b;
      case ReduceOp::kBxor: return a ^ b;
      default: return is_bool ? a | b : a + b;
    }
  }
  NVX_HD uint64_t average(uint64_t a, uint32_t ranks) const {
    a = widen(a);
    const bool is_negative = is_signed() && int64_t(a) < 0;
    const uint64_t quotient = (is_negative ? -a : a) / ranks;
    return is_negative ? -quotient : quotient;
  }
};

inline constexpr int kPacksAhead = 4;

template <class Exec>
NVX_NOINLINE bool load_any(Exec& ex, const Reduction& f, uint32_t rank, size_t i, Pack* packs) {
  return load_ahead<kPacksAhead>(ex, f, rank, uint32_t(i), uint32_t(i) + 1, /*shift=*/0, packs);
}

/// Combines a rank's pack with the accumulators of its elements.
template <class Elements, class Acc = typename Elements::Acc>
NVX_HD void combine_pack(const Elements& elements, ReduceOp op, const Pack& pack, double factor, bool is_first,
                         Acc* sum) {
  const uint32_t bits = element_bits(elements.type);
  Acc x_before{}, a_before{};
  NVX_NO_UNROLL
  for (uint32_t k = 0, at = 0; at < 8 * sizeof(Pack); ++k, at += bits) {
    Acc x = elements.widen(pack.words[at / 64] >> at % 64);
    if constexpr (kIsFloat<Acc>) {
      if (op == ReduceOp::kPremulSum) x = x * Acc(factor);
    }
    const Acc a = sum[k];
    if (is_first) {
      sum[k] = x;
    } else if (op != ReduceOp::kProduct || !elements.is_complex()) {
      sum[k] = elements.combine(op, a, x);
    } else if (k % 2 != 0) {
      const auto product = multiply(Complex<Acc>{a_before, a}, Complex<Acc>{x_before, x});
      sum[k - 1] = product.re, sum[k] = product.im;
    }
    x_before = x, a_before = a;
  }
}

/// The pack of the rounded accumulators.
template <class Elements, class Acc = typename Elements::Acc>
NVX_HD Pack round_pack(const Elements& elements, ReduceOp op, uint32_t ranks, const Acc* sum) {
  const uint32_t bits = element_bits(elements.type);
  Pack out{};
  NVX_NO_UNROLL
  for (uint32_t k = 0, at = 0; at < 8 * sizeof(Pack); ++k, at += bits) {
    const uint64_t x = elements.round(op == ReduceOp::kAvg ? elements.average(sum[k], ranks) : sum[k]);
    out.words[at / 64] |= (x & ~uint64_t(0) >> (64 - bits)) << at % 64;
  }
  return out;
}

/// As reduce_hot(), for any operator of a type.
template <class Elements, class Exec>
NVX_NOINLINE bool reduce_elements(Exec& ex, const Reduction& f, Elements elements) {
  const auto count = uint32_t(ceil_div(f.bytes, sizeof(Pack)));
  NVX_NO_UNROLL
  for (uint32_t i = uint32_t(ex.lane()); i < count; i += uint32_t(ex.lanes())) {
    typename Elements::Acc sum[sizeof(Pack)] = {};
    Pack packs[kPacksAhead];
    NVX_NO_UNROLL
    for (uint32_t r = 0; r < f.ranks; ++r) {
      double factor = 1;
      if (r % kPacksAhead == 0 && !load_any(ex, f, r, i, packs)) return false;
      if (f.op == ReduceOp::kPremulSum && !factor_of(ex, f, r, &factor)) return false;
      combine_pack(elements, f.op, packs[r % kPacksAhead], factor, r == 0, sum);
    }
    store_sum<void>(ex, f, i, round_pack(elements, f.op, f.ranks, sum));
  }
  return true;
}

/// Reduces elements of this type, by an operator that the type has. All lanes call it together. The result is this
/// lane's alone.
template <class Exec>
NVX_HD bool reduce(Exec& ex, DType type, const Reduction& f) {
  if (type == DType::kF64 || type == DType::kC128) return reduce_elements(ex, f, Floats<double>{type});
  return type < DType::kF16 ? reduce_elements(ex, f, Integers{type}) : reduce_elements(ex, f, Floats<float>{type});
}

}  // namespace nvx::kernel
