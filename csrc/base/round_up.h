#pragma once

#include <cstddef>

namespace nvx {

constexpr size_t ceil_div(size_t a, size_t b) { return (a + b - 1) / b; }

/// The least multiple of `to` that is not below n.
constexpr size_t round_up(size_t n, size_t to) { return ceil_div(n, to) * to; }

}  // namespace nvx
