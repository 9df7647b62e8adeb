#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <thread>

#include "base/mutex.h"

namespace nvx {

/// The thread that runs an operation: a caller, which may spin, or a pool thread, which sleeps at once.
enum class Runner { kCaller, kPool };

/// One asynchronous operation.
class Task {
 public:
  virtual ~Task() = default;
  /// Called once, with no lock held. Exceptions of this and the other functions are logged and dropped.
  virtual void perform(Runner runner) = 0;
  /// Reports the end, after the lane is free for the next operation. Called once, after `perform()`.
  virtual void conclude() {}
  /// True if `conclude()` runs the user's code, which may wait for another operation.
  virtual bool conclusion_may_block() { return false; }
  bool done() const { return done_.load(std::memory_order_acquire); }

 private:
  friend class Lane;
  std::atomic<bool> done_{false};
  bool begun_ = false;  // under the lane's lock
};

/// Runs the collectives of a group one after another. The thread that runs one holds the lane meanwhile.
class Lane : public std::enable_shared_from_this<Lane> {
 public:
  /// For a synchronous call. True if the lane was idle: then the caller holds it and runs its operation at once.
  bool begin_inline() EXCLUDES(mutex_);
  void end_inline() EXCLUDES(mutex_);
  /// Whether this thread holds the lane: it is inside an operation, for example in a handler that runs during its wait.
  /// Such a thread must not wait for the lane, since it would wait for itself.
  bool held_here() EXCLUDES(mutex_);

  /// Queues a task behind the others, and finds a thread for it unless a waiter comes first. If the process cannot
  /// create a thread, the caller runs it, or the holder of the lane does after its operation.
  void submit(std::shared_ptr<Task> task) EXCLUDES(mutex_);
  /// The same for a caller that must not run the task. False: there is no thread for it, and the task stays in place.
  bool submit_to_others(std::shared_ptr<Task>& task) EXCLUDES(mutex_);

  /// Returns when the task is done, or when `give_up()` returns true, which is called about twenty times a second. Runs
  /// the task and those before it on this thread if they have not begun, unless the caller must be able to give up and
  /// there is another thread. It runs a later task only where no thread can be made: that task may need what this
  /// thread does next. The caller must not hold the lane.
  enum class MayRun { kYes, kNo };
  bool wait(Task& task, MayRun may_run, const std::function<bool()>& give_up) EXCLUDES(mutex_);

  /// Runs queued tasks until none is left. For pool threads.
  void drain() EXCLUDES(mutex_);

  /// Returns true when nothing is running, for `kEmpty` also queued or concluding; false at the end of the span.
  /// Returns at once if this thread holds the lane. `conclude()` may wait until the lane is idle.
  enum class Until { kIdle, kEmpty };
  bool settle(std::chrono::milliseconds span, Until until = Until::kEmpty) EXCLUDES(mutex_);

 private:
  bool held() const REQUIRES(mutex_) { return holder_ != std::thread::id(); }
  void run_front(Runner runner) REQUIRES(mutex_);
  bool find_thread() REQUIRES(mutex_);
  void ensure_running() REQUIRES(mutex_);

  Mutex mutex_;
  std::condition_variable moved_;
  std::deque<std::shared_ptr<Task>> queue_ GUARDED_BY(mutex_);
  std::thread::id holder_ GUARDED_BY(mutex_);  // no thread's id: the lane is free
  bool scheduled_ GUARDED_BY(mutex_) = false;
  int waiters_ GUARDED_BY(mutex_) = 0;
  int concluding_ GUARDED_BY(mutex_) = 0;
};

/// The process-wide pool of threads for asynchronous operations. Every job has a thread of its own, so no group waits
/// for another one. Idle threads sleep, and end after a while.
class ThreadPool {
 public:
  using Job = std::function<void()>;

  static ThreadPool& instance();

  /// False if no thread is idle and none can be created: then the job is dropped.
  bool start(Job job) EXCLUDES(mutex_);
  size_t threads() EXCLUDES(mutex_);
  bool stopping() EXCLUDES(mutex_);
  /// Limits the threads of the process, idle ones included; for tests.
  void limit(size_t most) EXCLUDES(mutex_);

  /// Ends the idle threads and waits up to `span` for the busy ones. Called at interpreter exit.
  void stop(std::chrono::milliseconds span) EXCLUDES(mutex_);

 private:
  void work();
  bool make_thread() REQUIRES(mutex_);

  Mutex mutex_;
  std::condition_variable changed_;
  std::deque<Job> jobs_ GUARDED_BY(mutex_);
  size_t idle_ GUARDED_BY(mutex_) = 0;
  size_t threads_ GUARDED_BY(mutex_) = 0;
  size_t most_ GUARDED_BY(mutex_) = SIZE_MAX;
  bool stopping_ GUARDED_BY(mutex_) = false;
};

}  // namespace nvx
