#include <ATen/ops/empty.h>
#include <ATen/ops/stack.h>
#include "kernel/reduce/level.h"
#include "torch/arguments/arguments.h"

namespace nvx {

namespace {

template <class Wanted, class There>
std::string at_index(size_t index, const Wanted& wanted, const There& there) {
  return " at index " + std::to_string(index) + " (expected " + c10::str(wanted) + ", got " + c10::str(there) + ")";
}

}  // namespace

/// Raises with gloo's error texts.
void Arguments::check_alike(const std::vector<at::Tensor>& tensors, const at::Tensor& like) const {
  for (size_t i = 0; i < tensors.size(); ++i) {
    const at::Tensor& tensor = tensors[i];
    if (!tensor.defined()) invalid("requires defined tensors, which that at index " + std::to_string(i) + " is not");
    if (tensor.layout() != like.layout())
      invalid("invalid tensor layout" + at_index(i, like.layout(), tensor.layout()));
    if (tensor.scalar_type() != like.scalar_type())
      invalid("invalid tensor type" + at_index(i, like.scalar_type(), tensor.scalar_type()));
    if (tensor.sizes() != like.sizes()) invalid("invalid tensor size" + at_index(i, like.sizes(), tensor.sizes()));
    if (tensor.device() != like.device())
      invalid("tensors must be on the same device" + at_index(i, like.device(), tensor.device()));
  }
}

/// Raises with gloo's error texts, and like gloo allows sizes that differ.
void Arguments::check_reduced(const std::vector<at::Tensor>& tensors) const {
  if (tensors.empty()) invalid("requires non-empty tensor list");
  for (size_t i = 0; i < tensors.size(); ++i) {
    const at::Tensor &first = tensors[0], &tensor = tensors[i];
    if (!tensor.defined()) invalid("requires defined tensors, which that at index " + std::to_string(i) + " is not");
    if (tensor.layout() != first.layout())
      invalid("invalid tensor layout" + at_index(i, first.layout(), tensor.layout()));
    if (tensor.layout() != at::kStrided)
      invalid("unsupported layout: only supports dense tensors" + at_index(i, at::kStrided, tensor.layout()));
    if (tensor.scalar_type() != first.scalar_type())
      invalid("tensors must all have the same type" + at_index(i, first.scalar_type(), tensor.scalar_type()));
    check_tensor(tensor);
  }
}

void Arguments::check_same_length(size_t outputs, size_t inputs) const {
  if (outputs == inputs) return;
  invalid("requires input/output tensor lists to have the same length: there are " + std::to_string(inputs) +
          " inputs and " + std::to_string(outputs) + " outputs");
}

void Arguments::check_list(const std::vector<at::Tensor>& tensors) const {
  if (tensors.empty()) invalid("requires non-empty tensor list");
  if (!tensors[0].defined()) invalid("requires defined tensors");
  if (!tensors[0].is_cpu()) check_single(tensors);
  check_alike(tensors, tensors[0]);
}

void Arguments::check_coalesced(const std::vector<std::vector<at::Tensor>>& outputs,
                                const std::vector<at::Tensor>& inputs) const {
  if (inputs.empty()) invalid("requires non-empty input tensor list");
  if (outputs.size() != size_t(size_))
    invalid("output lists should be equal to world size: " + std::to_string(outputs.size()) + " lists for " +
            std::to_string(size_) + " ranks");
  for (const std::vector<at::Tensor>& list : outputs) {
    if (list.size() != inputs.size())
      invalid("invalid output size: (expected length " + std::to_string(inputs.size()) + ", got " +
              std::to_string(list.size()) + ")");
    for (size_t i = 0; i < list.size(); ++i) {
      if (!list[i].defined() || !inputs[i].defined()) invalid("requires defined tensors");
      if (list[i].sizes() != inputs[i].sizes())
        invalid("invalid size of output tensor" + at_index(i, inputs[i].sizes(), list[i].sizes()));
      if (list[i].scalar_type() != inputs[i].scalar_type())
        invalid("invalid tensor type" + at_index(i, inputs[i].scalar_type(), list[i].scalar_type()));
    }
  }
}

TensorOperation Arguments::all_reduce(std::vector<at::Tensor>& tensors, const c10d::ReduceOp& op) const {
  if (tensors.size() == 1) [[likely]]
    return all_reduce(tensors[0], op);
  check_list(tensors);
  const Movement movement;
  // The rank's own tensors are reduced first, which rounds once more. The mean of the ranks' means is the mean of all,
  // because every rank has the same number of tensors.
  at::Tensor folded = at::empty(tensors[0].sizes(), tensors[0].options());
  TensorOperation c = all_reduce(folded, op);
  const ReduceOp inner = c.operation.op == ReduceOp::kPremulSum ? ReduceOp::kSum : c.operation.op;
  std::vector<at::Tensor> parts;
  std::vector<const void*> sources;
  for (const at::Tensor& tensor : tensors) {
    check_tensor(tensor);
    check_writable(tensor);
    parts.push_back(tensor.resolve_conj().resolve_neg().contiguous());
    sources.push_back(parts.back().data_ptr());
  }
  kernel::level().reduce(c.operation.dtype, inner)(folded.data_ptr(), sources.data(), int(sources.size()),
                                                   c.operation.count, nullptr);
  for (at::Tensor& tensor : tensors) c.take_back.emplace_back(tensor, folded);
  return c;
}

TensorOperation Arguments::broadcast(std::vector<at::Tensor>& tensors, int64_t root, int64_t root_tensor) const {
  if (root_tensor < 0 || root_tensor >= int64_t(tensors.size()))
    invalid("invalid root tensor: " + std::to_string(root_tensor) + ", in a list of " + std::to_string(tensors.size()));
  if (tensors.size() == 1) [[likely]]
    return broadcast(tensors[0], root);
  check_list(tensors);
  TensorOperation c = broadcast(tensors[size_t(root_tensor)], root);
  const at::Tensor result = c.take_back.empty() ? tensors[size_t(root_tensor)] : c.take_back.front().second;
  for (size_t i = 0; i < tensors.size(); ++i) {
    if (int64_t(i) == root_tensor) continue;
    check_tensor(tensors[i]);
    check_writable(tensors[i]);
    c.take_back.emplace_back(tensors[i], result);
  }
  return c;
}

TensorOperation Arguments::all_gather(std::vector<std::vector<at::Tensor>>& outputs,
                                      std::vector<at::Tensor>& inputs) const {
  if (inputs.empty()) invalid("requires non-empty input tensor list");
  check_same_length(outputs.size(), inputs.size());
  if (inputs.size() == 1) [[likely]]
    return all_gather(outputs[0], inputs[0]);
  check_list(inputs);
  const size_t count = inputs.size();
  for (size_t i = 0; i < count; ++i) {
    if (outputs[i].size() != count * size_t(size_))
      invalid("invalid output tensor list at index " + std::to_string(i) + " (expected length " +
              std::to_string(count * size_t(size_)) + ", got " + std::to_string(outputs[i].size()) + ")");
    for (const at::Tensor& out : outputs[i]) {
      check_tensor(out);
      check_writable(out);
    }
    check_alike(outputs[i], inputs[0]);
  }
  const Movement movement;
  const at::Tensor side_by_side = at::stack(inputs);
  std::vector<int64_t> shape = side_by_side.sizes().vec();
  shape.insert(shape.begin(), size_);
  at::Tensor all = at::empty(shape, side_by_side.options());
  TensorOperation c = all_gather_base(all, side_by_side);
  c.stand_ins.push_back(side_by_side);
  const at::Tensor flat = all.flatten(0, 1);
  for (std::vector<at::Tensor>& list : outputs) {
    for (size_t i = 0; i < list.size(); ++i) c.take_back.emplace_back(list[i], flat[int64_t(i)]);
  }
  return c;
}

}  // namespace nvx
