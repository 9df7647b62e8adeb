#pragma once

#include <c10/util/ScopeExit.h>

#include <atomic>
#include <thread>

namespace nvx {

/// The thread that holds a mutex while it waits for other ranks. A signal handler may run on that thread and call
/// again, which has to raise: the thread would wait for itself.
class Holder {
 public:
  bool is_this_thread() const { return thread_ == std::this_thread::get_id(); }
  /// Call it with the mutex held. Lasts until the result is destroyed.
  [[nodiscard]] auto hold() {
    thread_ = std::this_thread::get_id();
    return c10::make_scope_exit([this] { thread_ = std::thread::id(); });
  }

 private:
  std::atomic<std::thread::id> thread_{};
};

}  // namespace nvx
