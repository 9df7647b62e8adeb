#pragma once

#include <torch/csrc/distributed/c10d/Types.hpp>

#include <vector>

#include "torch/arguments/checks.h"
#include "torch/call/work.h"
#include "torch/core/tensors.h"

namespace nvx {

class Delegate;
class KernelPath;
class HostProxyPath;

/// Turns the tensors of a call into an operation on memory. Tensors that are not contiguous get a stand-in.
class Arguments : public Checks {
 public:
  /// kernels, delegate, proxies: queried whether they use a device's tensors in place; null if they must not be
  /// queried.
  Arguments(const char* name, Group& group, KernelPath* kernels, Delegate* delegate, HostProxyPath* proxies)
      : Checks(name, group), kernels_(kernels), delegate_(delegate), proxies_(proxies) {}

  /// apart: other operations of the call use the same memory, so the tensors get stand-ins.
  TensorOperation all_reduce(at::Tensor& tensor, const c10d::ReduceOp& op, bool apart = false) const;
  TensorOperation reduce(at::Tensor& tensor, const c10d::ReduceOp& op, int64_t root) const;
  TensorOperation broadcast(at::Tensor& tensor, int64_t root) const;
  TensorOperation all_gather(Tensors& outputs, const at::Tensor& input, bool apart = false) const;
  TensorOperation all_gather_base(at::Tensor& output, const at::Tensor& input, bool apart = false) const;
  TensorOperation reduce_scatter(at::Tensor& output, const Tensors& inputs, const c10d::ReduceOp& op) const;
  TensorOperation reduce_scatter_base(at::Tensor& output, const at::Tensor& input, const c10d::ReduceOp& op,
                                      bool apart = false) const;
  TensorOperation gather(std::vector<Tensors>& outputs, const at::Tensor& input, int64_t root) const;
  /// The root's output receives all ranks' inputs, one after the other. Other ranks' outputs are ignored.
  TensorOperation gather_base(at::Tensor& output, const at::Tensor& input, int64_t root) const;
  TensorOperation scatter(at::Tensor& output, const std::vector<Tensors>& inputs, int64_t root) const;
  TensorOperation all_to_all(Tensors& outputs, const Tensors& inputs) const;
  TensorOperation all_to_all_base(at::Tensor& output, const at::Tensor& input,
                                  const std::vector<int64_t>& output_splits,
                                  const std::vector<int64_t>& input_splits) const;

  /// Lists of any length, which gloo accepts: CPU tensors of one type and size. A list is treated as one tensor: its
  /// tensors are first reduced with each other, or concatenated. Each of them receives the result.
  TensorOperation all_reduce(Tensors& tensors, const c10d::ReduceOp& op) const;
  TensorOperation broadcast(Tensors& tensors, int64_t root, int64_t root_tensor) const;
  TensorOperation all_gather(std::vector<Tensors>& outputs, Tensors& inputs) const;

 private:
  /// Collects the facts that choose the route. whole: all tensors, if a delegate may run it. op: of a reduction.
  TensorOperation begin(kernel::Collective collective, const at::Tensor& like, at::TensorList whole = {},
                        const c10d::ReduceOp* op = nullptr) const;
  TensorOperation begin_reduce(kernel::Collective collective, at::Tensor& tensor, const c10d::ReduceOp& op, bool apart,
                               bool written) const;
  TensorOperation begin_rooted(kernel::Collective collective, const at::Tensor& own, int64_t root) const;
  void reduces_with(TensorOperation& c, const c10d::ReduceOp& op, const at::Tensor& tensor) const;
  void same_device(const TensorOperation& c, const at::Tensor& tensor) const;
  /// These four return the memory that the operation uses for a tensor: its own or a stand-in's. apart: an output uses
  /// the tensor's memory as well, so the tensor gets a stand-in. filled: the operation reads an output, too.
  const std::byte* input(TensorOperation& c, const at::Tensor& tensor, bool apart = false) const;
  kernel::Piece input_piece(TensorOperation& c, const at::Tensor& tensor, bool apart) const;
  std::byte* output(TensorOperation& c, at::Tensor& tensor, bool apart = false, bool filled = false) const;
  /// For a tensor that other ranks write, and this rank only reads.
  std::byte* only_read(TensorOperation& c, const at::Tensor& tensor) const {
    return const_cast<std::byte*>(input(c, tensor));
  }

  KernelPath* kernels_;
  Delegate* delegate_;
  HostProxyPath* proxies_;
};

}  // namespace nvx
