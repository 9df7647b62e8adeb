#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <cstddef>
#include <vector>

namespace nvx {

/// The memory of a contiguous tensor; empty for others, which get stand-ins.
struct MemorySpan {
  const std::byte* begin = nullptr;
  const std::byte* end = nullptr;

  bool meets(const MemorySpan& other) const;
  bool operator==(const MemorySpan&) const = default;
};
MemorySpan span_of(const at::Tensor& tensor);

/// Whether an input shares memory with an output, so that receiving might overwrite it before it is sent. That cannot
/// happen if the output is its counterpart and the very same piece, as in an in-place operation. counterparts: whether
/// it is.
bool clash(const at::Tensor& input, const at::Tensor& output, bool counterparts);
/// The same for a list of outputs, against which several inputs are held.
class Outputs {
 public:
  explicit Outputs(const std::vector<at::Tensor>& tensors);
  bool clash(const at::Tensor& input, size_t counterpart) const;
  /// Whether output p shares memory with one before it in the list. That memory holds in the end what the last of them
  /// gets, on every rank. So p gets a stand-in, which is copied back when the operation has ended.
  bool meets_one_before(size_t p) const;

 private:
  c10::SmallVector<MemorySpan, 8> spans_;
};
/// The same for a rank's piece and the whole, one of which is the input. The counterpart is the rank's place in the
/// whole.
bool clash_within(const at::Tensor& piece, const at::Tensor& whole, int rank);

/// For each tensor, whether it may share memory with one before it in the list.
std::vector<bool> use_memory_again(const std::vector<at::Tensor>& tensors);

}  // namespace nvx
