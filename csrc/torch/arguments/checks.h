#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/StringUtil.h>

#include <string>
#include <vector>

#include "torch/core/argument_error.h"
#include "torch/core/tensors.h"

namespace nvx {

/// The checks of a call's tensors that torch's users expect, with torch's error classes and texts.
class Checks {
 public:
  /// name: the prefix of error texts, such as "ProcessGroupNVX::allreduce".
  Checks(const char* name, int rank, int size) : name_(name), rank_(rank), size_(size) {}

  [[noreturn]] void invalid(const auto&... what) const { throw_argument_error(name_, ": ", what...); }
  [[noreturn]] void invalid_type(const auto&... what) const { throw_argument_type_error(name_, ": ", what...); }

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
  void check_root(int64_t root) const;
  void check_splits(const std::vector<int64_t>& splits, const at::Tensor& tensor, const std::string& side) const;
  /// Checks two tensors, one of which is the whole of all ranks' parts, the other a part.
  void check_times_size(const at::Tensor& out, const at::Tensor& in, const at::Tensor& whole) const;
  void check_writable(const at::Tensor& tensor) const;
  void same_type(const at::Tensor& a, const at::Tensor& b) const;
  /// Checks that there is one list on the root, with a tensor for each rank, and none on the other ranks. side: "input"
  /// or "output".
  void check_lists_at_root(const std::vector<Tensors>& lists, const std::string& side, int64_t root) const;

  const char* name_;
  int rank_;
  int size_;

 private:
  void check_layout(const Tensors& tensors, size_t index, const at::Tensor& like) const;
};

}  // namespace nvx
