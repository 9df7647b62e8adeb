#include "graph.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <thread>

#include "streams.h"

namespace fake {

namespace {

std::atomic<int> open_captures{0};

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

bool is_capturing() { return open_captures > 0; }

Graph::Graph(Queue& origin) : id_(next_id()) { tracks_.push_back({&origin, {}, {0}}); }

std::shared_ptr<Graph> Graph::begin(Queue& origin) {
  std::shared_ptr<Graph> graph(new Graph(origin));
  origin.be_captured(graph);
  ++open_captures;
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
  for (size_t t = 0; t < tracks_.size(); ++t)
    if (tracks_[t].queue == &queue) return t;
  tracks_.push_back({&queue, {}, {}});
  tracks_.back().seen.resize(tracks_.size());
  queue.be_captured(shared_from_this());
  return tracks_.size() - 1;
}

void Graph::add_step(size_t t, Step step) {
  Track& track = tracks_[t];
  track.steps.push_back(std::move(step));
  if (track.seen.size() <= t) track.seen.resize(t + 1);
  ++track.seen[t];
}

void Graph::add(Queue& queue, std::function<void()> task, Pace pace) {
  std::lock_guard lock(mutex_);
  add_step(track_of(queue), [task = std::move(task), pace](Run&) {
    if (pace == Pace::kDelayed) dawdle();
    task();
  });
}

// An event in a capture is no work, only a name for what comes before it.
MarkPtr Graph::mark(Queue& queue) {
  std::lock_guard lock(mutex_);
  Track& track = tracks_[track_of(queue)];
  auto mark = std::make_shared<Mark>(shared_from_this(), marks_.size());
  marks_.push_back(track.seen);
  track.steps.push_back([number = mark->number()](Run& run) { run.marks[number]->pass(); });
  return mark;
}

void Graph::wait_for(Queue& queue, const Mark& mark) {
  std::lock_guard lock(mutex_);
  Track& track = tracks_[track_of(queue)];
  merge(track.seen, marks_[mark.number()]);
  track.steps.push_back([number = mark.number()](Run& run) { run.marks[number]->wait(); });
}

void Graph::wait_outside(Queue& queue, Event& event) {
  std::lock_guard lock(mutex_);
  outside_.push_back({&event, /*records=*/false});
  add_step(track_of(queue), [number = outside_.size() - 1](Run& run) {
    if (const MarkPtr& mark = run.outside[number]) mark->wait();
  });
}

void Graph::record_outside(Queue& queue, Event& event) {
  std::lock_guard lock(mutex_);
  outside_.push_back({&event, /*records=*/true});
  add_step(track_of(queue), [number = outside_.size() - 1](Run& run) { run.outside[number]->pass(); });
}

void Graph::end(Queue& origin) {
  std::lock_guard lock(mutex_);
  TORCH_CHECK(open_ && tracks_.front().queue == &origin, "fakegpu: no capture was begun on this stream");
  open_ = false;
  --open_captures;
  for (const Track& track : tracks_) track.queue->be_captured(nullptr);
  TORCH_CHECK(wrong_.empty(), "fakegpu: the capture is none: ", wrong_);
  std::vector<size_t>& seen = tracks_.front().seen;
  seen.resize(tracks_.size());
  for (size_t t = 1; t < tracks_.size(); ++t) {
    std::vector<size_t>& own = tracks_[t].seen;
    own.resize(tracks_.size());
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
  on.push([self = shared_from_this(), run] { self->carry_out(*run); });
}

void Graph::carry_out(Run& run) {
  std::lock_guard alone(running_);
  const auto follow = [&](Track& track) {
    for (Step& step : track.steps) step(run);
  };
  std::vector<std::thread> others;
  for (size_t t = 1; t < tracks_.size(); ++t) others.emplace_back([&, t] { follow(tracks_[t]); });
  follow(tracks_.front());
  for (std::thread& other : others) other.join();
}

}  // namespace fake
