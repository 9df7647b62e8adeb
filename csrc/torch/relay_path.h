#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <functional>
#include <memory>
#include <optional>

#include "group/relay.h"
#include "torch/ask_once.h"
#include "torch/kernel_path.h"
#include "torch/transit.h"

namespace nvx {

/// Collectives of a device's tensors over several hosts, in groups in which every host has kernels: these do all that
/// is done on devices, and the caller waits for nothing. Where they sum, or hand out, inside each host, a rank brings
/// only its part to host memory, and takes only that back.
class RelayPath {
 public:
  /// of_devices: makes the group that relays are operations of, which is a step of all ranks.
  using OfDevices = std::function<const std::shared_ptr<Group>&()>;
  /// group: of the same ranks.
  RelayPath(std::shared_ptr<Group> group, c10::intrusive_ptr<c10d::Store> store, OfDevices of_devices)
      : group_(std::move(group)), store_(std::move(store)), of_devices_(std::move(of_devices)) {}

  /// Whether this operation, of which collective, type and count are known, goes by kernels and host memory. May be a
  /// step of all ranks: the first call for an operation that may go so opens the device on all of them.
  bool agree_to_serve(const Operation& operation, at::Device device);
  /// The same of all operations that may go so. The first call is a step of all ranks.
  bool agree_to_serve(at::Device device);
  /// What carries it out, on this stream of the group's. on_round: called when a round has been begun.
  std::unique_ptr<Relay> make(const std::shared_ptr<Group>& group, kernel::Collective collective,
                              const c10::Stream& stream, std::function<void()> on_round);

 private:
  const std::shared_ptr<Group> group_;
  const c10::intrusive_ptr<c10d::Store> store_;
  const OfDevices of_devices_;
  const std::shared_ptr<StreamLauncher> launcher_ = std::make_shared<StreamLauncher>();
  AskOnce served_;
};

}  // namespace nvx
