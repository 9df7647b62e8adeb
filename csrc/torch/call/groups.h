#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <atomic>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "group/group.h"
#include "torch/call/work.h"
#include "torch/core/holder.h"
#include "torch/core/options.h"

namespace nvx {

/// The core's options for a group with torch's options.
GroupOptions group_options(int rank, int size, const NvxOptions& options);

/// A collective call. Raises if the set-up fails. aborted: polled during the set-up; true ends it.
/// processes: see GroupOptions.
std::shared_ptr<Group> make_group(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                  const NvxOptions& options, std::function<bool()> aborted = {},
                                  std::vector<EarlierProcess> processes = {});

/// The groups of one backend. Collectives of device tensors have their own order, as if they had another backend. So
/// they may run beside collectives of CPU tensors on another thread, such as those of a checkpoint. They have their own
/// group, which the first such collective makes; that is a collective call.
class Groups {
 public:
  Groups(c10::intrusive_ptr<c10d::Store> store, std::shared_ptr<Group> group, const NvxOptions& options);

  const std::shared_ptr<Group>& of_cpu() const { return group_; }
  const std::shared_ptr<Group>& of_devices() EXCLUDES(making_, mutex_);
  /// The group whose lane runs the collectives. A barrier belongs to the CPU's group, as in torch.
  const std::shared_ptr<Group>& of(std::span<const TensorOperation> collectives) EXCLUDES(making_, mutex_);
  std::vector<std::shared_ptr<Group>> all() const;

  void abort(const std::string& why);
  void leave();
  void set_timeout(std::chrono::milliseconds timeout) EXCLUDES(mutex_);
  NvxOptions options() EXCLUDES(mutex_);
  /// The first rank's global rank, and the step from each to the next; -1: the steps differ.
  std::pair<int64_t, int64_t> global_ranks() EXCLUDES(mutex_);
  const c10::intrusive_ptr<c10d::Store>& store() const { return store_; }
  c10::intrusive_ptr<c10d::Store> store_of_devices() const;

 private:
  const c10::intrusive_ptr<c10d::Store> store_;
  const std::shared_ptr<Group> group_;
  Mutex making_;                         // held while the group of devices is made
  Holder maker_;                         // of `making_`
  std::shared_ptr<Group> device_group_;  // written once, before the store to `has_device_group_`, which publishes it
  std::atomic<bool> has_device_group_{false};
  Mutex mutex_;
  NvxOptions options_ GUARDED_BY(mutex_);
};

}  // namespace nvx
