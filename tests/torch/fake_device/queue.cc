#include "queue.h"

#include <pthread.h>
#include <signal.h>

#include <thread>

#include "graph.h"

namespace fake {

namespace {

std::atomic<uint64_t> delay_seed{1};
std::atomic<int64_t> delay_most_us{50};
std::atomic<uint64_t> delay_settings{1};  // incremented by each change, so that queues reseed
std::atomic<size_t> most_pending{SIZE_MAX};
thread_local bool is_of_a_queue = false;  // the thread of a queue, which must not wait for another queue

uint64_t next_random(uint64_t& state) {  // splitmix64
  uint64_t z = (state += 0x9e3779b97f4a7c15ull);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return z ^ (z >> 31);
}

}  // namespace

void set_delays(uint64_t seed, int64_t most_us) {
  delay_seed = seed;
  delay_most_us = most_us;
  ++delay_settings;
}

void set_queue_depth(size_t most) { most_pending = most; }

void Mark::pass() {
  std::vector<std::function<void()>> next;
  {
    std::lock_guard lock(mutex_);
    passed_ = true;
    when_ = std::chrono::steady_clock::now();
    next.swap(next_);
  }
  changed_.notify_all();
  for (auto& call : next) call();
}

bool Mark::passed() const {
  std::lock_guard lock(mutex_);
  return passed_;
}

void Mark::wait() const {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] { return passed_; });
}

std::chrono::steady_clock::time_point Mark::when() const {
  std::lock_guard lock(mutex_);
  return when_;
}

void Mark::then(std::function<void()> next) {
  {
    std::lock_guard lock(mutex_);
    if (!passed_) {
      next_.push_back(std::move(next));
      return;
    }
  }
  next();
}

void when_all(const std::vector<MarkPtr>& marks, std::function<void()> next) {
  auto open = std::make_shared<std::atomic<size_t>>(marks.size() + 1);
  auto shared_next = std::make_shared<std::function<void()>>(std::move(next));
  auto passed = [open, shared_next] {
    if (open->fetch_sub(1) == 1) (*shared_next)();
  };
  for (const MarkPtr& mark : marks) mark->then(passed);
  passed();
}

void Queue::push(std::function<void()> task, Pace pace) {
  if (const auto graph = this->graph()) {
    graph->add(*this, std::move(task), pace);
  } else {
    push_now(std::move(task), pace);
  }
}

uint64_t Queue::push_now(std::function<void()> task, Pace pace) {
  std::unique_lock lock(mutex_);
  if (!is_of_a_queue) popped_.wait(lock, [&] { return entries_.size() < most_pending; });
  entries_.push_back({std::move(task), pace});
  ++begun_;
  if (!started_) {
    started_ = true;
    // Signals go to the program's own threads, like with a driver's threads.
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    std::thread([this] { run(); }).detach();
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
  }
  pushed_.notify_one();
  return begun_;
}

MarkPtr Queue::mark(Pace pace) {
  if (const auto graph = this->graph()) return graph->mark(*this);
  auto mark = std::make_shared<Mark>();
  push_now([mark] { mark->pass(); }, pace);
  return mark;
}

void Queue::wait_for(MarkPtr mark) {
  const auto graph = this->graph();
  if (const auto& its = mark->graph()) {
    if (!its->is_open()) fault("a stream cannot wait for an event of a capture that has ended");
    if (graph && graph != its) graph->fault("a stream in a capture cannot wait for an event of another one");
    its->wait_for(*this, *mark);
  } else if (graph) {
    graph->fault("a stream in a capture cannot wait for an event from outside of it");
  } else {
    push_now([mark = std::move(mark)] { mark->wait(); }, Pace::kAtOnce);
  }
}

void Queue::drain() {
  if (const auto graph = this->graph()) graph->fault("no thread can wait for a stream in a capture");
  await(push_now([] {}, Pace::kAtOnce));
}

void Queue::await(uint64_t pushed) {
  std::unique_lock lock(mutex_);
  popped_.wait(lock, [&] { return ended_ >= pushed; });
}

bool Queue::idle() const {
  std::lock_guard lock(mutex_);
  return entries_.empty();
}

std::shared_ptr<Graph> Queue::graph() const {
  std::lock_guard lock(mutex_);
  return graph_;
}

void Queue::be_captured(std::shared_ptr<Graph> graph) {
  std::lock_guard lock(mutex_);
  graph_.swap(graph);
}

void Queue::run() {
  is_of_a_queue = true;
  std::unique_lock lock(mutex_);
  for (;;) {
    pushed_.wait(lock, [&] { return !entries_.empty(); });
    Entry entry = std::move(entries_.front());
    lock.unlock();
    if (entry.pace == Pace::kDelayed) delay_randomly(number_);
    entry.task();
    entry.task = nullptr;
    lock.lock();
    entries_.pop_front();
    ++ended_;
    popped_.notify_all();
  }
}

void delay_randomly(uint64_t number) {
  thread_local uint64_t random = 0, seen_settings = 0;
  const uint64_t settings = delay_settings;
  if (settings != seen_settings) {
    seen_settings = settings;
    random = delay_seed + (number << 32);
  }
  const int64_t most = delay_most_us;
  if (most > 0) std::this_thread::sleep_for(std::chrono::microseconds(next_random(random) % uint64_t(most + 1)));
}

}  // namespace fake
