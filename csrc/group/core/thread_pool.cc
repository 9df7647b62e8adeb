#include "group/core/thread_pool.h"

#include <chrono>
#include <system_error>

#include "base/contain.h"
#include "base/deadline.h"
#include "base/log.h"
#include "base/per_process.h"
#include "base/thread_state.h"

namespace nvx {
namespace {

constexpr std::chrono::milliseconds kCheckInterval{50};
constexpr std::chrono::seconds kIdleLife{5};

}  // namespace

bool Lane::begin_inline() {
  MutexLock lock(mutex_);
  if (held() || !queue_.empty()) return false;
  holder_ = std::this_thread::get_id();
  return true;
}

void Lane::end_inline() {
  MutexLock lock(mutex_);
  holder_ = {};
  if (waiters_) moved_.notify_all();
  if (!queue_.empty()) ensure_running();
}

bool Lane::held_here() {
  MutexLock lock(mutex_);
  return holder_ == std::this_thread::get_id();
}

void Lane::submit(std::shared_ptr<Task> task) {
  MutexLock lock(mutex_);
  queue_.push_back(std::move(task));
  if (!held()) ensure_running();
}

bool Lane::submit_to_others(std::shared_ptr<Task>& task) {
  MutexLock lock(mutex_);
  if (!find_thread()) return false;
  queue_.push_back(std::move(task));
  return true;
}

bool Lane::find_thread() {
  if (!scheduled_) scheduled_ = ThreadPool::instance().start([lane = shared_from_this()] { lane->drain(); });
  return scheduled_;
}

/// Makes sure that the queue runs, on this thread if need be: a caller may wait for an operation's effects only.
void Lane::ensure_running() {
  if (find_thread()) return;
  while (!held() && !queue_.empty()) run_front(Runner::kPool);
}

void Lane::run_front(Runner runner) {
  std::shared_ptr<Task> task = std::move(queue_.front());
  queue_.pop_front();
  task->begun_ = true;
  holder_ = std::this_thread::get_id();
  mutex_.unlock();
  contain("an operation", [&] { task->perform(runner); });
  mutex_.lock();
  holder_ = {};
  ++concluding_;
  // `conclude()` may wait for an operation of this queue, so another thread must be able to run it.
  bool blocks = true;
  contain("an operation's end", [&] { blocks = task->conclusion_may_block(); });
  if (!queue_.empty() && blocks) find_thread();
  if (waiters_) moved_.notify_all();
  mutex_.unlock();
  contain("an operation's end", [&] { task->conclude(); });
  task->done_.store(true, std::memory_order_release);
  task.reset();  // it may hold the last reference to its group, so no lock is held
  mutex_.lock();
  --concluding_;
  moved_.notify_all();
}

bool Lane::wait(Task& task, MayRun may_run, const std::function<bool()>& give_up) {
  MutexLock lock(mutex_);
  ++waiters_;
  while (!task.done()) {
    if (!task.begun_ && !held() && !queue_.empty()) {
      // An operation that has begun runs to its end, so a caller that may give up does not run it.
      if (may_run == MayRun::kYes || !find_thread()) {
        run_front(Runner::kCaller);
        continue;
      }
    }
    lock.wait_for(moved_, kCheckInterval);
    if (task.done()) break;
    lock.unlock();
    bool stop = false;
    contain("a waiter's check", [&] { stop = give_up && give_up(); });
    lock.lock();
    if (stop) break;
  }
  --waiters_;
  if (!held() && !queue_.empty()) ensure_running();
  return task.done();
}

void Lane::drain() {
  MutexLock lock(mutex_);
  scheduled_ = false;  // from here on, `find_thread()` may start another thread beside this one
  while (!held() && !queue_.empty()) run_front(Runner::kPool);
  moved_.notify_all();
}

bool Lane::settle(std::chrono::milliseconds span, Until until) {
  const auto end = std::chrono::steady_clock::now() + span;
  MutexLock lock(mutex_);
  if (holder_ == std::this_thread::get_id()) return true;
  ++waiters_;
  bool busy = true;
  for (;;) {
    busy = held() || (until == Until::kEmpty && (scheduled_ || concluding_ != 0 || !queue_.empty()));
    if (!busy || std::chrono::steady_clock::now() >= end) break;
    lock.wait_for(moved_, std::chrono::milliseconds(10));
  }
  --waiters_;
  return !busy;
}

/// Threads do not cross a fork, so a child starts with a pool of its own.
ThreadPool& ThreadPool::instance() { return of_this_process<ThreadPool>(); }

bool ThreadPool::start(Job job) {
  MutexLock lock(mutex_);
  if (threads_ > most_ || (jobs_.size() >= idle_ && !make_thread())) return false;
  jobs_.push_back(std::move(job));
  changed_.notify_one();
  return true;
}

bool ThreadPool::make_thread() {
  try {
    if (threads_ >= most_) throw std::system_error(std::make_error_code(std::errc::resource_unavailable_try_again));
    std::thread([this] { work(); }).detach();
  } catch (const std::system_error& error) {
    static std::atomic<bool> warned{false};
    if (!warned.exchange(true)) {
      NVX_LOG(kWarn,
              "cannot create a thread for asynchronous operations (%s): they run in the threads that call or wait. "
              "Next: check the limits of processes and threads (ulimit -u, pids.max of the cgroup)",
              error.what());
    }
    return false;
  }
  ++threads_;
  return true;
}

void ThreadPool::limit(size_t most) {
  MutexLock lock(mutex_);
  most_ = most;
}

size_t ThreadPool::threads() {
  MutexLock lock(mutex_);
  return threads_;
}

bool ThreadPool::stopping() {
  MutexLock lock(mutex_);
  return stopping_;
}

void ThreadPool::work() {
  begin_own_thread("nvx");
  MutexLock lock(mutex_);
  for (;;) {
    if (!jobs_.empty()) {
      Job job = std::move(jobs_.front());
      jobs_.pop_front();
      lock.unlock();
      contain("a job", job);
      job = nullptr;  // it may hold the last reference to a group, so no lock is held
      lock.lock();
      continue;
    }
    if (stopping_) break;
    ++idle_;
    const Deadline idle = Deadline::after(kIdleLife);
    for (auto now = idle.start; jobs_.empty() && !stopping_ && !idle.passed(now); now = Clock::now()) {
      lock.wait_for(changed_, idle.end - now);  // another thread's end wakes it early
    }
    --idle_;
    if (jobs_.empty()) break;
  }
  --threads_;
  changed_.notify_all();
}

void ThreadPool::stop(std::chrono::milliseconds span) {
  const auto end = std::chrono::steady_clock::now() + span;
  MutexLock lock(mutex_);
  stopping_ = true;
  changed_.notify_all();
  while (threads_ != 0 && std::chrono::steady_clock::now() < end)
    lock.wait_for(changed_, std::chrono::milliseconds(10));
}

}  // namespace nvx
