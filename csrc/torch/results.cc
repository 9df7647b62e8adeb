#include "torch/results.h"

#include <ATen/EmptyTensor.h>

#include <algorithm>

#include "memory/beside_captures.h"

namespace nvx {

std::vector<Results::Way::Range> Results::Way::ranges_of(const std::vector<at::Tensor>& tensors) {
  std::vector<Range> ranges;
  for (const at::Tensor& tensor : tensors) {
    if (!tensor.defined() || tensor.numel() == 0) continue;
    const auto* begin = static_cast<const char*>(tensor.const_data_ptr());
    const size_t bytes = at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.itemsize());
    ranges.push_back({begin, begin + bytes});
  }
  return ranges;
}

Results::Way::Way(const std::vector<at::Tensor>& outputs, c10::DeviceType device)
    : ranges_(ranges_of(outputs)), there_(device) {}

void Results::Way::set_out(const c10::Stream& stream) {
  there_.record(stream);
  is_out_.store(true, std::memory_order_release);
}

bool Results::Way::is_over() { return is_out_.load(std::memory_order_acquire) && there_.query(); }

bool Results::Way::hold_back(const c10::Stream& stream) {
  if (!is_out_.load(std::memory_order_acquire)) return false;
  there_.block(stream);
  return true;
}

bool Results::Way::meets(const std::vector<at::Tensor>& tensors) const {
  for (const Range& other : ranges_of(tensors)) {
    const auto overlaps = [&](const Range& own) { return own.begin < other.end && other.begin < own.end; };
    if (std::any_of(ranges_.begin(), ranges_.end(), overlaps)) return true;
  }
  return false;
}

std::shared_ptr<Results::Way> Results::expect(const std::vector<at::Tensor>& outputs, c10::DeviceType device) {
  auto way = std::make_shared<Way>(outputs, device);
  MutexLock lock(mutex_);
  ways_.push_back(way);
  return way;
}

bool Results::follow(const std::vector<at::Tensor>& tensors, const c10::Stream& stream) {
  const BesideCaptures beside;
  MutexLock lock(mutex_);
  std::erase_if(ways_, [](const auto& way) { return way->is_over(); });
  bool all = true;
  for (const auto& way : ways_) all &= !way->meets(tensors) || way->hold_back(stream);
  return all;
}

bool Results::awaited_in(const std::vector<at::Tensor>& tensors) {
  const BesideCaptures beside;
  MutexLock lock(mutex_);
  std::erase_if(ways_, [](const auto& way) { return way->is_over(); });
  return std::any_of(ways_.begin(), ways_.end(), [&](const auto& way) { return way->meets(tensors); });
}

}  // namespace nvx
