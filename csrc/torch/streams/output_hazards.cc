#include "torch/streams/output_hazards.h"

#include <ATen/EmptyTensor.h>

#include <algorithm>

#include "memory/driver/relaxed_capture_guard.h"

namespace nvx {

std::vector<MemorySpan> OutputHazards::Expected::spans_of(const Tensors& tensors) {
  std::vector<MemorySpan> spans;
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.defined() || tensor.numel() == 0) continue;
    const auto* begin = static_cast<const std::byte*>(tensor.const_data_ptr());
    const size_t bytes = at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.itemsize());
    spans.push_back({begin, begin + bytes});
  }
  return spans;
}

void OutputHazards::Expected::set_out(const c10::Stream& stream) {
  there_.record(stream);
  is_out_.store(true, std::memory_order_release);
}

bool OutputHazards::Expected::block(const c10::Stream& stream) {
  if (!is_out_.load(std::memory_order_acquire)) return false;
  there_.block(stream);
  return true;
}

bool OutputHazards::Expected::overlaps(const Tensors& tensors) const {
  const std::vector<MemorySpan> others = spans_of(tensors);
  return std::any_of(spans_.begin(), spans_.end(), [&](const MemorySpan& own) {
    return std::any_of(others.begin(), others.end(), [&](const MemorySpan& other) { return own.overlaps(other); });
  });
}

std::shared_ptr<OutputHazards::Expected> OutputHazards::expect(const Tensors& outputs) {
  auto expected = std::make_shared<Expected>(outputs);
  MutexLock lock(mutex_);
  expected_.push_back(expected);
  return expected;
}

template <class Act>
void OutputHazards::for_each_in(const Tensors& tensors, const Act& act) {
  const RelaxedCaptureGuard relaxed;
  MutexLock lock(mutex_);
  std::erase_if(expected_, [](const auto& expected) { return expected->is_over(); });
  for (const auto& expected : expected_) {
    if (expected->overlaps(tensors)) act(*expected);
  }
}

bool OutputHazards::follow(const Tensors& tensors, const c10::Stream& stream) {
  bool all = true;
  for_each_in(tensors, [&](Expected& expected) { all &= expected.block(stream); });
  return all;
}

bool OutputHazards::awaited_in(const Tensors& tensors) {
  bool any = false;
  for_each_in(tensors, [&](Expected&) { any = true; });
  return any;
}

}  // namespace nvx
