#include "torch/symmetric/block.h"

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>

#include <algorithm>
#include <cstring>
#include <list>
#include <utility>

#include "base/per_process.h"
#include "kernel/gpu/capture.h"
#include "memory/driver/beside_captures.h"
#include "torch/communicator.h"
#include "torch/device/kernel_path.h"

namespace nvx {
namespace {

constexpr size_t kAlignment = 128;  // of the pad

size_t round_up(size_t bytes) { return (bytes + kAlignment - 1) / kAlignment * kAlignment; }

/// The addresses of all ranks' data and pads, where kernels of the device read them.
at::Tensor addresses_of(const Symmetric& ranks, c10::Device device) {
  at::Tensor all = at::empty({2, ranks.size()}, at::kLong);
  auto* const at = all.data_ptr<int64_t>();
  for (int r = 0; r < ranks.size(); ++r) {
    at[r] = int64_t(reinterpret_cast<intptr_t>(ranks.data(r)));
    at[ranks.size() + r] = int64_t(reinterpret_cast<intptr_t>(ranks.pad(r)));
  }
  return all.to(device);
}

void* native_stream_of(c10::Device device) {
  return c10::impl::VirtualGuardImpl(device.type()).getStreamNativeHandle(current_stream(device));
}

}  // namespace

/// Dropped blocks of GPUs whose streams have yet to pass the drop.
class RestingBlocks {
 public:
  static RestingBlocks& here() { return of_this_process<RestingBlocks>(); }

  /// A block that a graph may use again, or whose stream takes no event, stays, here and at its peers.
  void add(c10::Device device, std::byte* at, Block::Meetings&& met) {
    const BesideCaptures beside;
    const c10::OptionalDeviceGuard on(device);
    void* const stream = native_stream_of(device);
    auto tail = std::make_unique<kernel::Tail>();
    const bool ends = kernel::capture_of(stream) == 0 && tail->put_behind(stream, /*capture=*/0).ok();
    MutexLock lock(mutex_);
    (ends ? resting_ : kept_).push_back({device.index(), at, std::move(met), std::move(tail)});
  }

  void settle() {
    const BesideCaptures beside;
    MutexLock lock(mutex_);
    for (auto one = resting_.begin(); one != resting_.end();) {
      if (!one->tail->passed()) {
        ++one;
        continue;
      }
      DeviceHome::here()
          .pool(one->device)
          .free_when(reinterpret_cast<DevicePtr>(one->at), Block::leave(std::move(one->met)));
      one = resting_.erase(one);
    }
  }

 private:
  struct Resting {
    int device;
    std::byte* at;
    Block::Meetings met;
    std::unique_ptr<kernel::Tail> tail;
  };
  Mutex mutex_;
  std::list<Resting> resting_ GUARDED_BY(mutex_), kept_ GUARDED_BY(mutex_);
};

Group& group_for(Communicator& communicator, c10::Device device) {
  Group& of_cpu = communicator.context.checked_group();
  if (device.is_cpu()) return of_cpu;
  NVX_CHECK(communicator.issuer.kernels().agree_to_serve(device),
            "symmetric memory on " + device.str() + " needs nvx's kernels, which do not serve group " + of_cpu.name() +
                ": see nvx doctor");
  return *communicator.context.groups.of_devices();
}

Block::Block(size_t bytes, size_t pad_bytes, c10::Device device, std::optional<std::string> group)
    : place_{0, bytes, round_up(bytes), pad_bytes},
      device_(device),
      group_(std::move(group)),
      fork_generation_(fork_generation()),
      neighbours_(Neighbours::here()) {
  NVX_CHECK(bytes <= TensorMemory::kMost && pad_bytes <= TensorMemory::kMost,
            "symm_mem.empty: " + std::to_string(bytes) + " bytes are more than any rank maps");
  device_.is_cpu() ? take_host_memory(place_.pad + pad_bytes) : take_device_memory(place_.pad + pad_bytes);
}

void Block::take_host_memory(size_t bytes) {
  span_ = neighbours_->tensors().allocate(bytes);
  NVX_CHECK(span_,
            "symm_mem.empty: there is no memory that other ranks can map for " + std::to_string(bytes) + " bytes");
  place_.offset = span_.offset;
  data_ = neighbours_->tensors().at(span_);
  std::memset(data_ + place_.pad, 0, place_.pad_bytes);
}

/// Waits for the zeroes: a peer may signal as soon as it has met this rank.
void Block::take_device_memory(size_t bytes) {
  RestingBlocks::here().settle();
  const c10::OptionalDeviceGuard on(device_);
  {
    const BesideCaptures beside;
    DevicePool& pool = DeviceHome::here().pool(device_.index());
    const DevicePtr at = pool.allocate(bytes);
    place_.offset = at - pool.base();
    data_ = reinterpret_cast<std::byte*>(at);
  }
  const auto count = int64_t(place_.pad_bytes);
  const auto options = at::TensorOptions().dtype(at::kByte).device(device_);
  at::for_blob(data_ + place_.pad, {count})
      .options(options)
      .target_device(device_)
      .make_tensor()
      .copy_(at::zeros({count}, at::kByte));
}

/// Peers learn first that this rank has left, so that ranks which wait for each other's blocks all get theirs back.
std::function<bool()> Block::leave(Meetings&& met) {
  std::vector<std::function<bool()>> all;
  for (const auto& meeting : met) all.push_back(meeting->ranks->released());
  met.clear();
  return [all = std::move(all)] {
    return std::all_of(all.begin(), all.end(), [](const auto& released) { return released(); });
  };
}

Block::~Block() {
  Meetings met;
  for (const auto& [id, meeting] : met_) met.push_back(meeting);
  if (fork_generation_ != fork_generation()) {
    new auto(std::move(neighbours_));  // a forked child has not inherited it
  } else if (device_.is_cpu()) {
    met_.clear();
    neighbours_->tensors().free_when(span_, leave(std::move(met)));
  } else {
    RestingBlocks::here().settle();
    RestingBlocks::here().add(device_, data_, std::move(met));
  }
}

std::shared_ptr<const Meeting> Block::meet(const c10::intrusive_ptr<c10d::Backend>& backend,
                                           const std::shared_ptr<Communicator>& communicator) {
  Group& group = group_for(*communicator, device_);
  const uint64_t id = group.core().members.id;
  {
    MutexLock lock(mutex_);
    if (const auto known = met_.find(id); known != met_.end()) return known->second;
  }
  if (const Status alive = group.check_alive("rendezvous"); !alive.ok()) throw Error(alive);
  NVX_CHECK(group.core().members.neighbours == neighbours_, "this memory was made before a fork");
  const auto pools = device_.is_cpu() ? Group::Pools::kNone : Group::Pools::kOfGpus;
  auto meeting = std::make_shared<Meeting>(Meeting{group.meet_symmetric(place_, data_, pools),
                                                   {},
                                                   c10::weak_intrusive_ptr<c10d::Backend>(backend),
                                                   communicator->weak_from_this()});
  meeting->addresses = addresses_of(*meeting->ranks, device_);
  MutexLock lock(mutex_);
  return met_.emplace(id, std::move(meeting)).first->second;
}

}  // namespace nvx
