#include "group/plan/delegate_plan.h"

#include <algorithm>
#include <iterator>

namespace nvx {
namespace {

/// The reductions that NCCL computes as nvx does, but for the last bits of sums. NCCL divides averages of integers
/// differently, may lose a NaN in minimum and maximum, and lacks or maps the other types and operators.
struct Reduced {
  ReduceOp op;
  bool of_integers;
  bool of_floats;
};
constexpr Reduced kReduced[] = {
    {ReduceOp::kSum, true, true},  {ReduceOp::kProduct, true, true}, {ReduceOp::kAvg, false, true},
    {ReduceOp::kMin, true, false}, {ReduceOp::kMax, true, false},
};
constexpr DType kIntegers[] = {DType::kI8, DType::kU8, DType::kI32, DType::kI64};
constexpr DType kFloats[] = {DType::kF16, DType::kBF16, DType::kF32, DType::kF64};

template <size_t N>
bool is_among(DType dtype, const DType (&list)[N]) {
  return std::ranges::find(list, dtype) != std::end(list);
}

bool reduced_alike(DType dtype, ReduceOp op) {
  return std::ranges::any_of(kReduced, [&](const Reduced& r) {
    return r.op == op && ((r.of_integers && is_among(dtype, kIntegers)) || (r.of_floats && is_among(dtype, kFloats)));
  });
}

const DelegateRule* rule_named(std::string_view name, std::span<const DelegateRule> rules) {
  const auto rule = std::ranges::find(rules, name, &DelegateRule::collective);
  return rule == rules.end() ? nullptr : &*rule;
}

}  // namespace

const DelegateRule* rule_for(kernel::Collective collective, std::span<const DelegateRule> rules) {
  return rule_named(name(collective), rules);
}

bool is_message_delegated(size_t bytes, std::span<const DelegateRule> rules) {
  const DelegateRule* const rule = rule_named("send_recv", rules);
  return rule && bytes != 0 && bytes >= rule->least_bytes;
}

const char* why_not_delegated(const DelegateQuery& q, std::span<const DelegateRule> rules) {
  const DelegateRule* rule = rule_for(q.collective, rules);
  if (!rule) return "NVX_DELEGATE does not name it";
  if (q.bytes < rule->least_bytes) return "it is smaller than the limit in NVX_DELEGATE";
  if (q.bytes == 0) return "there is nothing to move";
  if (reduces(q.collective) && !reduced_alike(q.dtype, q.op)) return "NCCL reduces this type differently";
  return nullptr;
}

}  // namespace nvx
