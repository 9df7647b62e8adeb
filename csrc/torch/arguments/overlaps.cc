#include "torch/arguments/overlaps.h"

#include <ATen/EmptyTensor.h>

#include <algorithm>

namespace nvx {
namespace {

const std::byte* begin_of(const at::Tensor& tensor) { return static_cast<const std::byte*>(tensor.data_ptr()); }

/// From the first to the last element of a dense tensor of any strides.
MemorySpan bounds_of(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.layout() != at::kStrided) return {};
  const std::byte* begin = begin_of(tensor);
  return {begin, begin + at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.itemsize())};
}

}  // namespace

MemorySpan span_of(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.layout() != at::kStrided || !tensor.is_contiguous()) return {};
  return {begin_of(tensor), begin_of(tensor) + tensor.nbytes()};
}

bool clash(const at::Tensor& input, const at::Tensor& output, bool counterparts) {
  const MemorySpan in = span_of(input), out = span_of(output);
  return in.overlaps(out) && !(counterparts && in == out);
}

Outputs::Outputs(const Tensors& tensors) {
  for (const at::Tensor& tensor : tensors) spans_.push_back(span_of(tensor));
  if (std::ranges::all_of(spans_, &MemorySpan::begin)) return;
  for (const at::Tensor& tensor : tensors) bounds_.push_back(bounds_of(tensor));
}

bool Outputs::clash(const at::Tensor& input, size_t counterpart) const {
  const MemorySpan in = span_of(input);
  for (size_t p = 0; p < spans_.size(); ++p) {
    if (in.overlaps(spans_[p]) && !(p == counterpart && in == spans_[p])) return true;
  }
  return false;
}

bool Outputs::overlaps_earlier(size_t p) const {
  const auto& all = bounds_.empty() ? spans_ : bounds_;
  return std::any_of(all.begin(), all.begin() + p, [&](const MemorySpan& earlier) { return earlier.overlaps(all[p]); });
}

bool clash_within(const at::Tensor& piece, const at::Tensor& whole, int rank) {
  const MemorySpan in = span_of(piece), all = span_of(whole);
  return in.overlaps(all) && in.begin != all.begin + size_t(rank) * piece.nbytes();
}

std::vector<bool> share_memory(const std::vector<at::TensorList>& outputs, const Tensors& inputs) {
  struct Use {
    MemorySpan span;
    size_t operation;
    bool written;
  };
  std::vector<bool> shared(inputs.size());
  if (inputs.size() < 2) return shared;
  std::vector<Use> uses;
  for (size_t i = 0; i < inputs.size(); ++i) {
    uses.push_back({bounds_of(inputs[i]), i, false});
    for (const at::Tensor& output : outputs[i]) uses.push_back({bounds_of(output), i, true});
  }
  std::erase_if(uses, [](const Use& use) { return use.span.begin == use.span.end; });
  std::ranges::sort(uses, {}, [](const Use& use) { return use.span.begin; });
  for (auto first = uses.begin(); first != uses.end();) {  // each chain of overlapping spans
    auto last = first;
    bool several = false, written = false;
    for (const std::byte* reach = first->span.end; last != uses.end() && last->span.begin < reach; ++last) {
      reach = std::max(reach, last->span.end);
      several |= last->operation != first->operation;
      written |= last->written;
    }
    for (; first != last; ++first) {
      if (several && written) shared[first->operation] = true;
    }
  }
  return shared;
}

}  // namespace nvx
