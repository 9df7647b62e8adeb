#pragma once

#include <cstddef>

#include "base/round_up.h"

namespace nvx::kernel {

/// A rank's share of a buffer.
struct Piece {
  std::byte* data = nullptr;
  size_t bytes = 0;
};

inline std::byte* advance(const Piece& piece, size_t bytes) { return piece.data ? piece.data + bytes : nullptr; }

}  // namespace nvx::kernel
