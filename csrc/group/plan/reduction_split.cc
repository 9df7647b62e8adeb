#include "group/plan/reduction_split.h"

#include <bit>

namespace nvx {
namespace {

/// The floats of fewer than 4 bytes, as in `kernel/reduce/reduce.h`. DType has the integers before the floats.
bool accumulates_wider(DType dtype) { return dtype >= DType::kF16 && size_of(dtype) < 4; }

}  // namespace

ReductionSplit split_of(DType dtype, ReduceOp op, double factor, size_t ranks) {
  if (op == ReduceOp::kPremulSum) return {.inside = op, .factor = factor};
  if (op != ReduceOp::kAvg) return {.inside = op, .between = op};
  if (!accumulates_wider(dtype)) return {.divisor = double(ranks)};
  const auto scale = double(std::bit_ceil(ranks));
  return {.inside = ReduceOp::kPremulSum, .factor = 1 / scale, .divisor = double(ranks) / scale};
}

}  // namespace nvx
