#pragma once

#include <atomic>
#include <chrono>
#include <map>
#include <memory>
#include <string>

#include "torch/call/call.h"
#include "torch/issuer.h"
#include "torch/messages.h"

namespace nvx {

/// A group of ranks that stays as it is, and the parts that run its calls. A reconfigurable backend has one after the
/// other.
class Communicator : public std::enable_shared_from_this<Communicator> {
 public:
  /// backend, listeners: must outlive this.
  Communicator(c10d::Backend& backend, Listeners& listeners, c10::intrusive_ptr<c10d::Store> store,
               std::shared_ptr<Group> group, const NvxOptions& options);
  ~Communicator();

  Group& group() const { return context.group(); }
  c10d::ErrorType error();
  /// Called on the ranks with a device_id: opens the device on all ranks of the group, if all have called it.
  void connect(at::Device device);
  /// Whether tensors can be allocated in its pool. A local call.
  bool has_memory_of(c10::DeviceIndex device);
  /// The group of ranks that share this store. torch up to 2.13 calls it once for each device type, with the same
  /// store and name: all of these requests get one group. A collective call.
  std::shared_ptr<Group> child(const c10::intrusive_ptr<c10d::Store>& store, const NvxOptions& options, int rank,
                               int size) EXCLUDES(mutex_);
  /// Waits for all operations issued before, including sends and receives, and for their callbacks and hooks. It does
  /// not wait for a work whose callback or hook calls this. Ctrl-C ends the wait.
  void wait_for_pending_works();

  /// These three do nothing in a forked child.
  void abort();
  /// abort() without its hooks: an operation that is aborted for this reason has not failed.
  void cancel(const std::string& why);
  /// Operations without a waiter get a moment to succeed, as peers may wait for them, and are then aborted.
  void shut_down();
  static constexpr std::chrono::seconds kGraceForProxies{5};

  CallContext context;
  Issuer issuer{context};
  Messages messages{context, issuer.kernels(), issuer.delegate()};
  std::atomic<bool> has_memory_for_peers{false};  ///< a window is or was registered: peers may write at any time

 private:
  struct Child {
    c10::weak_intrusive_ptr<c10d::Store> store;
    std::weak_ptr<Group> group;
  };
  Mutex mutex_;
  std::map<std::string, Child> children_ GUARDED_BY(mutex_);  // by name
};

}  // namespace nvx
