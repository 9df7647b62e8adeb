#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <functional>
#include <memory>
#include <optional>

#include "group/hierarchy/host_proxy.h"
#include "torch/ask_once.h"
#include "torch/device/kernel_path.h"
#include "torch/device/staging_copies.h"

namespace nvx {

/// Collectives of a device's tensors over several hosts, in groups in which every host has kernels: these do all that
/// is done on devices, and the caller waits for nothing. Where they sum, or hand out, inside each host, a rank brings
/// only its part to host memory, and takes only that back.
class HostProxyPath {
 public:
  /// of_devices: makes the group that proxies are operations of, which is a step of all ranks.
  using OfDevices = std::function<const std::shared_ptr<Group>&()>;
  /// group: of the same ranks.
  HostProxyPath(std::shared_ptr<Group> group, c10::intrusive_ptr<c10d::Store> store, OfDevices of_devices)
      : group_(std::move(group)), store_(std::move(store)), of_devices_(std::move(of_devices)) {}

  /// Whether this operation, of which collective, type and count are known, goes by kernels and host memory. May be a
  /// step of all ranks: the first call for an operation that may go so opens the device on all of them.
  bool agree_to_serve(const Operation& operation, at::Device device);
  /// The same of all operations that may go so. The first call is a step of all ranks.
  bool agree_to_serve(at::Device device);
  /// What carries it out, on the staging's stream. The group must outlive what is asked of it. queue_early: asked to
  /// have the host's part begin, when some rounds have been begun, or no more can be without it; false if nobody can be
  /// had.
  std::unique_ptr<HostProxy> make(Group& group, kernel::Collective collective, const StagingCopies& staging,
                                  std::function<bool()> queue_early);
  /// Makes what make() has made ready for one more replay.
  static void begin_anew(HostProxy& proxy);
  /// Has the host call this when the staging's stream comes to it, in each replay where that is captured: behind all
  /// that proxies were begun with before.
  Status call_host(const StagingCopies& staging, void (*what)(void*), void* with);
  /// Whether there are graphs that may be replayed at any time. Then the order of what the host does for proxies is
  /// that in which the device comes to them, and not that of the calls.
  bool has_graphs() const { return launcher_->has_graphs(); }

 private:
  static StreamLauncher::Target target_of(const StagingCopies& staging);

  const std::shared_ptr<Group> group_;
  const c10::intrusive_ptr<c10d::Store> store_;
  const OfDevices of_devices_;
  const std::shared_ptr<StreamLauncher> launcher_ = std::make_shared<StreamLauncher>();
  AskOnce served_;
};

}  // namespace nvx
