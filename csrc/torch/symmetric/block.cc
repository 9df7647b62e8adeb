#include "torch/symmetric/block.h"

#include <ATen/ATen.h>
#include <c10/core/DeviceGuard.h>
#include <c10/util/ScopeExit.h>

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/contain.h"
#include "base/per_process.h"
#include "base/round_up.h"
#include "memory/driver/relaxed_capture_guard.h"
#include "torch/communicator.h"
#include "torch/core/interrupt.h"
#include "torch/device/kernel_path.h"

namespace nvx {
namespace {

constexpr size_t kAlignment = 128;  // of the pad

/// Where kernels of the device read the addresses of all ranks' data and pads.
at::Tensor room_for_addresses(int ranks, c10::Device device) {
  return at::empty({2, ranks}, at::TensorOptions().dtype(at::kLong).device(device));
}

void put_addresses(const at::Tensor& room, const Symmetric& ranks) {
  const at::Tensor all = at::empty({2, ranks.size()}, at::kLong);
  auto* const at = all.data_ptr<int64_t>();
  for (int r = 0; r < ranks.size(); ++r) {
    at[r] = int64_t(reinterpret_cast<intptr_t>(ranks.data(r)));
    at[ranks.size() + r] = int64_t(reinterpret_cast<intptr_t>(ranks.pad(r)));
  }
  room.copy_(all);
}

/// The group in whose lane a rendezvous runs. That of devices is in order with calls of device tensors, and may run
/// beside calls of CPU tensors on another thread. The kernels are the first group's in both cases. A collective call.
Group& group_for(Communicator& communicator, c10::Device device) {
  Group& of_cpu = communicator.context.checked_group();
  if (device.is_cpu()) return of_cpu;
  communicator.issuer.kernels().flush_if_postponed();
  NVX_CHECK(communicator.issuer.kernels().agree_to_serve(device),
            "symmetric memory on " + device.str() + " needs nvx's kernels, which do not serve group " + of_cpu.name() +
                ": see nvx doctor");
  if (const Status alive = of_cpu.check_alive("rendezvous"); !alive.ok()) throw Error(alive);
  return *communicator.context.groups.of_devices();
}

}  // namespace

Block::Block(size_t bytes, size_t pad_bytes, c10::Device device, std::optional<std::string> group)
    : place_{0, bytes, round_up(bytes, kAlignment), pad_bytes},
      device_(device),
      group_(std::move(group)),
      fork_generation_(fork_generation()),
      shm_(ShmRegistry::instance()) {
  NVX_CHECK(bytes <= TensorMemory::kMost && pad_bytes <= TensorMemory::kMost,
            "symm_mem.empty: " + std::to_string(bytes) + " bytes are more than any rank maps");
  device_.is_cpu() ? take_host_memory(place_.pad + pad_bytes) : take_device_memory(place_.pad + pad_bytes);
}

void Block::take_host_memory(size_t bytes) {
  span_ = shm_->tensors().allocate(bytes);
  NVX_CHECK(span_,
            "symm_mem.empty: there is no memory that other ranks can map for " + std::to_string(bytes) + " bytes");
  place_.offset = span_.offset;
  data_ = shm_->tensors().at(span_);
  std::memset(data_ + place_.pad, 0, place_.pad_bytes);
}

/// Waits for the zeroes: a peer may signal as soon as its rendezvous has ended.
void Block::take_device_memory(size_t bytes) {
  const c10::OptionalDeviceGuard on(device_);
  DevicePool& pool = DeviceRegistry::instance().pool(device_.index());
  DevicePtr at;
  {
    const RelaxedCaptureGuard relaxed;
    at = pool.allocate(bytes);
  }
  place_.offset = at - pool.base();
  data_ = reinterpret_cast<std::byte*>(at);
  auto back = c10::make_scope_exit([&] { (void)pool.free(at); });
  const auto count = int64_t(place_.pad_bytes);
  const auto options = at::TensorOptions().dtype(at::kByte).device(device_);
  at::for_blob(data_ + place_.pad, {count})
      .options(options)
      .target_device(device_)
      .make_tensor()
      .copy_(at::zeros({count}, at::kByte));
  back.release();
}

/// Peers see first that this rank has left, so that ranks which wait for each other's blocks all get theirs back.
std::function<bool()> Block::leave(AllRendezvous&& all) {
  std::vector<std::function<bool()>> checks;
  for (const auto& rendezvous : all) checks.push_back(rendezvous->ranks->released());
  all.clear();
  return [checks = std::move(checks)] {
    return std::ranges::all_of(checks, [](const auto& released) { return released(); });
  };
}

Block::~Block() {
  AllRendezvous all;
  for (const auto& [id, rendezvous] : rendezvous_) all.push_back(rendezvous);
  rendezvous_.clear();
  if (fork_generation_ != fork_generation()) {
    new auto(std::move(shm_));  // a forked child has not inherited it
  } else if (!device_.is_cpu()) {
    contain("freeing symmetric memory", [&] { without_python_lock([&] { free_device_memory(std::move(all)); }); });
  } else if (!unsure_) {
    shm_->tensors().free_when(span_, leave(std::move(all)));
  }
}

/// Waits for the device, as torch's own does: any of its streams may use the block or a peer's. The block stays, here
/// and at its peers, in a capture, whose graph may use it again, and if the device has failed.
void Block::free_device_memory(AllRendezvous&& all) {
  auto stays = c10::make_scope_exit([&] { new auto(std::move(all)); });
  const c10::OptionalDeviceGuard on(device_);
  const RelaxedCaptureGuard relaxed;
  if (capture_of(current_stream(device_)) != 0) return;
  c10::impl::VirtualGuardImpl(device_.type()).synchronizeDevice(device_.index());
  stays.release();
  std::function<bool()> released = leave(std::move(all));
  if (unsure_) return;
  DeviceRegistry::instance().pool(device_.index()).free_when(reinterpret_cast<DevicePtr>(data_), std::move(released));
}

std::shared_ptr<const Rendezvous> Block::rendezvous(const c10::intrusive_ptr<c10d::Backend>& backend,
                                                    const std::shared_ptr<Communicator>& communicator) {
  Group& group = group_for(*communicator, device_);
  const uint64_t id = group.core().members.id;
  {
    MutexLock lock(mutex_);
    if (const auto known = rendezvous_.find(id); known != rendezvous_.end()) return known->second;
  }
  if (const Status alive = group.check_alive("rendezvous"); !alive.ok()) throw Error(alive);
  NVX_CHECK(group.core().members.shm == shm_, "this memory was made before a fork");
  const std::shared_ptr<const Rendezvous> rendezvous = make_rendezvous(backend, communicator, group);
  MutexLock lock(mutex_);
  return rendezvous_.emplace(id, rendezvous).first->second;
}

/// A refusal is the same on all ranks and leaves the group usable. After other failures a peer may use the block.
std::shared_ptr<const Rendezvous> Block::make_rendezvous(const c10::intrusive_ptr<c10d::Backend>& backend,
                                                         const std::shared_ptr<Communicator>& communicator,
                                                         Group& group) {
  auto rendezvous =
      std::make_shared<Rendezvous>(Rendezvous{nullptr, room_for_addresses(group.size(), device_),
                                              c10::weak_intrusive_ptr<c10d::Backend>(backend), communicator});
  const DeviceCommunicator* const opened = device_.is_cpu() ? nullptr : &communicator->group().device();
  bool sure = false;
  const auto end = c10::make_scope_exit([&] {
    if (!sure) unsure_ = true;
  });
  try {
    rendezvous->ranks = group.rendezvous_symmetric(place_, data_, opened);
    put_addresses(rendezvous->addresses, *rendezvous->ranks);
    sure = true;
  } catch (const Error& error) {
    sure = error.code() == Code::kInvalid && group.check_alive("rendezvous").ok();
    throw;
  }
  return rendezvous;
}

}  // namespace nvx
