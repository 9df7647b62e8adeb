#pragma once

#include <cstddef>
#include <span>

#include "kernel/reduce/cache_policy.h"
#include "kernel/reduce/dtype.h"

namespace nvx::kernel {

/// dst[i] = round(op over srcs[0..ranks) [i]), summed in rank order, in the accumulator that kernel/reduce/reduce.h
/// gives the type. dst may be the very same memory as one of srcs; any other overlap is not allowed. No alignment is
/// assumed. factors holds one multiplier a rank for kPremulSum and is not read otherwise.
using ReduceFn = void (*)(void* dst, const void* const* srcs, int ranks, size_t n, const double* factors);

/// data[i] = data[i] / by, as kAvg divides: for averages whose sums were put together from partial sums. Integers are
/// divided by whole numbers only, and other types by numbers that their accumulator holds exactly.
using DivideFn = void (*)(void* data, size_t n, double by);

/// Copies n bytes between ranges that do not overlap.
using CopyFn = void (*)(void* dst, const void* src, size_t n);

/// The bulk loops, compiled once for each instruction-set level.
struct Level {
  const char* name;
  CopyFn copy;
  CopyFn copy_past;                     // past this core's caches, and visible before any later store; may be nullptr
  ReduceFn (*reduce)(DType, ReduceOp);  // nullptr where the pair has no meaning
  DivideFn (*divide)(DType);            // nullptr where kAvg has none

  CopyFn copy_by(CachePolicy policy) const { return policy == CachePolicy::kPast && copy_past ? copy_past : copy; }
};

/// The levels that this machine can run, the best last. All give the same bits, except for the payloads and signs of
/// NaNs.
std::span<const Level* const> levels();

/// The best level this machine can run, or the one that NVX_CPU_LEVEL names; picked once.
const Level& level();

}  // namespace nvx::kernel
