#pragma once

// The narrow floating-point formats: exact widening to float, and rounding from float to nearest, ties to even. Finite
// results, infinities and overflow match torch bit for bit. There is no control flow, so that loops over these
// functions vectorise.
//
// Everything here lives in a namespace named after the instruction-set level that compiles it: the linker must never
// let one level call code that was generated for another. For the same reason nothing from std is called.

#include <cstdint>

#ifndef NVX_HD
#define NVX_HD
#endif
#define NVX_RULE NVX_HD __attribute__((always_inline)) inline  // loops vectorise only if it is inlined

#ifndef NVX_LEVEL
#define NVX_LEVEL plain
#endif

namespace nvx::kernel {
inline namespace NVX_LEVEL {

NVX_RULE uint32_t bits_of(float f) { return __builtin_bit_cast(uint32_t, f); }
NVX_RULE float float_of(uint32_t u) { return __builtin_bit_cast(float, u); }

/// 2^e, for the exponents of normal floats.
NVX_RULE constexpr float power_of_two(int e) { return __builtin_bit_cast(float, uint32_t(127 + e) << 23); }

/// Magnitudes are below 2^31, and older vector units compare only signed numbers.
NVX_RULE uint32_t below(uint32_t a, uint32_t b) { return int32_t(a) < int32_t(b) ? ~0u : 0u; }
/// mask is all ones or all zeros.
NVX_RULE uint32_t select(uint32_t mask, uint32_t yes, uint32_t no) { return (yes & mask) | (no & ~mask); }
NVX_RULE uint32_t mask_of(bool condition) { return condition ? ~0u : 0u; }

/// The meaning of the codes above the largest finite number.
enum class Top {
  kInfNan,  // IEEE 754: infinity, then NaNs
  kNan,     // one code per sign is NaN, no infinity: overflow gives the largest number, as in torch since 2.13
  kNegZero  // no infinity, no negative zero: the code of negative zero is the only NaN
};

/// A floating-point format of 1 + kExp + kMan bits.
template <class Bits, int kExp, int kMan, int kBias, Top kTop>
struct SmallFloat {
  Bits bits;

  static constexpr uint32_t kSign = 1u << (kExp + kMan);
  static constexpr uint32_t kMagnitude = kSign - 1;
  static constexpr uint32_t kInfinity = kMagnitude >> kMan << kMan;  // only where kTop is kInfNan
  static constexpr uint32_t kNan = sizeof(Bits) == 1 ? kMagnitude : kInfinity | (1u << (kMan - 1));
  static constexpr int kShift = 23 - kMan;
  static constexpr uint32_t kRebias = uint32_t(127 - kBias) << 23;
  static constexpr int kSubnormalUnit = 1 - kBias - kMan;  // the exponent of the subnormal unit

  NVX_RULE static float widen(SmallFloat x) {
    const uint32_t magnitude = x.bits & kMagnitude;
    const uint32_t normal = (magnitude << kShift) + kRebias;
    const uint32_t subnormal = bits_of(float(int32_t(magnitude)) * power_of_two(kSubnormalUnit));
    uint32_t u = select(below(magnitude, 1u << kMan), subnormal, normal);
    if constexpr (kTop == Top::kInfNan) u |= below(kInfinity - 1, magnitude) & 0x7f800000u;
    if constexpr (kTop == Top::kNan) u |= below(kNan - 1, magnitude) & 0x7fc00000u;
    if constexpr (kTop == Top::kNegZero) u |= mask_of(x.bits == kSign) & 0x7fc00000u;
    return float_of(u | uint32_t(x.bits & kSign) << (31 - kExp - kMan));
  }

  NVX_RULE static SmallFloat round(float f) {
    // Adding a power of two whose last place is the subnormal unit makes the addition round to that unit.
    constexpr float kMagic = power_of_two(kSubnormalUnit + 23);
    const uint32_t u = bits_of(f) & 0x7fffffffu;
    const uint32_t sign = bits_of(f) >> (31 - kExp - kMan) & kSign;
    const uint32_t subnormal = bits_of(float_of(u) + kMagic) - bits_of(kMagic);
    const uint32_t half_up = (1u << (kShift - 1)) - 1 + (u >> kShift & 1);
    const uint32_t normal = (u + half_up - kRebias) >> kShift;
    uint32_t out = select(below(u, bits_of(power_of_two(1 - kBias))), subnormal, normal);
    if constexpr (kTop == Top::kInfNan) {
      out = select(below(kInfinity, out), kInfinity, out);
      out = select(below(0x7f800000u, u), kNan, out);
    }
    if constexpr (kTop == Top::kNan) {
      out = select(below(kNan - 1, out), kNan - 1, out);
      out = select(below(0x7f800000u, u), kNan, out);
    }
    if constexpr (kTop == Top::kNegZero) {
      const uint32_t overflow = below(kMagnitude, out);
      const uint32_t zero = mask_of(out == 0);
      return {Bits(select(overflow, kSign, out | (sign & ~zero)))};
    }
    return {Bits(out | sign)};
  }
};

using F16 = SmallFloat<uint16_t, 5, 10, 15, Top::kInfNan>;
using F8E4M3FN = SmallFloat<uint8_t, 4, 3, 7, Top::kNan>;
using F8E5M2 = SmallFloat<uint8_t, 5, 2, 15, Top::kInfNan>;
using F8E4M3FNUZ = SmallFloat<uint8_t, 4, 3, 8, Top::kNegZero>;
using F8E5M2FNUZ = SmallFloat<uint8_t, 5, 2, 16, Top::kNegZero>;

/// The upper half of a float.
struct BF16 {
  uint16_t bits;

  NVX_RULE static float widen(BF16 x) { return float_of(uint32_t(x.bits) << 16); }
  NVX_RULE static BF16 round(float f) {
    const uint32_t u = bits_of(f);
    const uint32_t rounded = (u + 0x7fffu + (u >> 16 & 1)) >> 16;
    return {uint16_t(select(below(0x7f800000u, u & 0x7fffffffu), 0x7fc0u, rounded))};
  }
};

/// The exponent of a float: powers of two from 2^-127 and one NaN, without zero and sign. Rounding drops the sign,
/// turns zero into 2^-127 and rounds halves up, except from a subnormal float.
struct F8E8M0FNU {
  uint8_t bits;

  NVX_RULE static float widen(F8E8M0FNU x) {
    const uint32_t e = x.bits;
    return float_of((e << 23) | (mask_of(e == 0) & 0x00400000u) | (mask_of(e == 255) & 0x00400000u));
  }
  NVX_RULE static F8E8M0FNU round(float f) {
    const uint32_t u = bits_of(f) & 0x7fffffffu;
    const uint32_t e = (u + 0x3fffffu + (u >= 0x00800000u ? 1u : 0u)) >> 23;
    return {uint8_t(e > 255 ? 255 : e)};
  }
};

}  // namespace NVX_LEVEL
}  // namespace nvx::kernel
