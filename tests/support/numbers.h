#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <span>

#include "base/hash.h"
#include "kernel/reduce/dtype.h"

/// Floating-point numbers by their bits, in the layouts of IEEE 754 and the 8-bit formats.
namespace nvx::test {

/// The layout of a number; of a complex number, that of its parts.
struct FloatLayout {
  size_t width;           ///< bytes
  uint64_t infinity = 0;  ///< its bits; larger magnitudes are NaN. 0: there is none

  uint64_t sign() const { return uint64_t(1) << (8 * width - 1); }
};

inline FloatLayout layout_of(DType dtype) {
  switch (dtype) {
    case DType::kF16: return {2, 0x7c00};
    case DType::kBF16: return {2, 0x7f80};
    case DType::kF32:
    case DType::kC64: return {4, 0x7f800000};
    case DType::kF64:
    case DType::kC128: return {8, 0x7ff0000000000000};
    case DType::kF8E5M2: return {1, 0x7c};
    default: return {size_of(dtype)};
  }
}

inline bool is_nan(DType dtype, uint64_t bits) {
  const FloatLayout layout = layout_of(dtype);
  switch (dtype) {
    case DType::kF8E4M3FN: return (bits & 0x7f) == 0x7f;
    case DType::kF8E4M3FNUZ:
    case DType::kF8E5M2FNUZ: return bits == 0x80;
    case DType::kF8E8M0FNU: return bits == 0xff;
    default: return layout.infinity != 0 && (bits & ~layout.sign()) > layout.infinity;
  }
}

/// Makes about one number of four infinite, NaN, the largest, the smallest, or a zero, of either sign, in types that
/// have infinities.
inline void sprinkle(DType dtype, std::span<std::byte> bytes, uint64_t seed) {
  const auto [width, infinity] = layout_of(dtype);
  if (infinity == 0) return;
  const uint64_t special[] = {infinity, infinity + 1, infinity - 1, 1, 0};
  for (size_t i = 0; i < bytes.size() / width; ++i) {
    const uint64_t draw = Hash().add(seed).add(i).value();
    if (draw % 4 != 0) continue;
    const uint64_t sign = draw >> 63 ? layout_of(dtype).sign() : 0;
    const uint64_t bits = special[draw / 4 % std::size(special)] | sign;
    std::memcpy(bytes.data() + i * width, &bits, width);
  }
}

/// Whether both have the same bits, except that all NaNs are equal.
inline bool same_numbers(DType dtype, const std::byte* a, const std::byte* b, size_t bytes) {
  const size_t width = layout_of(dtype).width;
  for (size_t at = 0; at < bytes; at += width) {
    uint64_t of_a = 0, of_b = 0;
    std::memcpy(&of_a, a + at, std::min(width, sizeof of_a));
    std::memcpy(&of_b, b + at, std::min(width, sizeof of_b));
    if (of_a != of_b && !(is_nan(dtype, of_a) && is_nan(dtype, of_b))) return false;
  }
  return true;
}

}  // namespace nvx::test
