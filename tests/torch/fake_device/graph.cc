#include "graph.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <chrono>
#include <exception>
#include <thread>

#include "streams.h"

namespace fake {

namespace {

std::mutex open_mutex;
std::vector<std::shared_ptr<Graph>> open_captures;
std::atomic<bool> queries_fail{false}, records_fail{false};
thread_local Mode this_mode = Mode::kGlobal;

/// Its text takes time, as that of torch's errors, which look symbols up.
struct IllegalAccess : std::exception {
  const char* what() const noexcept override {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    return "fakegpu: an illegal memory access was encountered";
  }
};

uint64_t next_id() {
  static std::atomic<uint64_t> ids{0};
  return ++ids;
}

void merge(std::vector<size_t>& into, const std::vector<size_t>& from) {
  if (into.size() < from.size()) into.resize(from.size());
  for (size_t i = 0; i < from.size(); ++i) into[i] = std::max(into[i], from[i]);
}

}  // namespace

void fault(const std::string& what) {
  count(kCaptureFaults);
  TORCH_CHECK(false, "fakegpu: ", what);
}

bool is_capturing() {
  std::lock_guard lock(open_mutex);
  return !open_captures.empty();
}

Mode exchange_mode(Mode mode) { return std::exchange(this_mode, mode); }

void fail_queries(bool fail) { queries_fail = fail; }

void check_query() {
  if (queries_fail) throw IllegalAccess();
}

void fail_records(bool fail) { records_fail = fail; }

void check_record() {
  if (records_fail) throw IllegalAccess();
}

void forbid_beside_captures(const char* what) {
  std::vector<std::shared_ptr<Graph>> broken;
  {
    std::lock_guard lock(open_mutex);
    for (const auto& graph : open_captures) {
      const bool own = graph->mode_ != Mode::kRelaxed && graph->thread_ == std::this_thread::get_id();
      const bool anybodys = graph->mode_ == Mode::kGlobal && this_mode == Mode::kGlobal;
      if (this_mode != Mode::kRelaxed && (own || anybodys)) broken.push_back(graph);
    }
  }
  for (const auto& graph : broken) {
    std::lock_guard lock(graph->mutex_);
    graph->wrong_ = what;
  }
  if (!broken.empty()) fault(what);
}

Graph::Graph(Queue& origin, Mode mode) : id_(next_id()), mode_(mode), thread_(std::this_thread::get_id()) {
  comm_streams_.push_back({&origin, {}, {}, {0}});
}

std::shared_ptr<Graph> Graph::begin(Queue& origin, Mode mode) {
  std::shared_ptr<Graph> graph(new Graph(origin, mode));
  origin.be_captured(graph);
  std::lock_guard lock(open_mutex);
  open_captures.push_back(graph);
  return graph;
}

bool Graph::is_open() const {
  std::lock_guard lock(mutex_);
  return open_;
}

void Graph::fault(const std::string& what) {
  {
    std::lock_guard lock(mutex_);
    wrong_ = what;
  }
  fake::fault(what);
}

size_t Graph::track_of(Queue& queue) {
  for (size_t t = 0; t < comm_streams_.size(); ++t)
    if (comm_streams_[t].queue == &queue) return t;
  comm_streams_.push_back({&queue, {}, {}, {}});
  comm_streams_.back().seen.resize(comm_streams_.size());
  queue.be_captured(shared_from_this());
  return comm_streams_.size() - 1;
}

void Graph::add_step(size_t t, const char* node, Step step) {
  Track& track = comm_streams_[t];
  track.nodes.push_back(node);
  track.steps.push_back(std::move(step));
  if (track.seen.size() <= t) track.seen.resize(t + 1);
  ++track.seen[t];
}

void Graph::add(Queue& queue, std::function<void()> task, Pace pace) {
  std::lock_guard lock(mutex_);
  add_step(track_of(queue), "work", [task = std::move(task), pace](Run&) {
    if (pace == Pace::kDelayed) delay_randomly();
    task();
  });
}

// An event in a capture adds no work: it names the steps before it.
MarkPtr Graph::mark(Queue& queue) {
  std::lock_guard lock(mutex_);
  return std::make_shared<Mark>(shared_from_this(), add_mark(comm_streams_[track_of(queue)]));
}

size_t Graph::add_mark(Track& track) {
  marks_.push_back(track.seen);
  const size_t number = marks_.size() - 1;
  track.steps.push_back([number](Run& run) { run.marks[number]->pass(); });
  return number;
}

void Graph::wait_for(Queue& queue, const Mark& mark) {
  std::lock_guard lock(mutex_);
  Track& track = comm_streams_[track_of(queue)];
  merge(track.seen, marks_[mark.number()]);
  track.steps.push_back([number = mark.number()](Run& run) { run.marks[number]->wait(); });
}

void Graph::wait_outside(Queue& queue, Event& event) {
  std::lock_guard lock(mutex_);
  outside_.push_back({&event, /*records=*/false});
  add_step(track_of(queue), "wait", [number = outside_.size() - 1](Run& run) {
    if (const MarkPtr& mark = run.outside[number]) mark->wait();
  });
}

void Graph::record_outside(Queue& queue, Event& event) {
  std::lock_guard lock(mutex_);
  outside_.push_back({&event, /*records=*/true});
  add_step(track_of(queue), "record", [number = outside_.size() - 1](Run& run) { run.outside[number]->pass(); });
}

void Graph::record_beside(Queue& queue, Event& event) {
  std::lock_guard lock(mutex_);
  const size_t mark = add_mark(comm_streams_[track_of(queue)]);
  for (Beside& beside : beside_)
    if (outside_[beside.outside].event == &event) return beside.marks.push_back(mark);
  outside_.push_back({&event, /*records=*/true});
  beside_.push_back({outside_.size() - 1, {mark}});
}

std::vector<std::vector<std::string>> Graph::nodes() const {
  std::lock_guard lock(mutex_);
  std::vector<std::vector<std::string>> all;
  for (const Track& track : comm_streams_) all.push_back(track.nodes);
  return all;
}

void Graph::end(Queue& origin) {
  std::lock_guard lock(mutex_);
  TORCH_CHECK(open_ && comm_streams_.front().queue == &origin, "fakegpu: no capture was begun on this stream");
  open_ = false;
  {
    std::lock_guard others(open_mutex);
    std::erase(open_captures, shared_from_this());
  }
  for (const Track& track : comm_streams_) track.queue->be_captured(nullptr);
  TORCH_CHECK(wrong_.empty(), "fakegpu: the capture is invalid: ", wrong_);
  std::vector<size_t>& seen = comm_streams_.front().seen;
  seen.resize(comm_streams_.size());
  for (size_t t = 1; t < comm_streams_.size(); ++t) {
    std::vector<size_t>& own = comm_streams_[t].seen;
    own.resize(comm_streams_.size());
    if (seen[t] < own[t]) fake::fault("a stream that had joined the capture was not waited for at its end");
  }
}

void Graph::replay(Queue& on) {
  auto run = std::make_shared<Run>();
  for (size_t m = 0; m < marks_.size(); ++m) run->marks.push_back(std::make_shared<Mark>());
  for (const Outside& outside : outside_) {
    if (outside.records) outside.event->set(std::make_shared<Mark>());
    run->outside.push_back(outside.event->get());
  }
  for (const Beside& beside : beside_) {
    std::vector<MarkPtr> before;
    for (const size_t mark : beside.marks) before.push_back(run->marks[mark]);
    when_all(before, [record = run->outside[beside.outside]] { record->pass(); });
  }
  on.push([self = shared_from_this(), run] { self->carry_out(*run); });
}

void Graph::carry_out(Run& run) {
  std::lock_guard alone(running_);
  const auto follow = [&](Track& track) {
    for (Step& step : track.steps) step(run);
  };
  std::vector<std::thread> others;
  for (size_t t = 1; t < comm_streams_.size(); ++t) others.emplace_back([&, t] { follow(comm_streams_[t]); });
  follow(comm_streams_.front());
  for (std::thread& other : others) other.join();
}

}  // namespace fake
