#pragma once

#include <torch/csrc/distributed/c10d/Types.hpp>

#include <string>
#include <vector>

#include "torch/call/work.h"
#include "torch/core/dtypes.h"

namespace nvx {

class Delegate;
class KernelPath;
class HostProxyPath;

/// Turns the tensors of a call into an operation on memory. Each function makes the checks that torch's users expect,
/// with torch's error classes and texts. Tensors that are not contiguous get a stand-in.
class Arguments {
 public:
  /// name: the prefix of error texts, such as "ProcessGroupNVX::allreduce". kernels, delegate, proxies: asked whether
  /// they use a device's tensors in place; null if they must not be asked.
  Arguments(const char* name, int rank, int size, KernelPath* kernels = nullptr, Delegate* delegate = nullptr,
            HostProxyPath* proxies = nullptr)
      : name_(name), rank_(rank), size_(size), kernels_(kernels), delegate_(delegate), proxies_(proxies) {}

  /// apart: other tensors of the call use the same memory, so this one gets a stand-in.
  TensorOperation all_reduce(at::Tensor& tensor, const c10d::ReduceOp& op, bool apart = false) const;
  TensorOperation reduce(at::Tensor& tensor, const c10d::ReduceOp& op, int64_t root) const;
  TensorOperation broadcast(at::Tensor& tensor, int64_t root) const;
  TensorOperation all_gather(std::vector<at::Tensor>& outputs, const at::Tensor& input) const;
  TensorOperation all_gather_base(at::Tensor& output, const at::Tensor& input) const;
  TensorOperation reduce_scatter(at::Tensor& output, const std::vector<at::Tensor>& inputs,
                                 const c10d::ReduceOp& op) const;
  TensorOperation reduce_scatter_base(at::Tensor& output, const at::Tensor& input, const c10d::ReduceOp& op) const;
  TensorOperation gather(std::vector<std::vector<at::Tensor>>& outputs, const at::Tensor& input, int64_t root) const;
  /// The root's output receives all ranks' inputs, one after the other. Other ranks' outputs are ignored.
  TensorOperation gather_base(at::Tensor& output, const at::Tensor& input, int64_t root) const;
  TensorOperation scatter(at::Tensor& output, const std::vector<std::vector<at::Tensor>>& inputs, int64_t root) const;
  TensorOperation all_to_all(std::vector<at::Tensor>& outputs, const std::vector<at::Tensor>& inputs) const;
  TensorOperation all_to_all_base(at::Tensor& output, const at::Tensor& input,
                                  const std::vector<int64_t>& output_splits,
                                  const std::vector<int64_t>& input_splits) const;

  /// Lists of any length, which gloo accepts: CPU tensors of one type and size. A list is treated as one tensor: its
  /// tensors are first reduced with each other, or concatenated. Each of them receives the result.
  TensorOperation all_reduce(std::vector<at::Tensor>& tensors, const c10d::ReduceOp& op) const;
  TensorOperation broadcast(std::vector<at::Tensor>& tensors, int64_t root, int64_t root_tensor) const;
  TensorOperation all_gather(std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs) const;
  void check_list(const std::vector<at::Tensor>& tensors) const;
  /// Checks that there is a list for each rank, with an output for each input.
  void check_coalesced(const std::vector<std::vector<at::Tensor>>& outputs,
                       const std::vector<at::Tensor>& inputs) const;

  /// Checks the tensors of a coalesced all-reduce.
  void check_reduced(const std::vector<at::Tensor>& tensors) const;
  void check_same_length(size_t outputs, size_t inputs) const;
  /// side: "input ", "output " or "".
  void check_single(const std::vector<at::Tensor>& tensors, const std::string& side = "") const;
  void check_place(const at::Tensor& tensor) const;

  /// The only tensor of a list; raises if there is not exactly one.
  at::Tensor& single(std::vector<at::Tensor>& tensors) const;
  void check_tensor(const at::Tensor& tensor) const;
  [[noreturn]] void invalid(const std::string& what) const;
  [[noreturn]] void invalid_type(const std::string& what) const;

 private:
  /// count: the number of elements for the fingerprint.
  TensorOperation begin(kernel::Collective collective, const at::Tensor& like, size_t count = 0) const;
  TensorOperation begin_reduce(kernel::Collective collective, at::Tensor& tensor, const c10d::ReduceOp& op,
                               bool apart) const;
  void ask_delegate(TensorOperation& c, at::TensorList whole) const;
  TensorOperation begin_gather(const at::Tensor& in, int64_t root, bool apart) const;
  void reduces_with(TensorOperation& c, const c10d::ReduceOp& op, const at::Tensor& tensor) const;
  void same_device(const TensorOperation& c, const at::Tensor& tensor) const;
  void same_type(const at::Tensor& a, const at::Tensor& b) const;
  void check_alike(const std::vector<at::Tensor>& tensors, const at::Tensor& like) const;
  void check_root(int64_t root) const;
  void check_splits(const std::vector<int64_t>& splits, const at::Tensor& tensor, const std::string& side) const;
  void check_times_size(const at::Tensor& out, const at::Tensor& in, const at::Tensor& whole) const;
  std::string ranks_of(int64_t root) const;
  /// Checks that there is one list, with a tensor for each rank. side: "input" or "output".
  void one_per_rank(const std::vector<std::vector<at::Tensor>>& lists, const std::string& side) const;
  void check_writable(const at::Tensor& tensor) const;
  /// These three return the memory that the operation uses for a tensor: its own or a stand-in's. apart: an output uses
  /// the tensor's memory as well, so the tensor gets a stand-in.
  const std::byte* input(TensorOperation& c, const at::Tensor& tensor, bool apart = false) const;
  kernel::Piece give(TensorOperation& c, const at::Tensor& tensor, bool apart) const;
  std::byte* output(TensorOperation& c, at::Tensor& tensor, bool apart = false) const;
  std::byte* in_place(TensorOperation& c, at::Tensor& tensor, bool apart = false) const;

  const char* name_;
  int rank_;
  int size_;
  KernelPath* kernels_;
  Delegate* delegate_;
  HostProxyPath* proxies_;
};

}  // namespace nvx
