#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/mutex.h"
#include "group/device/block_budget.h"
#include "group/device/channel_options.h"
#include "group/device/device_pools.h"
#include "group/device/device_trial.h"
#include "kernel/gpu/launch_cuda.h"
#include "memory/driver/thread_call.h"
#include "memory/gpu/peer_mappings.h"

namespace nvx {

/// The memory of one rank in a channel between GPUs: the pad, which peers write to, and behind it the state,
/// which only its own kernels use; the control, through which host and kernels communicate. Pad and state are in the
/// arena: the driver may free memory only when all kernels have ended, and those of other groups may wait for this
/// rank.
class ChannelResources {
 public:
  /// Collective over all ranks, on a thread whose current device is this rank's. On return, every rank is ready
  /// for kernels. Throws Error, and then on all ranks unless one has exited.
  ChannelResources(DeviceRegistry& registry, Bootstrap& bootstrap, const ChannelOptions& options,
                   kernel::KernelLauncher& launcher);
  ~ChannelResources();

  const ChannelOptions& options() const { return options_; }
  const kernel::DeviceChannel& channel() const { return channel_; }
  /// The control block, mapped on the host.
  kernel::Control& control() const { return *reinterpret_cast<kernel::Control*>(control_->host()); }
  /// Call before each launch or message: see `DevicePools`.
  void update_pools() { pools_->update(); }
  PoolStats pool_stats(uint32_t direct) const {
    PoolStats stats = pools_->stats();
    stats.direct = direct;
    return stats;
  }
  std::shared_ptr<PeerPool> peer_pool(int rank) const { return pools_->of(rank); }
  const PeerMappings& mappings() const { return *mappings_; }
  kernel::MulticastView multicast() const;
  /// The slowest link between the GPUs of two ranks; the same on every rank.
  GpuLink link() const { return link_; }
  /// The reason why the ranks have fewer blocks than requested; empty if they have as many.
  const std::string& why_fewer_blocks() const { return why_fewer_; }

  /// Begins to mark this rank as failed in its state, which every block of a kernel reads before it writes; the abort
  /// word, on the host, kernels read where they wait. Does not wait: the device may hang. Any thread may call it.
  void stop_kernels() EXCLUDES(stop_mutex_);

  /// The possible later users of the memory.
  enum class User {
    kReplay,  ///< a later replay of a graph; no kernel is running. It finds that this rank has failed and writes
              ///< nothing
    kKernel,  ///< a kernel that may never end, and so keeps its blocks of the GPU too
  };
  /// Keeps all of the memory until the process ends. Requires that the abort word is set.
  void keep(User user);

 private:
  void set_up(Bootstrap& bootstrap, kernel::KernelLauncher& launcher);
  Trial open_channel(Bootstrap& bootstrap, int resident);
  bool passes_trial(Bootstrap& bootstrap, kernel::KernelLauncher& launcher, const Trial& trial, std::string* why);
  bool shares_gpu() const;
  void check_speed(std::chrono::microseconds each) const;
  void give_up_multicast(const std::string& why);
  BlockGrant reserve(Bootstrap& bootstrap, int resident);
  void take_memory(uint32_t first_epoch);
  std::vector<kernel::PeerPads> exchange_pads(Bootstrap& bootstrap);
  void connect_pools(Bootstrap& bootstrap);
  std::vector<std::shared_ptr<DeviceRegion>> format(const Trial& trial);
  void release_memory();
  std::function<PairVerdict()> state_writer(size_t to, DevicePtr from, size_t bytes) const;
  std::shared_ptr<DeviceRegion> pin(const std::string& what, size_t bytes) const;
  size_t pad_bytes() const { return kernel::DevicePad{channel_.shape}.bytes(); }
  DevicePtr state_at() const { return mappings_->arena().at(span_.offset + pad_bytes()); }

  DeviceRegistry& registry_;
  ChannelOptions options_;
  kernel::DeviceChannel channel_;
  BlockReservation reservation_;
  std::string why_fewer_;
  GpuLink link_ = GpuLink::kOneGpu;
  std::unique_ptr<PeerMappings> mappings_;
  std::unique_ptr<DevicePools> pools_;
  std::unique_ptr<MulticastSpan> multicast_;
  Span span_;
  bool exported_ = false;
  std::shared_ptr<DeviceRegion> control_;
  /// The host's writes to the state, until its memory goes to others. One at a time: each has all views of pools, and
  /// one that read them earlier must not land later.
  struct StateWrites {
    Mutex mutex;
    bool closed GUARDED_BY(mutex) = false;
    bool hung GUARDED_BY(mutex) = false;  // one may still land
  };
  std::shared_ptr<StateWrites> writes_ = std::make_shared<StateWrites>();
  std::function<PairVerdict()> mark_failed_;  // in the state
  Mutex stop_mutex_;
  std::optional<ThreadCall<PairVerdict>> stop_ GUARDED_BY(stop_mutex_);
};

}  // namespace nvx
