// The queues of the fake accelerator: each is one stream's order, carried out by a thread of its own.
#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

namespace fake {

// A moment in the order of a queue. Who has seen it passed sees all that the queue did before it.
class Mark {
 public:
  void pass();
  bool passed() const;
  void wait() const;
  std::chrono::steady_clock::time_point when() const;  // it has passed

  // Calls `next` once this has passed: at once where it has, else on the thread that passes it.
  void then(std::function<void()> next);

 private:
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  bool passed_ = false;
  std::chrono::steady_clock::time_point when_;
  std::vector<std::function<void()>> next_;
};

using MarkPtr = std::shared_ptr<Mark>;

// Calls `next` once every mark has passed, on whichever thread sees the last of them pass.
void when_all(const std::vector<MarkPtr>& marks, std::function<void()> next);

enum class Pace {
  kDelayed,  // after a random delay, as a device's own work
  kAtOnce,   // as soon as its turn comes: what keeps the books
};

// Tasks in the order in which they were pushed, one after the other. A queue lives as long as its process: its thread
// is detached and never joined, so that nothing it waits for can hold up the exit.
class Queue {
 public:
  explicit Queue(uint64_t number) : number_(number) {}
  Queue(const Queue&) = delete;
  Queue& operator=(const Queue&) = delete;

  void push(std::function<void()> task, Pace pace = Pace::kDelayed);
  MarkPtr mark(Pace pace);      // passed when all that was pushed so far is done
  void wait_for(MarkPtr mark);  // what is pushed from here on begins when the mark has passed
  void drain();                 // the caller waits until all that was pushed so far is done
  bool idle() const;

 private:
  struct Entry {
    std::function<void()> task;
    Pace pace;
  };

  void run();
  void delay();

  const uint64_t number_;
  mutable std::mutex mutex_;
  std::condition_variable pushed_;
  std::deque<Entry> entries_;  // the first one may be running
  bool started_ = false;
  uint64_t random_ = 0;         // the thread's own
  uint64_t seen_settings_ = 0;  // the thread's own
};

// From now on every queue waits before each task for up to `most_us` microseconds: the same sequence of delays for the
// same seed and the same queue.
void set_delays(uint64_t seed, int64_t most_us);

}  // namespace fake
