#pragma once

#include <cstddef>

namespace nvx::test {

inline constexpr size_t K = 1 << 10, M = 1 << 20;

}  // namespace nvx::test
