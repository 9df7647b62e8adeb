#pragma once

#include <cstddef>

namespace nvx::kernel {

/// A rank's share of a buffer.
struct Piece {
  std::byte* data = nullptr;
  size_t bytes = 0;
};

inline std::byte* advance(const Piece& piece, size_t bytes) { return piece.data ? piece.data + bytes : nullptr; }

constexpr size_t ceil_div(size_t a, size_t b) { return (a + b - 1) / b; }

}  // namespace nvx::kernel
