// The queues of the fake accelerator. Each queue is the order of one stream and has a thread that runs its tasks.
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

class Graph;

// A point in the order of a queue. A thread that has seen the mark passed sees all earlier work of that queue. A mark
// in a capture names a point of each replay and never passes itself.
class Mark {
 public:
  Mark() = default;
  Mark(std::shared_ptr<Graph> graph, size_t number) : graph_(std::move(graph)), number_(number) {}
  const std::shared_ptr<Graph>& graph() const { return graph_; }  // null outside captures
  size_t number() const { return number_; }

  void pass();
  bool passed() const;
  void wait() const;
  std::chrono::steady_clock::time_point when() const;  // precondition: passed()

  // Calls `next` after this mark has passed: immediately if it has already, else on the thread that passes it.
  void then(std::function<void()> next);

 private:
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  bool passed_ = false;
  std::chrono::steady_clock::time_point when_;
  std::vector<std::function<void()>> next_;
  const std::shared_ptr<Graph> graph_;
  const size_t number_ = 0;
};

using MarkPtr = std::shared_ptr<Mark>;

// Holds the mark that was recorded last. A wait that began on an earlier mark stays on that mark.
class Event {
 public:
  std::atomic<int8_t> device{-1};  // whose streams record it

  void set(MarkPtr mark) {
    std::lock_guard lock(mutex_);
    mark_ = std::move(mark);
  }
  MarkPtr get() const {
    std::lock_guard lock(mutex_);
    return mark_;
  }

 private:
  mutable std::mutex mutex_;
  MarkPtr mark_;
};

// Calls `next` after all marks have passed, on the thread that sees the last one pass.
void when_all(const std::vector<MarkPtr>& marks, std::function<void()> next);

enum class Pace {
  kDelayed,  // after a random delay, like work of a device
  kAtOnce,   // as soon as its turn comes: bookkeeping
};

// Runs tasks one at a time in the order of `push()`. A queue lives as long as its process: its thread is detached and
// never joined, so that no wait in a task delays the exit.
class Queue {
 public:
  Queue(uint64_t number, int8_t device) : number_(number), device_(device) {}
  Queue(const Queue&) = delete;
  Queue& operator=(const Queue&) = delete;

  // A capture records the task for its replays.
  void push(std::function<void()> task, Pace pace = Pace::kDelayed);
  // Runs the task now, even in a capture, behind all tasks pushed before. Returns the number of tasks pushed.
  uint64_t push_now(std::function<void()> task, Pace pace);
  MarkPtr mark(Pace pace);      // passes when all tasks pushed so far are done
  void wait_for(MarkPtr mark);  // later tasks begin after the mark has passed
  void drain();                 // blocks until all tasks pushed so far are done
  void await(uint64_t pushed);  // blocks until `pushed` tasks, as `push_now()` counts them, are done
  bool idle() const;
  int8_t device() const { return device_; }
  // The capture that this queue has joined, or null.
  std::shared_ptr<Graph> graph() const;
  void be_captured(std::shared_ptr<Graph> graph);

 private:
  struct Entry {
    std::function<void()> task;
    Pace pace;
  };

  void run();

  const uint64_t number_;
  const int8_t device_;
  mutable std::mutex mutex_;
  std::condition_variable pushed_, popped_;
  std::deque<Entry> entries_;  // the first entry may be running
  uint64_t begun_ = 0, ended_ = 0;
  bool started_ = false;
  std::shared_ptr<Graph> graph_;
};

// Every queue waits up to `most_us` microseconds before each task. The same seed and queue give the same delays.
void set_delays(uint64_t seed, int64_t most_us);
// Limits the pending tasks of a queue. `push()` blocks while the queue is full, like a driver's launch queue.
void set_queue_depth(size_t most);
// Waits for one such random delay on the calling thread; `number` is that of its queue.
void delay_randomly(uint64_t number = 0);

}  // namespace fake
