#include <ATen/MemoryOverlap.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>
#include "base/thread_state.h"
#include "kernel/reduce/level.h"
#include "torch/arguments/arguments.h"

namespace nvx {

TensorOperation Arguments::all_reduce(Tensors& tensors, const c10d::ReduceOp& op) const {
  if (tensors.size() == 1) [[likely]]
    return all_reduce(tensors[0], op);
  check_list(tensors);
  const WithoutAutograd guard;
  // The rank's tensors are reduced first, which rounds once more. Every rank has as many, so the mean of means holds.
  at::Tensor folded = at::empty(tensors[0].sizes(), tensors[0].options());
  TensorOperation c = all_reduce(folded, op);
  const ReduceOp inner = c.operation.op == ReduceOp::kPremulSum ? ReduceOp::kSum : c.operation.op;
  Tensors parts;
  std::vector<const void*> sources;
  for (const at::Tensor& tensor : tensors) {
    check_tensor(tensor);
    check_writable(tensor);
    parts.push_back(tensor.resolve_conj().resolve_neg().contiguous());
    sources.push_back(parts.back().data_ptr());
  }
  const DefaultFloatMode mode;
  kernel::level().reduce(c.operation.dtype, inner)(folded.data_ptr(), sources.data(), int(sources.size()),
                                                   c.operation.count, nullptr);
  for (at::Tensor& tensor : tensors) c.copies_out.emplace_back(tensor.alias(), folded);
  return c;
}

TensorOperation Arguments::broadcast(Tensors& tensors, int64_t root, int64_t root_tensor) const {
  if (root_tensor < 0 || root_tensor >= int64_t(tensors.size()))
    invalid("invalid root tensor: ", root_tensor, ", in a list of ", tensors.size());
  if (tensors.size() == 1) [[likely]]
    return broadcast(tensors[0], root);
  check_list(tensors);
  TensorOperation c = broadcast(tensors[size_t(root_tensor)], root);
  const WithoutAutograd guard;
  const at::Tensor result = c.copies_out.empty() ? tensors[size_t(root_tensor)].alias() : c.copies_out.front().second;
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (int64_t(i) == root_tensor) continue;
    check_tensor(tensors[i]);
    check_writable(tensors[i]);
    if (at::get_overlap_status(tensors[i], result) == at::MemOverlapStatus::Partial)
      invalid("tensors ", i, " and ", root_tensor, " of the list share a part of their memory");
    c.copies_out.emplace_back(tensors[i].alias(), result);
  }
  return c;
}

TensorOperation Arguments::all_gather(std::vector<Tensors>& outputs, Tensors& inputs) const {
  if (inputs.empty()) invalid("requires non-empty input tensor list");
  check_same_length(outputs.size(), inputs.size());
  if (inputs.size() == 1) [[likely]]
    return all_gather(outputs[0], inputs[0]);
  check_list(inputs);
  for (const at::Tensor& in : inputs) check_tensor(in);
  const size_t count = inputs.size();
  for (size_t i = 0; i < count; ++i) {
    if (outputs[i].size() != count * size_t(size_))
      invalid("invalid output tensor list at index ", i, " (expected length ", count * size_t(size_), ", got ",
              outputs[i].size(), ")");
    for (const at::Tensor& out : outputs[i]) {
      check_tensor(out);
      check_writable(out);
    }
    check_alike(outputs[i], inputs[0]);
  }
  const WithoutAutograd guard;
  std::vector<int64_t> shape = inputs[0].sizes().vec();
  shape.insert(shape.begin(), int64_t(count));
  const at::Tensor side_by_side = at::empty(shape, inputs[0].options());
  shape.insert(shape.begin(), size_);
  at::Tensor all = at::empty(shape, side_by_side.options());
  TensorOperation c = all_gather_base(all, side_by_side);
  c.stand_ins.push_back(side_by_side);
  for (size_t i = 0; i < count; ++i) c.copies_in.emplace_back(inputs[i].alias(), side_by_side[int64_t(i)]);
  const at::Tensor flat = all.flatten(0, 1);
  for (Tensors& list : outputs) {
    for (size_t i = 0; i < list.size(); ++i) c.copies_out.emplace_back(list[i].alias(), flat[int64_t(i)]);
  }
  return c;
}

}  // namespace nvx
