#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/StringUtil.h>

#include <string>
#include <vector>

#include "group/group.h"
#include "torch/core/argument_error.h"
#include "torch/core/tensors.h"

namespace nvx {

/// A value as Python shows it, such as "torch.float32" and "torch.sparse_coo".
std::string in_python(at::ScalarType type);
std::string in_python(at::Layout layout);
template <class T>
const T& in_python(const T& value) {
  return value;
}

/// Why a dense tensor has no memory that could be read or written; empty if it has, or needs none.
std::string why_no_memory(const at::Tensor& tensor);

/// The checks of a call's tensors that torch's users expect, with torch's error classes and texts.
class Checks {
 public:
  /// name: of the call in torch.distributed, such as "all_reduce".
  Checks(const char* name, Group& group) : name_(name), rank_(group.rank()), size_(group.size()), group_(group) {}

  [[noreturn]] void invalid(const auto&... what) const {
    throw_argument_error(explained(c10::str(in_python(what)...)));
  }
  [[noreturn]] void invalid_type(const auto&... what) const {
    throw_argument_type_error(explained(c10::str(in_python(what)...)));
  }

  /// The only tensor of a list; raises if there is not exactly one.
  at::Tensor& single(Tensors& tensors) const;
  /// side: "input ", "output " or "".
  void check_single(const Tensors& tensors, const char* side = "") const;
  void check_tensor(const at::Tensor& tensor) const;
  void check_place(const at::Tensor& tensor) const;
  void check_list(const Tensors& tensors) const;
  void check_same_length(size_t outputs, size_t inputs) const;
  /// Checks that there is a list for each rank, with an output for each input.
  void check_coalesced(const std::vector<Tensors>& outputs, const Tensors& inputs) const;
  void check_reduced(const Tensors& tensors) const;

 protected:
  void check_alike(const Tensors& tensors, const at::Tensor& like) const;
  void check_type(const Tensors& tensors, size_t index, const at::Tensor& like) const;
  void check_size(const Tensors& tensors, size_t index, const at::Tensor& like) const;
  void check_root(int64_t root) const;
  void check_splits(const std::vector<int64_t>& splits, const at::Tensor& tensor, const std::string& side) const;
  /// Checks two tensors, one of which is the whole of all ranks' parts, the other a part.
  void check_times_size(const at::Tensor& out, const at::Tensor& in, const at::Tensor& whole) const;
  void check_writable(const at::Tensor& tensor) const;
  void same_type(const at::Tensor& a, const at::Tensor& b) const;
  /// Checks that the root has one list, with a tensor for each rank, and the others none. side: "input" or "output".
  void check_lists_at_root(const std::vector<Tensors>& lists, const std::string& side, int64_t root) const;

  const char* name_;
  int rank_;
  int size_;

 private:
  void check_layout(const Tensors& tensors, size_t index, const at::Tensor& like) const;
  /// Adds the call, this rank, its group, and what to do.
  std::string explained(const std::string& wrong) const;

  Group& group_;
};

}  // namespace nvx
