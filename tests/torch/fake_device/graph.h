// Captures, as CUDA's: what queues are given meanwhile is kept in a graph, to be carried out at each replay.
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

// What captures forbid beside them: to all threads, to that which began it, or to none; but only to threads that are as
// strict themselves. Each begins as kGlobal.
enum class Mode { kGlobal, kThread, kRelaxed };
// The calling thread's.
Mode exchange_mode(Mode mode);
// For what asks a device or waits for it: breaks the captures that forbid it to this thread, and throws.
void forbid_beside_captures(const char* what);

// A capture begins on one queue; others join it when they wait for what is in it, and must be waited for before its
// end. A graph is carried out by a thread for each queue that took part, so what nobody waits for is overtaken; no two
// replays of one at once.
class Graph : public std::enable_shared_from_this<Graph> {
 public:
  // From now on the queue is part of it.
  static std::shared_ptr<Graph> begin(Queue& origin, Mode mode);

  uint64_t id() const { return id_; }
  bool is_open() const;

  void add(Queue& queue, std::function<void()> task, Pace pace);
  MarkPtr mark(Queue& queue);
  // Joins the queue where it is not part of it.
  void wait_for(Queue& queue, const Mark& mark);
  // Of an event outside of the graph: what it stands for is settled when a replay is begun.
  void wait_outside(Queue& queue, Event& event);
  void record_outside(Queue& queue, Event& event);

  // Throws, where the capture has gone wrong or a queue was not waited for.
  void end(Queue& origin);
  void replay(Queue& on);

  // What CUDA forbids during a capture: counted, thrown, and the capture has gone wrong.
  [[noreturn]] void fault(const std::string& what);

 private:
  struct Run {
    std::vector<MarkPtr> marks, outside;
  };
  using Step = std::function<void(Run&)>;
  struct Track {
    Queue* queue;
    std::vector<Step> steps;
    std::vector<size_t> seen;  // by track: how much of its work comes before what is next here; of this one, all
  };

  Graph(Queue& origin, Mode mode);
  size_t track_of(Queue& queue);
  void add_step(size_t track, Step step);
  void carry_out(Run& run);

  friend void forbid_beside_captures(const char* what);

  const uint64_t id_;
  const Mode mode_;
  const std::thread::id thread_;  // that began it
  mutable std::mutex mutex_;
  bool open_ = true;
  std::string wrong_;
  std::vector<Track> comm_streams_;
  std::vector<std::vector<size_t>> marks_;  // what each mark has seen
  struct Outside {
    Event* event;
    bool records;
  };
  std::vector<Outside> outside_;
  std::mutex running_;
};

// What CUDA forbids while a graph is captured, of whatever is in none itself.
[[noreturn]] void fault(const std::string& what);
// Whether any capture is under way.
bool is_capturing();

// From now on questions for events fail, as on a device on which a kernel has failed; or they are answered again.
void fail_questions(bool fail);
// Throws where there is no answer.
void check_question();

}  // namespace fake
