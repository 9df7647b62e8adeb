#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <functional>
#include <span>
#include <vector>

#include "base/hash.h"
#include "kernel/reduce/dtype.h"
#include "kernel/reduce/level.h"
#include "support/numbers.h"

/// The inputs of ranks and the expected outputs. Every rank can compute every other one's input.
namespace nvx::test {

using Bytes = std::vector<std::byte>;

/// The kind of numbers: near one; so small that many are subnormal; or any bits, including infinities, NaNs and the
/// largest numbers.
enum class Nature { kNearOne, kTiny, kWild };

/// The free and the fixed bits of an element's bytes. Unless the numbers are wild, no sum of a few elements is
/// infinite, and none is NaN.
struct Taming {
  uint8_t keep[16];
  uint8_t set[16];

  explicit Taming(DType dtype, Nature nature = Nature::kNearOne) {
    const bool real = dtype == DType::kF16 || dtype == DType::kBF16 || dtype == DType::kF32 || dtype == DType::kF64;
    const bool complex = dtype == DType::kC64 || dtype == DType::kC128;
    const size_t width = dtype == DType::kC64 ? 4 : dtype == DType::kC128 ? 8 : size_of(dtype);
    for (size_t i = 0; i < 16; ++i) {
      keep[i] = 0xff, set[i] = 0;
      const bool top = i % width == width - 1;
      if (dtype == DType::kBool) keep[i] = 1;
      if (dtype >= DType::kF8E4M3FN) keep[i] = 0xbf;
      if (dtype == DType::kF8E8M0FNU) keep[i] = 7, set[i] = 0x78;
      if (nature == Nature::kWild) keep[i] = 0xff, set[i] = 0;
      if (nature == Nature::kWild || (!real && !complex)) continue;
      if (nature == Nature::kNearOne && top) keep[i] = 0x81, set[i] = 0x3c;
      if (nature == Nature::kNearOne) continue;
      // Of the exponent, only the lowest bit.
      if (top) keep[i] = dtype == DType::kF16 ? 0x87 : 0x80;
      if (width == 8 && i % width == width - 2) keep[i] = 0x1f;
    }
  }
};

/// n elements of a rank's input in round `round`; they differ by rank, round and place.
inline Bytes input(DType dtype, size_t n, int rank, uint64_t round, Nature nature = Nature::kNearOne) {
  Bytes bytes(n * size_of(dtype));
  const Taming taming(dtype, nature);
  const uint64_t seed = Hash().add(uint64_t(rank)).add(round).value();
  for (size_t i = 0; i < bytes.size(); ++i) {
    const uint8_t bits = uint8_t((seed ^ (i * 0x9e3779b97f4a7c15u)) >> 37);
    bytes[i] = std::byte((bits & taming.keep[i % 16]) | taming.set[i % 16]);
  }
  if (nature == Nature::kWild) sprinkle(dtype, bytes, seed);
  return bytes;
}

/// The reduction of all ranks' elements [first, first + n), straight from their inputs.
inline Bytes reduced(DType dtype, ReduceOp op, const std::vector<Bytes>& inputs, size_t first, size_t n,
                     const std::vector<double>& factors) {
  Bytes out(n * size_of(dtype));
  std::vector<const void*> sources;
  for (const Bytes& in : inputs) sources.push_back(in.data() + first * size_of(dtype));
  if (n != 0) kernel::level().reduce(dtype, op)(out.data(), sources.data(), int(inputs.size()), n, factors.data());
  return out;
}

/// Returns memory of so many bytes for a tensor, or null if the tensor allocates its own.
using SlotRequest = std::function<std::byte*(size_t)>;

/// User memory at an odd address, with guard bytes before and behind it.
class Tensor {
 public:
  explicit Tensor(size_t bytes, size_t shift = 0, const SlotRequest& room = nullptr) : shift_(shift), bytes_(bytes) {
    const size_t all = bytes + 2 * kGuard;
    std::byte* at = room ? room(all) : nullptr;
    if (!at) own_.resize(all), at = own_.data();
    all_ = {at, all};
    std::fill(all_.begin(), all_.end(), std::byte(0xEE));
  }
  explicit Tensor(const Bytes& from, size_t shift = 0, const SlotRequest& room = nullptr)
      : Tensor(from.size(), shift, room) {
    if (!from.empty()) std::memcpy(data(), from.data(), from.size());
  }
  Tensor(Tensor&&) = default;
  Tensor& operator=(Tensor&&) = default;

  std::byte* data() { return all_.data() + kGuard / 2 + shift_; }
  size_t size() const { return bytes_; }
  bool holds(const Bytes& want) { return std::equal(want.begin(), want.end(), data(), data() + bytes_); }
  bool guards_are_whole() const {
    const size_t before = kGuard / 2 + shift_;
    for (size_t i = 0; i < all_.size(); ++i) {
      if ((i < before || i >= before + bytes_) && all_[i] != std::byte(0xEE)) return false;
    }
    return true;
  }

 private:
  static constexpr size_t kGuard = 128;

  Bytes own_;
  std::span<std::byte> all_;
  size_t shift_;
  size_t bytes_;
};

}  // namespace nvx::test
