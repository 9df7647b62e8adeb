#pragma once

#include <atomic>
#include <map>
#include <optional>
#include <thread>
#include <vector>

#include "base/mutex.h"
#include "torch/call/work.h"

namespace nvx {

/// A message of a device's tensor that a delegate sends or receives. It begins when its batch is complete.
struct DelegatedMessage {
  at::Tensor tensor;
  int peer;
  int tag;
  bool receives;
  std::chrono::milliseconds timeout;
};
using DelegatedMessages = std::vector<DelegatedMessage>;

/// The works that a thread has issued since it began to coalesce. The operations run as usual; the scope only keeps
/// their works, so that one work can wait for all. Messages of a delegate wait for the end of the scope, because NCCL
/// needs a batch as a whole. Kernels may be postponed, until another operation of the group is called, or one of their
/// works is queried. An exception may leave a scope open for good, so the scope drops works that have succeeded and
/// whose result has been requested.
struct CoalescingScope {
  std::vector<c10::intrusive_ptr<NvxWork>> works;
  size_t issued = 0;
  DelegatedMessages delegated;  ///< issued as one batch when the scope ends
  size_t most = 64;             ///< the number of works at which it checks for works to drop
};

/// The open scopes of a backend's threads.
class CoalescingScopes {
 public:
  /// Opens a scope for this thread. Returns one that an exception left open, if any; its operations run nevertheless.
  std::optional<CoalescingScope> open() EXCLUDES(mutex_);
  /// Closes this thread's scope and returns it; none if none is open.
  std::optional<CoalescingScope> close() EXCLUDES(mutex_);
  bool is_open() const EXCLUDES(mutex_);
  void add(const c10::intrusive_ptr<NvxWork>& work) EXCLUDES(mutex_);
  /// Adds a delegated message to this thread's scope. False if none is open.
  bool add(const DelegatedMessage& message) EXCLUDES(mutex_);

 private:
  std::atomic<int> open_{0};
  mutable Mutex mutex_;  // never held while a work is destroyed
  std::map<std::thread::id, CoalescingScope> scopes_ GUARDED_BY(mutex_);
};

}  // namespace nvx
