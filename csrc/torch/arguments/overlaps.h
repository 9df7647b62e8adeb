#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <vector>

#include "torch/core/tensors.h"

namespace nvx {

/// The memory of a contiguous tensor; empty for other tensors, which get stand-ins.
MemorySpan span_of(const at::Tensor& tensor);

/// Whether an input shares memory with an output, so that a receive might overwrite the input before it is sent. False
/// if they are counterparts in the same memory, as in an in-place operation.
bool clash(const at::Tensor& input, const at::Tensor& output, bool counterparts);
/// The same for a list of outputs, each compared with several inputs.
class Outputs {
 public:
  explicit Outputs(const Tensors& tensors);
  bool clash(const at::Tensor& input, size_t counterpart) const;
  /// Whether output p shares memory with an earlier one in the list. On every rank that memory must finally hold the
  /// data of the last of them. So p gets a stand-in, which is copied back when the operation has ended.
  bool overlaps_earlier(size_t p) const;

 private:
  c10::SmallVector<MemorySpan, 8> spans_;
  c10::SmallVector<MemorySpan, 8> bounds_;  // of strided outputs too, whose stand-ins are copied back; empty: as spans_
};
/// The same for a rank's piece and the whole, one of which is the input. The piece's counterpart is its position there.
bool clash_within(const at::Tensor& piece, const at::Tensor& whole, int rank);

/// For each operation of a call, whether another one may use the same memory, and one of them writes there. Such
/// operations get stand-ins: all inputs are read before the first operation, and the last output wins.
std::vector<bool> share_memory(const std::vector<at::TensorList>& outputs, const Tensors& inputs);

}  // namespace nvx
