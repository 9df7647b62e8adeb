#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <array>
#include <functional>
#include <memory>
#include <optional>

#include "group/relay.h"
#include "torch/ask_once.h"
#include "torch/kernel_path.h"
#include "torch/transit.h"

namespace nvx {

/// Large all-reduces, reduce-scatters and all-gathers of a device's tensors over several hosts: kernels sum, or hand
/// out, inside each host, so that a rank brings only its part to host memory, and takes only that back. In groups in
/// which every host has several ranks, and kernels.
class RelayPath {
 public:
  explicit RelayPath(c10::intrusive_ptr<c10d::Store> store) : store_(std::move(store)) {}

  /// Whether this operation, which uses the device's tensors themselves, goes by kernels and host memory. May be a step
  /// of all ranks: the first call for an operation that may go so opens the device on all of them.
  bool agree_to_serve(Group& group, const Operation& operation, at::Device device);
  /// What carries it out once the device has come to the call: on the call's streams, and on one of the group's for
  /// kernels.
  std::unique_ptr<Relay> make(const std::shared_ptr<Group>& group, kernel::Collective collective, const Tracks& tracks,
                              const c10::Stream& kernels);

 private:
  const c10::intrusive_ptr<c10d::Store> store_;
  const std::shared_ptr<StreamLauncher> launcher_ = std::make_shared<StreamLauncher>();
  AskOnce served_;
};

}  // namespace nvx
