#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/SmallVector.h>

#include <cstddef>
#include <vector>

namespace nvx {

/// What a contiguous tensor takes; nothing for others, which get stand-ins.
struct MemorySpan {
  const std::byte* begin = nullptr;
  const std::byte* end = nullptr;

  bool meets(const MemorySpan& other) const;
  bool operator==(const MemorySpan&) const = default;
};
MemorySpan span_of(const at::Tensor& tensor);

/// Whether an input uses memory of an output, and not as its counterpart, which is the very same piece. What is
/// received may then be written before what was there is sent.
bool clash(const at::Tensor& input, const at::Tensor& output, bool counterparts);
/// The same for a list of outputs, and one input of several after the other.
class Outputs {
 public:
  explicit Outputs(const std::vector<at::Tensor>& tensors);
  bool clash(const at::Tensor& input, size_t counterpart) const;
  /// Whether one uses memory of another one before it in the list. What is there at the end is the last one's, on every
  /// rank alike, so it is put there when the operation is over.
  bool meets_one_before(size_t p) const;

 private:
  c10::SmallVector<MemorySpan, 8> spans_;
};
/// The same of a rank's piece and the whole, one of which is the input; the counterpart is that piece of the whole.
bool clash_within(const at::Tensor& piece, const at::Tensor& whole, int rank);

/// Of each tensor, whether it may use memory that one before it in the list uses.
std::vector<bool> use_memory_again(const std::vector<at::Tensor>& tensors);

}  // namespace nvx
