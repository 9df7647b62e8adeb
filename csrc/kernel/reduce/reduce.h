#pragma once

// How each element type accumulates, combines and rounds. Every loop on every device uses these rules.
//
//   type                    accumulator   rounding
//   f16 bf16 fp8            f32           once, at the end, to nearest even
//   f32 f64 complex         itself        each operation
//   integers                itself        wraps; AVG truncates toward zero
//   bool                    0 or 1        any nonzero byte counts as 1
//
// A reduction combines the ranks in order 0, 1, 2, ... AVG divides the accumulator once. MIN and MAX propagate NaN; of
// equal values (0.0 and -0.0) they take the later rank's. PREMUL_SUM multiplies each rank's widened input by that
// rank's factor before the sum. Undefined pairs (is_defined) are not instantiated.

#include <type_traits>

#include "kernel/reduce/dtype.h"
#include "kernel/reduce/float_bits.h"

namespace nvx::kernel {
inline namespace NVX_LEVEL {

struct Bool {
  uint8_t bits;
};

template <class F>
struct Complex {
  F re, im;
};

template <class A, class B>
inline constexpr bool kSame = std::is_same_v<A, B>;
template <class T>
inline constexpr bool kIsFloat = std::is_floating_point_v<T>;
template <class T>
inline constexpr bool kIsComplex = false;
template <class F>
inline constexpr bool kIsComplex<Complex<F>> = true;

/// Rule<T>: the accumulator type, the conversion of an element to it, and the rounding back.
template <class T>
struct Rule {  // f32, f64, complex and integers accumulate in their own type
  using Acc = T;
  NVX_RULE static Acc widen(T x) { return x; }
  NVX_RULE static T round(Acc a) { return a; }
};

template <class T>
struct NarrowRule {
  using Acc = float;
  NVX_RULE static Acc widen(T x) { return T::widen(x); }
  NVX_RULE static T round(Acc a) { return T::round(a); }
};
template <>
struct Rule<BF16> : NarrowRule<BF16> {};
template <>
struct Rule<F8E8M0FNU> : NarrowRule<F8E8M0FNU> {};
template <class Bits, int kExp, int kMan, int kBias, Top kTop>
struct Rule<SmallFloat<Bits, kExp, kMan, kBias, kTop>> : NarrowRule<SmallFloat<Bits, kExp, kMan, kBias, kTop>> {};

template <>
struct Rule<Bool> {
  using Acc = uint8_t;
  NVX_RULE static Acc widen(Bool x) { return x.bits != 0; }
  NVX_RULE static Bool round(Acc a) { return {a}; }
};

/// Integers narrower than int would be promoted to int, whose overflow is undefined. So these rules compute in an
/// unsigned type.
template <class A>
using Wrapping = std::conditional_t<std::is_integral_v<A>, std::conditional_t<sizeof(A) == 8, uint64_t, uint32_t>, A>;

template <class A>
NVX_RULE A add(A a, A b) {
  using W = Wrapping<A>;
  return A(W(a) + W(b));
}
template <class F>
NVX_RULE Complex<F> add(Complex<F> a, Complex<F> b) {
  return {a.re + b.re, a.im + b.im};
}

template <class A>
NVX_RULE A multiply(A a, A b) {
  using W = Wrapping<A>;
  return A(W(a) * W(b));
}
template <class F>
NVX_RULE Complex<F> multiply(Complex<F> a, Complex<F> b) {
  return {a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re};
}

template <class A>
NVX_RULE A lower(A a, A b) {
  if constexpr (kIsFloat<A>) return ((a < b) | (a != a)) ? a : b;
  return a < b ? a : b;
}
template <class A>
NVX_RULE A higher(A a, A b) {
  if constexpr (kIsFloat<A>) return ((a > b) | (a != a)) ? a : b;
  return a > b ? a : b;
}

/// Integers of up to 32 bits are divided in a floating-point type that holds both operands exactly. Truncation of the
/// correctly rounded quotient then equals integer division: below the next integer the quotient differs from it by at
/// least 1/ranks, which is more than the rounding error.
template <class A>
NVX_RULE A divide(A a, int ranks) {
  if constexpr (kIsFloat<A>) return a / A(ranks);
  if constexpr (sizeof(A) <= 2) return A(int32_t(float(a) / float(ranks)));
  if constexpr (sizeof(A) == 4) return A(double(a) / double(ranks));
  return A(a / A(ranks));
}

/// One rank's element, converted and scaled for the combination.
template <ReduceOp kOp, class T>
NVX_RULE typename Rule<T>::Acc term(T x, typename Rule<T>::Acc factor) {
  if constexpr (kOp == ReduceOp::kPremulSum) return Rule<T>::widen(x) * factor;
  return Rule<T>::widen(x);
}

template <ReduceOp kOp, class A>
NVX_RULE A combine(A a, A b) {
  if constexpr (kOp == ReduceOp::kProduct) return multiply(a, b);
  if constexpr (kOp == ReduceOp::kMin) return lower(a, b);
  if constexpr (kOp == ReduceOp::kMax) return higher(a, b);
  if constexpr (kOp == ReduceOp::kBand) return A(a & b);
  if constexpr (kOp == ReduceOp::kBor) return A(a | b);
  if constexpr (kOp == ReduceOp::kBxor) return A(a ^ b);
  if constexpr (kOp == ReduceOp::kSum || kOp == ReduceOp::kAvg || kOp == ReduceOp::kPremulSum) return add(a, b);
}

template <ReduceOp kOp, class T>
NVX_RULE T finish(typename Rule<T>::Acc a, int ranks) {
  if constexpr (kOp == ReduceOp::kAvg) return Rule<T>::round(divide(a, ranks));
  return Rule<T>::round(a);
}

}  // namespace NVX_LEVEL
}  // namespace nvx::kernel
