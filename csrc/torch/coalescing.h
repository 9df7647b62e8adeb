#pragma once

#include <atomic>
#include <map>
#include <optional>
#include <thread>
#include <vector>

#include "base/mutex.h"
#include "torch/work.h"

namespace nvx {

/// What a thread has issued since it began to coalesce. The operations run as ever, and the scope only remembers them,
/// so that they can be waited for as one. Only kernels may be put off, until something else of the group is called, or
/// somebody asks for one of them. An exception may leave a scope open for good: therefore it forgets works that have
/// ended well and that somebody has asked for.
struct CoalescingScope {
  using Works = std::vector<c10::intrusive_ptr<NvxWork>>;
  /// gone: gets the works that it forgets.
  void add(const c10::intrusive_ptr<NvxWork>& work, Works& gone);

  Works works;
  size_t issued = 0;
  size_t most = 64;  ///< so many are kept before it looks which can be forgotten
};

/// The scopes that threads have open in one backend.
class CoalescingScopes {
 public:
  /// Opens one for this thread. Returns the scope that was open before, if there is one: an exception has left that
  /// open, as torch does not close it then. All that was issued in it runs nevertheless.
  std::optional<CoalescingScope> open() EXCLUDES(mutex_);
  /// Closes this thread's scope; none if none is open.
  std::optional<CoalescingScope> close() EXCLUDES(mutex_);
  /// Whether this thread has one open.
  bool is_open() const EXCLUDES(mutex_);
  /// To this thread's scope, if one is open.
  void add(const c10::intrusive_ptr<NvxWork>& work) EXCLUDES(mutex_);

 private:
  std::atomic<int> open_{0};
  mutable Mutex mutex_;  // never held while a work goes
  std::map<std::thread::id, CoalescingScope> scopes_ GUARDED_BY(mutex_);
};

}  // namespace nvx
