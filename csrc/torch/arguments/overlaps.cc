#include "torch/arguments/overlaps.h"

#include <ATen/EmptyTensor.h>

#include <algorithm>
#include <numeric>

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

std::vector<bool> use_memory_again(const Tensors& tensors) {
  std::vector<bool> again(tensors.size());
  if (tensors.size() < 2) return again;
  std::vector<size_t> by_address(tensors.size());
  std::iota(by_address.begin(), by_address.end(), size_t(0));
  const auto begin = [&](size_t i) { return begin_of(tensors[i]); };
  std::ranges::sort(by_address, {}, begin);
  const auto end = [&](size_t i) { return bounds_of(tensors[i]).end; };
  // In each chain of overlapping tensors, marks all but the one that is first in the list.
  size_t first = by_address[0];
  const std::byte* reach = end(first);
  for (size_t k = 1; k < by_address.size(); ++k) {
    const size_t here = by_address[k];
    const bool hangs_together = begin(here) < reach;
    if (hangs_together) again[std::max(here, first)] = true;
    first = hangs_together ? std::min(here, first) : here;
    reach = std::max(reach, end(here));
  }
  return again;
}

}  // namespace nvx
