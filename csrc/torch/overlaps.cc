#include "torch/overlaps.h"

#include <ATen/EmptyTensor.h>

#include <algorithm>
#include <numeric>

namespace nvx {
namespace {

const std::byte* begin_of(const at::Tensor& tensor) { return static_cast<const std::byte*>(tensor.data_ptr()); }

size_t length_of(const at::Tensor& tensor) { return size_t(tensor.numel()) * tensor.element_size(); }

bool in_one_piece(const at::Tensor& tensor) {
  return tensor.defined() && tensor.layout() == at::kStrided && tensor.is_contiguous();
}

bool share_memory(const at::Tensor& a, const at::Tensor& b) {
  if (!in_one_piece(a) || !in_one_piece(b) || a.device() != b.device()) return false;
  return begin_of(a) < begin_of(b) + length_of(b) && begin_of(b) < begin_of(a) + length_of(a);
}

}  // namespace

bool clash(const at::Tensor& input, const at::Tensor& output, bool counterparts) {
  if (!share_memory(input, output)) return false;
  return !counterparts || begin_of(input) != begin_of(output) || length_of(input) != length_of(output);
}

bool clash(const at::Tensor& input, const std::vector<at::Tensor>& outputs, size_t counterpart) {
  for (size_t p = 0; p < outputs.size(); ++p) {
    if (clash(input, outputs[p], p == counterpart)) return true;
  }
  return false;
}

bool clash_within(const at::Tensor& piece, const at::Tensor& whole, int rank) {
  return share_memory(piece, whole) && begin_of(piece) != begin_of(whole) + size_t(rank) * length_of(piece);
}

std::vector<bool> use_memory_again(const std::vector<at::Tensor>& tensors) {
  std::vector<bool> again(tensors.size());
  if (tensors.size() < 2) return again;
  std::vector<size_t> by_address(tensors.size());
  std::iota(by_address.begin(), by_address.end(), size_t(0));
  const auto begin = [&](size_t i) { return begin_of(tensors[i]); };
  std::sort(by_address.begin(), by_address.end(), [&](size_t a, size_t b) { return begin(a) < begin(b); });
  const auto end = [&](size_t i) {
    const at::Tensor& t = tensors[i];
    return begin(i) + at::detail::computeStorageNbytes(t.sizes(), t.strides(), t.itemsize());
  };
  // Of tensors that hang together, each overlapping one of the others, all but the first in the list.
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
