#include "group/plan/reduction_split.h"

#include <bit>

namespace nvx {
namespace {

/// Must match `kernel/reduce/reduce.h`.
bool accumulates_wider(DType dtype) {
  switch (dtype) {
    case DType::kF16:
    case DType::kBF16:
    case DType::kF8E4M3FN:
    case DType::kF8E5M2:
    case DType::kF8E4M3FNUZ:
    case DType::kF8E5M2FNUZ:
    case DType::kF8E8M0FNU: return true;
    default: return false;
  }
}

}  // namespace

ReductionSplit split_of(DType dtype, ReduceOp op, double factor, size_t ranks) {
  if (op == ReduceOp::kPremulSum) return {.inside = op, .factor = factor};
  if (op != ReduceOp::kAvg) return {.inside = op, .between = op};
  if (!accumulates_wider(dtype)) return {.divisor = double(ranks)};
  const auto scale = double(std::bit_ceil(ranks));
  return {.inside = ReduceOp::kPremulSum, .factor = 1 / scale, .divisor = double(ranks) / scale};
}

}  // namespace nvx
