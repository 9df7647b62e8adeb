#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>

#include "group/core/device_copies.h"
#include "group/core/diagnosis.h"
#include "group/core/failure_state.h"
#include "group/core/status.h"
#include "group/core/waits.h"
#include "group/setup/group_options.h"
#include "group/setup/members.h"
#include "group/setup/setup.h"
#include "net/group_port.h"

namespace nvx {

/// The state that the parts of a group share: its collectives inside the host and over hosts, its kernels, its
/// messages. Group owns it; the parts hold references, and do not depend on Group.
struct Core {
  /// Locks to the group if it is alive. For threads that may outlive it.
  using Owner = std::function<std::weak_ptr<const void>()>;

  Core(const GroupOptions& options, std::unique_ptr<GroupStatus> own_status, SetUp::Made made, Owner owner)
      : options(without_set_up(options)),
        status(std::move(own_status)),
        members(std::move(made.members)),
        port(std::move(made.port)),
        diagnosis(members),
        failures(members, diagnosis, *status, port.get(), std::move(made.membership)),
        waits(members.facts, options.timeout, failures),
        owner(std::move(owner)) {}

  static GroupOptions without_set_up(GroupOptions all) {
    all.aborted = nullptr;
    return all;
  }
  /// Numbers an operation when it is issued, in the order of the program.
  uint64_t next_number() {
    const uint64_t number = sequence.fetch_add(1, std::memory_order_relaxed) + 1;
    status->issued(number);
    return number;
  }
  ShmRegistry& shm() const { return *members.shm; }

  const GroupOptions options;                 ///< `aborted` is empty: it may own objects of the caller
  const std::unique_ptr<GroupStatus> status;  ///< never null
  const Members members;
  std::unique_ptr<net::GroupPort> port;  ///< null if all ranks are on one host
  const Diagnosis diagnosis;
  FailureState failures;
  Waits waits;
  std::atomic<uint64_t> sequence{0};  ///< operations issued
  /// For messages of tensors of a GPU. `copies_open` is null before the ranks have opened their devices.
  std::shared_ptr<DeviceCopies> copies;
  std::atomic<DeviceCopies*> copies_open{nullptr};
  std::atomic<bool> failure_seen{false};  ///< the program has seen a failure, for example by an exception
  const Owner owner;
};

}  // namespace nvx
