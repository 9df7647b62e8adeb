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

class Graph;

// A moment in the order of a queue. Who has seen it passed sees all that the queue did before it. One in a capture is
// a name for a moment of each replay, and passes never.
class Mark {
 public:
  Mark() = default;
  Mark(std::shared_ptr<Graph> graph, size_t number) : graph_(std::move(graph)), number_(number) {}
  const std::shared_ptr<Graph>& graph() const { return graph_; }  // null: of no capture
  size_t number() const { return number_; }

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
  const std::shared_ptr<Graph> graph_;
  const size_t number_ = 0;
};

using MarkPtr = std::shared_ptr<Mark>;

// Stands for the mark that was recorded last. Who was told to wait for an earlier one goes on waiting for that one.
class Event {
 public:
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

  // In a capture, it is kept for replays.
  void push(std::function<void()> task, Pace pace = Pace::kDelayed);
  // Also in a capture it is carried out now, behind what was pushed before that. Returns how many have been pushed.
  uint64_t push_now(std::function<void()> task, Pace pace);
  MarkPtr mark(Pace pace);      // passed when all that was pushed so far is done
  void wait_for(MarkPtr mark);  // what is pushed from here on begins when the mark has passed
  void drain();                 // the caller waits until all that was pushed so far is done
  void await(uint64_t pushed);  // until as many have been done, of which push_now() told
  bool idle() const;
  // The capture that it is part of, or null.
  std::shared_ptr<Graph> graph() const;
  void be_captured(std::shared_ptr<Graph> graph);

 private:
  struct Entry {
    std::function<void()> task;
    Pace pace;
  };

  void run();

  const uint64_t number_;
  mutable std::mutex mutex_;
  std::condition_variable pushed_, popped_;
  std::deque<Entry> entries_;  // the first one may be running
  uint64_t begun_ = 0, ended_ = 0;
  bool started_ = false;
  std::shared_ptr<Graph> graph_;
};

// From now on every queue waits before each task for up to `most_us` microseconds: the same sequence of delays for the
// same seed and the same queue.
void set_delays(uint64_t seed, int64_t most_us);
// From now on a queue holds no more tasks than this: who gives it another one waits, as with a driver's.
void set_queue_depth(size_t most);
// Does so, on the calling thread; number: of its queue.
void dawdle(uint64_t number = 0);

}  // namespace fake
