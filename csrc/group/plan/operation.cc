#include "group/plan/operation.h"

namespace nvx {

using kernel::Collective;

kernel::Fingerprint Operation::fingerprint() const {
  if (whole) return whole->fingerprint;
  const Collective called = precedes == Collective::kNone ? collective : precedes;
  return {called, dtype, reduces(called) ? op : ReduceOp::kSum, kernel::Form::kDense, root, count, shape, 0};
}

std::string describe(const kernel::Fingerprint& f) {
  std::string text = f.collective <= Collective::kBarrier ? name(f.collective) : "an unknown operation";
  if (f.collective == Collective::kBarrier || f.collective == Collective::kNone) return text;
  text += "(";
  if (reduces(f.collective) && size_t(f.op) < kernel::kReduceOpCount) text += std::string(nvx::name(f.op)) + ", ";
  text += size_t(f.dtype) < kernel::kDTypeCount ? nvx::name(f.dtype) : "?";
  if (f.form == kernel::Form::kSparse) text += ", sparse";
  if (f.count) text += ", " + std::to_string(f.count) + (f.count == 1 ? " element" : " elements");
  if (f.root >= 0) text += ", root " + std::to_string(f.root);
  return text + ")";
}

}  // namespace nvx
