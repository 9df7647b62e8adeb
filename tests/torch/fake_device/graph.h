// Captures, like those of CUDA: a graph records the work that queues receive during a capture, and runs it at each
// replay.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "queue.h"

namespace fake {

class Event;

// The threads to which a capture forbids unsafe calls: all threads, the thread that began it, or none. A thread's own
// mode restricts this further: the laxer mode of the two applies. The mode of a thread is `kGlobal` at first.
enum class Mode { kGlobal, kThread, kRelaxed };
// Sets the mode of the calling thread and returns the previous one.
Mode exchange_mode(Mode mode);
// For calls that query a device or wait for it: invalidates the captures that forbid the call to this thread, and
// throws.
void forbid_beside_captures(const char* what);

// A capture begins on one queue. Other queues join it when they wait for its work, and it must wait for them before its
// end. A replay uses one thread for each queue of the capture, so work without a dependency is overtaken. Replays of
// one graph do not overlap.
class Graph : public std::enable_shared_from_this<Graph> {
 public:
  // Adds the origin queue to the new capture.
  static std::shared_ptr<Graph> begin(Queue& origin, Mode mode);

  uint64_t id() const { return id_; }
  bool is_open() const;

  void add(Queue& queue, std::function<void()> task, Pace pace);
  MarkPtr mark(Queue& queue);
  // Adds the queue to the capture if it has not joined.
  void wait_for(Queue& queue, const Mark& mark);
  // For an event outside the graph: the start of a replay decides which mark it holds.
  void wait_outside(Queue& queue, Event& event);
  void record_outside(Queue& queue, Event& event);
  void record_beside(Queue& queue, Event& event);
  // The nodes of each queue, in order: "work", and "wait" and "record" for events outside.
  std::vector<std::vector<std::string>> nodes() const;

  // Throws if the capture is invalid or did not wait for a queue that joined.
  void end(Queue& origin);
  void replay(Queue& on);

  // Reports a call that CUDA forbids during a capture: counts it, invalidates the capture, and throws.
  [[noreturn]] void fault(const std::string& what);

 private:
  struct Run {
    std::vector<MarkPtr> marks, outside;
  };
  using Step = std::function<void(Run&)>;
  struct Track {
    Queue* queue;
    std::vector<Step> steps;
    std::vector<std::string> nodes;
    std::vector<size_t> seen;  // by track: how many of its steps come before the next step here; all, for this track
  };

  Graph(Queue& origin, Mode mode);
  size_t track_of(Queue& queue);
  void add_step(size_t track, const char* node, Step step);
  size_t add_mark(Track& track);
  void carry_out(Run& run);

  friend void forbid_beside_captures(const char* what);

  const uint64_t id_;
  const Mode mode_;
  const std::thread::id thread_;  // the thread that began the capture
  mutable std::mutex mutex_;
  bool open_ = true;
  std::string wrong_;
  std::vector<Track> comm_streams_;
  std::vector<std::vector<size_t>> marks_;  // by mark: the steps before it, by track
  struct Outside {
    Event* event;
    bool records;
  };
  std::vector<Outside> outside_;
  struct Beside {
    size_t outside;             // its number in `outside_`
    std::vector<size_t> marks;  // it is recorded behind these
  };
  std::vector<Beside> beside_;
  std::mutex running_;
};

// The same for a call from outside the capture.
[[noreturn]] void fault(const std::string& what);
bool is_capturing();

// Makes event queries fail, like on a device on which a kernel has failed, or succeed again.
void fail_queries(bool fail);
// Throws while event queries fail.
void check_query();
// The same for records of events.
void fail_records(bool fail);
void check_record();

}  // namespace fake
