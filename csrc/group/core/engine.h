#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

#include "base/mutex.h"

namespace nvx {

/// Who carries an operation out decides how it waits: a caller that has nothing else to do may spin, a pool thread
/// beside somebody's computation sleeps at once.
enum class Carrier { kCaller, kPool };

/// One asynchronous operation.
class Task {
 public:
  virtual ~Task() = default;
  /// Carries the operation out. Called once, with no lock held. What it throws, and what the others throw, goes no
  /// further.
  virtual void perform(Carrier carrier) = 0;
  /// Tells whoever wants to know, when the lane is free for the next operation. Called once, after perform.
  virtual void conclude() {}
  /// True if conclude() runs code of the user's, which may wait for another operation.
  virtual bool conclusion_may_block() { return false; }
  bool done() const { return done_.load(std::memory_order_acquire); }

 private:
  friend class Lane;
  std::atomic<bool> done_{false};
};

/// Operations that must happen one after the other: the collectives of a group. Whoever runs one holds the lane
/// meanwhile.
class Lane : public std::enable_shared_from_this<Lane> {
 public:
  /// A synchronous call on an idle lane: true means that the caller holds it and runs its operation at once.
  bool begin_inline() EXCLUDES(mutex_);
  void end_inline() EXCLUDES(mutex_);
  /// Whether this thread holds the lane already: it is inside an operation, in what that lets run while it waits. To
  /// wait for the lane would be to wait for itself.
  bool held_here() EXCLUDES(mutex_);

  /// Queues a task behind those already there, and finds a thread for it unless a waiter comes first. Where the process
  /// can have no thread, the caller runs it, or whoever holds the lane now does when that is done.
  void submit(std::shared_ptr<Task> task) EXCLUDES(mutex_);
  /// The same for who must not carry it out now, nor let go of it: takes it. False, and it is left where it is, where
  /// no thread can be had for it.
  bool submit_to_others(std::shared_ptr<Task>& task) EXCLUDES(mutex_);

  /// Returns when the task is done, or when give_up() says so; it is asked about twenty times a second. A task that has
  /// not begun, and those before it, are run here, unless the caller must be able to give up and there is a thread.
  /// Not for who holds the lane.
  enum class MayRun { kYes, kNo };
  bool wait(Task& task, MayRun may_run, const std::function<bool()>& give_up) EXCLUDES(mutex_);

  /// Runs what is queued until nothing is. For the pool's threads.
  void drain() EXCLUDES(mutex_);

  /// Returns when no operation of another thread is running, or at the end of the span. What concludes one may call
  /// this.
  void await_idle(std::chrono::milliseconds span) EXCLUDES(mutex_);

  /// Returns when nothing is queued, running or concluding, or at the end of the span; at once for who holds the lane.
  void settle(std::chrono::milliseconds span) EXCLUDES(mutex_);

 private:
  bool held() const REQUIRES(mutex_) { return holder_ != std::thread::id(); }
  void run_front(Carrier carrier) REQUIRES(mutex_);
  bool find_thread() REQUIRES(mutex_);
  void find_somebody() REQUIRES(mutex_);

  Mutex mutex_;
  std::condition_variable moved_;
  std::deque<std::shared_ptr<Task>> queue_ GUARDED_BY(mutex_);
  std::thread::id holder_ GUARDED_BY(mutex_);  // none: nobody
  bool scheduled_ GUARDED_BY(mutex_) = false;
  int waiters_ GUARDED_BY(mutex_) = 0;
  int concluding_ GUARDED_BY(mutex_) = 0;
};

/// Threads for asynchronous operations, one process-wide pool. Every job has a thread of its own, so that no group
/// waits for another one; idle threads sleep, and go after a while.
class Engine {
 public:
  using Job = std::function<void()>;

  static Engine& here();

  /// False if there is no thread for it, and none can be made: then the job is dropped.
  bool start(Job job) EXCLUDES(mutex_);
  size_t threads() EXCLUDES(mutex_);
  /// Whether stop() has been called.
  bool stopping() EXCLUDES(mutex_);
  /// As if the process could have no more threads than this, those that are idle included; for tests.
  void limit(size_t most) EXCLUDES(mutex_);

  /// Ends the idle threads and waits for the busy ones for at most this long. At interpreter exit.
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
