#include <cctype>

#include "kernel/reduce/level.h"
#include "memory/driver/relaxed_capture_guard.h"
#include "torch/arguments/arguments.h"

namespace nvx {
namespace {

ReduceOp op_of(const Arguments& args, const c10d::ReduceOp& op) {
  switch (op.op_) {
    case c10d::ReduceOp::SUM: return ReduceOp::kSum;
    case c10d::ReduceOp::AVG: return ReduceOp::kAvg;
    case c10d::ReduceOp::PRODUCT: return ReduceOp::kProduct;
    case c10d::ReduceOp::MIN: return ReduceOp::kMin;
    case c10d::ReduceOp::MAX: return ReduceOp::kMax;
    case c10d::ReduceOp::BAND: return ReduceOp::kBand;
    case c10d::ReduceOp::BOR: return ReduceOp::kBor;
    case c10d::ReduceOp::BXOR: return ReduceOp::kBxor;
    case c10d::ReduceOp::PREMUL_SUM: return ReduceOp::kPremulSum;
    default: args.invalid("Unhandled ReduceOp: its number is ", int(op.op_));
  }
}

/// Whether the operator applies to the real and imaginary parts independently and in the same way.
bool is_linear(ReduceOp op) { return op == ReduceOp::kSum || op == ReduceOp::kAvg || op == ReduceOp::kPremulSum; }

std::string op_name_of(ReduceOp op) {
  std::string text = name(op);
  for (char& c : text) c = char(std::toupper(c));
  return text;
}

double factor_of(const Arguments& args, const c10d::ReduceOp& op) {
  const auto* supplement = dynamic_cast<const c10d::NCCLPreMulSumSupplement*>(op.supplement_.get());
  if (!supplement)
    args.invalid("ReduceOp.PREMUL_SUM needs a factor: make it with torch.distributed._make_nccl_premul_sum");
  const at::Tensor& factor = supplement->tensor_factor;
  if (!factor.defined()) return supplement->double_factor;
  if (factor.is_cpu()) return factor.item<double>();
  if (capture_of(current_stream(factor.device())) != 0)
    args.invalid("the factor of PREMUL_SUM is on ", factor.device(),
                 ", where a call that is captured into a graph cannot read it: give a number, or a tensor of the CPU");
  const RelaxedCaptureGuard relaxed;
  return factor.item<double>();
}

}  // namespace

void Arguments::reduces_with(TensorOperation& c, const c10d::ReduceOp& op, const at::Tensor& tensor) const {
  c.operation.op = op_of(*this, op);
  if (c.operation.op == ReduceOp::kPremulSum) c.operation.factor = factor_of(*this, op);
  if (tensor.scalar_type() == at::kComplexHalf && is_linear(c.operation.op)) {
    c.operation.dtype = DType::kF16;
    c.operation.count /= size_of(DType::kF16);  // it was in bytes
  }
  if (kernel::level().reduce(c.operation.dtype, c.operation.op)) return;
  const std::string refused = "Cannot use ReduceOp." + op_name_of(c.operation.op) + " with ";
  if (tensor.scalar_type() == at::kBool) invalid_type(refused, "Boolean inputs");
  const bool bitwise =
      c.operation.op == ReduceOp::kBand || c.operation.op == ReduceOp::kBor || c.operation.op == ReduceOp::kBxor;
  if (bitwise) invalid(refused, "non-integral dtype ", tensor.scalar_type());
  invalid_type(refused, tensor.scalar_type(), " inputs");
}

}  // namespace nvx
