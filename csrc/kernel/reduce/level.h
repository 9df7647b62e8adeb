#pragma once

#include <cstddef>
#include <span>

#include "kernel/reduce/cache_policy.h"
#include "kernel/reduce/dtype.h"

namespace nvx::kernel {

/// dst[i] = round(op over srcs[0..ranks) [i]), in rank order, in the accumulator that kernel/reduce/reduce.h defines
/// for the type. dst may equal one of srcs; other overlaps are not allowed. Any alignment is allowed. `factors` holds
/// one multiplier per rank and is read for kPremulSum only.
using ReduceFn = void (*)(void* dst, const void* const* srcs, int ranks, size_t n, const double* factors);

/// data[i] = data[i] / by, with kAvg's rounding, for averages of sums that were made from partial sums. `by` must be a
/// whole number for integers, and exact in the accumulator for other types.
using DivideFn = void (*)(void* data, size_t n, double by);

using CopyFn = void (*)(void* dst, const void* src, size_t n);

/// The bulk loops, compiled once per instruction-set level.
struct Level {
  const char* name;
  CopyFn copy;
  CopyFn copy_past;  // bypasses this core's caches; its stores are visible before any later store; may be nullptr
  ReduceFn (*reduce)(DType, ReduceOp);  // nullptr if the type does not have the operator
  DivideFn (*divide)(DType);            // nullptr if the type does not have kAvg

  CopyFn copy_by(CachePolicy policy) const { return policy == CachePolicy::kPast && copy_past ? copy_past : copy; }
};

/// The levels that this machine supports, the best last. All give the same bits, except for payloads and signs of NaNs.
std::span<const Level* const> levels();

/// The best level that this machine supports, or the one that NVX_CPU_LEVEL names. Chosen once.
const Level& level();

}  // namespace nvx::kernel
