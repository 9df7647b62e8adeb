#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <thread>
#include <utility>

namespace nvx::test {

/// A simulated stream on a thread: launches run in order.
class SimulatedStream {
 public:
  SimulatedStream() : thread_([this] { work(); }) {}
  /// Returns when all posted work has ended.
  ~SimulatedStream() {
    {
      const std::lock_guard lock(mutex_);
      ends_ = true;
    }
    changed_.notify_all();
    thread_.join();
  }
  SimulatedStream(const SimulatedStream&) = delete;
  SimulatedStream& operator=(const SimulatedStream&) = delete;

  void post(std::function<void()> launch) {
    const std::lock_guard lock(mutex_);
    waiting_.push_back(std::move(launch));
    changed_.notify_all();
  }
  bool idle() {
    const std::lock_guard lock(mutex_);
    return waiting_.empty() && !busy_;
  }

 private:
  void work() {
    std::unique_lock lock(mutex_);
    for (;;) {
      changed_.wait(lock, [&] { return ends_ || !waiting_.empty(); });
      if (waiting_.empty()) return;
      const std::function<void()> launch = std::move(waiting_.front());
      waiting_.pop_front();
      busy_ = true;
      lock.unlock();
      launch();
      lock.lock();
      busy_ = false;
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> waiting_;
  bool busy_ = false, ends_ = false;
  std::thread thread_;  // last: it uses all of these
};

}  // namespace nvx::test
