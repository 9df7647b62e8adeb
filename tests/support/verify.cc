#include "support/verify.h"

#include <algorithm>
#include <random>

#include "support/traffic.h"

namespace nvx::test {
namespace {

using schedule::Block;
using schedule::Buffer;
using schedule::Layout;
using schedule::Order;
using schedule::Range;
using schedule::Row;
using schedule::Step;

/// An element, as symbols.
struct Cell {
  uint64_t sum = 0;    ///< of the random numbers of its terms
  uint64_t tree = 0;   ///< identifies its combinations
  uint64_t form = 0;   ///< the same, by ranks instead of elements
  uint64_t depth = 0;  ///< the number of messages in sequence that it took

  static Cell of_input(int rank, size_t element) {
    const uint64_t weight = mix(uint64_t(rank) + 1, element);
    return {weight, mix(weight, 1), mix(uint64_t(rank), 2), 0};
  }
  static Cell garbage(uint64_t seed, size_t at) { return {mix(seed, ~at), 0, 0, 0}; }
};

/// a + b == b + a, but (a + b) + c != a + (b + c), except in the sum.
Cell combine(const Cell& a, const Cell& b) {
  const auto both = [](uint64_t x, uint64_t y) { return mix(std::min(x, y), std::max(x, y)); };
  return {a.sum + b.sum, both(a.tree, b.tree), both(a.form, b.form), std::max(a.depth, b.depth)};
}

/// Elements of one rank's memory, from an index in `cells` on.
struct Span {
  size_t begin = 0, end = 0;
  bool empty() const { return begin == end; }
  size_t length() const { return end - begin; }
  bool overlaps(const Span& o) const { return begin < o.end && o.begin < end && !empty() && !o.empty(); }
  bool is(const Span& o) const { return begin == o.begin && end == o.end; }
};

/// Input, output and scratch of one rank.
struct RankMemory {
  std::vector<Cell> cells;
  Span buffers[3];

  RankMemory(const Shape& shape, int rank, size_t scratch, Memory memory, uint64_t seed) {
    const size_t width = shape.width, in = shape.input_bytes(rank), out = shape.output_bytes(rank);
    const Overlay o = memory == Memory::kShared ? overlay(shape, rank) : Overlay{.output = in};
    const size_t end = std::max(o.input + in, o.output + out);
    buffers[int(Buffer::kInput)] = {o.input / width, (o.input + in) / width};
    buffers[int(Buffer::kOutput)] = {o.output / width, (o.output + out) / width};
    buffers[int(Buffer::kScratch)] = {end / width, (end + scratch) / width};
    for (size_t i = 0; i < (end + scratch) / width; ++i) cells.push_back(Cell::garbage(seed + uint64_t(rank), i));
    const Span& input = buffers[int(Buffer::kInput)];
    for (size_t i = input.begin; i < input.end; ++i) cells[i] = Cell::of_input(rank, i - input.begin);
  }
};

struct Message {
  int from = 0, to = 0;
  size_t flight = 0;  ///< of the sender
  Span span;
  std::vector<Cell> cells;  ///< once read
  bool read = false;
  uint64_t knows = 0;  ///< the ranks that the sender knew to have begun
};

/// A step in flight.
struct Flight {
  int rank = 0;
  uint64_t number = 0;
  bool reduce = false, sends = false, receives = false;  ///< what is still to be done
  Span send{}, recv{}, with{};
  size_t message = 0;
};

/// The k-th message of a pair of ranks matches the k-th step that waits for it.
struct Channel {
  std::vector<size_t> messages, waiting;
  size_t matched = 0;
};

class Runner {
 public:
  Runner(const Script& script, const Conditions& c)
      : script_(script), shape_(script.shape), c_(c), random_(c.seed), size_(size_t(shape_.size)) {
    eager_ = int(random_() % 3) * 50;
    halves_ = random_() % 2;
    channels_.resize(size_ * size_);
    for (int rank = 0; rank < shape_.size; ++rank) {
      memories_.emplace_back(shape_, rank, script.scratch[size_t(rank)], c.memory, c.seed);
      ready_.push_back(rank);
    }
    before_ = memories_;
    next_.resize(size_), under_way_.resize(size_), knows_.resize(size_);
    outcome_.sent.resize(size_), outcome_.messages_out.resize(size_), outcome_.messages_in.resize(size_);
  }

  Outcome run() {
    while (outcome_.error.empty() && go_on()) continue;
    if (outcome_.error.empty()) check_ends();
    for (int rank = 0; outcome_.error.empty() && rank < shape_.size; ++rank) check_memory(rank);
    return std::move(outcome_);
  }

 private:
  // ---- The next event

  template <class T>
  T take(std::vector<T>& from) {
    std::swap(from[random_() % from.size()], from.back());
    T taken = std::move(from.back());
    from.pop_back();
    return taken;
  }

  /// One event. Returns false if there is none left.
  bool go_on() {
    const bool only_late = ready_.size() == 1 && ready_[0] == c_.late;
    const bool others = !unread_.empty() || !arriving_.empty();
    if (!ready_.empty() && (!others || (!only_late && wants_to_post()))) {
      post_one();
    } else if (!unread_.empty() && (arriving_.empty() || random_() % 3 == 0)) {
      read(take(unread_));
    } else if (!arriving_.empty()) {
      deliver();
    } else {
      return false;
    }
    return true;
  }

  bool wants_to_post() {
    if (c_.timing == Timing::kPostFirst) return true;
    return c_.timing == Timing::kAny && random_() % 2;
  }

  void post_one() {
    int rank = take(ready_);
    if (rank == c_.late && !ready_.empty()) std::swap(rank, ready_[random_() % ready_.size()]);
    const auto& steps = script_.steps[size_t(rank)];
    auto& mine = under_way_[size_t(rank)];
    if (next_[size_t(rank)] == steps.size() || mine.size() >= size_t(c_.depth)) return;
    Flight flight;
    if (!understand(rank, steps[next_[size_t(rank)]], &flight)) return;
    const bool nothing = steps[flight.number].send_to == rank && !flight.reduce && flight.send.is(flight.recv);
    if (!nothing && !is_clear(flight)) return;
    ++next_[size_t(rank)];
    ready_.push_back(rank);
    knows_[size_t(rank)] |= uint64_t(1) << rank;
    if (nothing) return;  // a move of a range onto itself
    mine.push_back(flights_.size());
    flights_.push_back(flight);
    enqueue(steps[flight.number], flights_.size() - 1);
  }

  void enqueue(const Step& step, size_t flight) {
    const int rank = flights_[flight].rank;
    if (step.send_to >= 0) {
      const size_t message = messages_.size();
      messages_.push_back({rank, step.send_to, flight, flights_[flight].send, {}, false, knows_[size_t(rank)]});
      flights_[flight].message = message;
      unread_.push_back(message);
      channel(rank, step.send_to).messages.push_back(message);
      if (step.send_to != rank) outcome_.sent[size_t(rank)] += step.send.bytes, ++outcome_.messages_out[size_t(rank)];
      match(channel(rank, step.send_to));
    }
    if (step.recv_from >= 0) {
      channel(step.recv_from, rank).waiting.push_back(flight);
      if (step.recv_from != rank) ++outcome_.messages_in[size_t(rank)];
      match(channel(step.recv_from, rank));
    }
  }

  Channel& channel(int from, int to) { return channels_[size_t(from) * size_ + size_t(to)]; }

  void match(Channel& ch) {
    if (ch.matched == std::min(ch.messages.size(), ch.waiting.size())) return;
    const size_t message = ch.messages[ch.matched], flight = ch.waiting[ch.matched];
    ++ch.matched;
    const Span &out = messages_[message].span, &in = flights_[flight].recv;
    if (out.length() == in.length()) {
      arriving_.push_back({message, flight});
    } else {
      fail(flights_[flight], "receives a message of another length");
    }
  }

  /// The link reads the message's bytes, at any moment until it is delivered. An eager send has then ended.
  void read(size_t message) {
    Message& m = messages_[message];
    if (m.read) return;
    const auto& cells = memories_[size_t(m.from)].cells;
    m.cells.assign(cells.begin() + ptrdiff_t(m.span.begin), cells.begin() + ptrdiff_t(m.span.end));
    m.read = true;
    if (int(random_() % 100) < eager_) end_send(m);
  }

  void end_send(const Message& m) {
    flights_[m.flight].sends = false;
    end(m.flight);
  }

  void deliver() {
    const auto [message, flight] = take(arriving_);
    Flight& f = flights_[flight];
    if (f.sends && f.send.overlaps(f.recv)) read(f.message);
    read(message);
    Message& m = messages_[message];
    auto& cells = memories_[size_t(m.to)].cells;
    for (size_t i = 0; i < m.cells.size(); ++i) {
      Cell cell = m.cells[i];
      cell.depth += m.from != m.to;
      outcome_.depth = std::max(outcome_.depth, cell.depth);
      cells[f.recv.begin + i] = f.reduce ? combine(cell, cells[f.with.begin + i]) : cell;
    }
    m.cells = {};
    knows_[size_t(m.to)] |= m.knows;
    f.receives = false;
    if (flights_[m.flight].sends) end_send(m);
    end(flight);
  }

  void end(size_t flight) {
    const Flight& f = flights_[flight];
    if (f.sends || f.receives) {
      if (halves_) wake(f.rank);
      return;
    }
    auto& mine = under_way_[size_t(f.rank)];
    mine.erase(std::remove(mine.begin(), mine.end(), flight), mine.end());
    wake(f.rank);
    const bool last = mine.empty() && next_[size_t(f.rank)] == script_.steps[size_t(f.rank)].size();
    const uint64_t all = size_ < 64 ? (uint64_t(1) << size_) - 1 : ~uint64_t(0);
    if (last && shape_.collective == schedule::Collective::kBarrier && knows_[size_t(f.rank)] != all) {
      fail(f, "ends before all have begun");
    }
  }

  void wake(int rank) {
    if (std::find(ready_.begin(), ready_.end(), rank) == ready_.end()) ready_.push_back(rank);
  }

  // ---- The rules of a step

  /// Whether no step in flight writes anything that this one accesses, or reads anything that it writes.
  bool is_clear(const Flight& f) const {
    if (c_.hazards == Hazards::kIgnored) return true;
    for (const size_t other : under_way_[size_t(f.rank)]) {
      const Flight& o = flights_[other];
      const bool reads = o.sends || !halves_, writes = o.receives || !halves_;
      if (reads && f.recv.overlaps(o.send)) return false;
      if (writes &&
          (f.recv.overlaps(o.recv) || f.recv.overlaps(o.with) || f.send.overlaps(o.recv) || f.with.overlaps(o.recv))) {
        return false;
      }
    }
    return true;
  }

  bool understand(int rank, const Step& step, Flight* f) {
    f->rank = rank, f->number = next_[size_t(rank)];
    f->sends = step.send_to >= 0, f->receives = step.recv_from >= 0, f->reduce = step.reduce;
    const bool self = step.send_to == rank || step.recv_from == rank;
    if (!f->sends && !f->receives) return fail(*f, "does nothing");
    if (step.send_to >= shape_.size || step.recv_from >= shape_.size) return fail(*f, "names no rank");
    if (self && step.send_to != step.recv_from) return fail(*f, "goes to itself only half");
    if (f->sends && !locate(*f, step.send, &f->send)) return false;
    if (f->receives && !locate(*f, step.recv, &f->recv)) return false;
    if (step.reduce && !locate(*f, step.with, &f->with)) return false;
    return is_sound(step, *f);
  }

  bool is_sound(const Step& step, const Flight& f) {
    const auto same_or_apart = [](const Span& a, const Span& b) { return a.is(b) || !a.overlaps(b); };
    if (step.reduce && (!f.receives || step.with.bytes != step.recv.bytes)) return fail(f, "combines what?");
    if (f.receives && step.recv.buffer == Buffer::kInput) return fail(f, "writes to the input");
    if (!same_or_apart(f.send, f.recv) || !same_or_apart(f.send, f.with) || !same_or_apart(f.recv, f.with)) {
      return fail(f, "has ranges that overlap");
    }
    if (!step.reduce && step.send_to != f.rank && f.send.overlaps(f.recv)) {
      return fail(f, "receives over what it sends");
    }
    return true;
  }

  bool locate(const Flight& f, const Range& range, Span* span) {
    const Span& buffer = memories_[size_t(f.rank)].buffers[int(range.buffer)];
    if (range.offset % shape_.width || range.bytes % shape_.width) return fail(f, "splits an element");
    const size_t begin = range.offset / shape_.width, length = range.bytes / shape_.width;
    if (length > 0 && (begin > buffer.length() || length > buffer.length() - begin)) return fail(f, "is out of bounds");
    *span = {buffer.begin + begin, buffer.begin + begin + length};
    return true;
  }

  // ---- The expected results

  void check_ends() {
    for (size_t r = 0; r < size_; ++r) {
      if (next_[r] == script_.steps[r].size() && under_way_[r].empty()) continue;
      const uint64_t step = under_way_[r].empty() ? next_[r] : flights_[under_way_[r][0]].number;
      fail({.rank = int(r), .number = step}, "waits for ever");
    }
    for (const Channel& ch : channels_) {
      if (ch.matched != ch.messages.size())
        fail(flights_[messages_[ch.messages.back()].flight], "is received by nobody");
    }
  }

  void check_memory(int rank) {
    const RankMemory& memory = memories_[size_t(rank)];
    const RankMemory& before = before_[size_t(rank)];
    std::vector<bool> due(memory.cells.size());
    for (const Due& d : contract(shape_, rank)) {
      const Span output = memory.buffers[int(Buffer::kOutput)];
      for (size_t i = 0; i < d.output.bytes / shape_.width; ++i) {
        const size_t at = output.begin + d.output.offset / shape_.width + i;
        due[at] = true;
        check_cell(rank, memory.cells[at], d, d.input_offset / shape_.width + i);
      }
    }
    for (size_t i = 0; i < memory.buffers[int(Buffer::kScratch)].begin; ++i) {
      if (!due[i] && memory.cells[i].sum != before.cells[i].sum) {
        fail({.rank = rank, .number = next_[size_t(rank)]}, "wrote where it has no business");
      }
    }
  }

  void check_cell(int rank, const Cell& cell, const Due& due, size_t element) {
    const Flight end{.rank = rank, .number = next_[size_t(rank)]};
    outcome_.trees = mix(outcome_.trees, cell.tree);
    if (due.source != kEverybody) {
      if (cell.tree != Cell::of_input(due.source, element).tree) fail(end, "ends with something else than it is due");
      return;
    }
    const Expected& want = expected(element);
    if (cell.sum != want.in_order.sum) fail(end, "ends with another sum than it is due");
    if (cell.tree != want.tree && want.tree) fail(end, "has added in another order than others");
    expected_[element].tree = cell.tree;
    form_ = form_ ? form_ : cell.form;
    outcome_.uniform = outcome_.uniform && cell.form == form_;
    outcome_.by_rank = outcome_.by_rank && cell.tree == want.in_order.tree;
  }

  struct Expected {
    Cell in_order;
    uint64_t tree = 0;  ///< of the first rank that had it
  };
  const Expected& expected(size_t element) {
    while (expected_.size() <= element) {
      Cell cell = Cell::of_input(0, expected_.size());
      for (int r = 1; r < shape_.size; ++r) cell = combine(cell, Cell::of_input(r, expected_.size()));
      expected_.push_back({cell, 0});
    }
    return expected_[element];
  }

  /// Keeps the first failure. Always returns false.
  bool fail(const Flight& f, const char* what) {
    if (!outcome_.error.empty()) return false;
    outcome_.error = "rank " + std::to_string(f.rank) + " step " + std::to_string(f.number) + " " + what + "; " +
                     shape_.text() + "; " + c_.text();
    return false;
  }

  const Script& script_;
  const Shape& shape_;
  const Conditions c_;
  std::mt19937_64 random_;
  const size_t size_;
  int eager_;    ///< percentage of messages that need not wait for their receiver
  bool halves_;  ///< whether a step's outgoing message frees its bytes while the incoming one is awaited, and the
                 ///< reverse
  std::vector<RankMemory> memories_, before_;
  std::vector<uint64_t> next_;  ///< by rank, like the following
  std::vector<std::vector<size_t>> under_way_;
  std::vector<uint64_t> knows_;
  std::vector<Flight> flights_;
  std::vector<Message> messages_;
  std::vector<Channel> channels_;
  std::vector<int> ready_;  ///< ranks that may be able to begin a step
  std::vector<size_t> unread_;
  std::vector<std::pair<size_t, size_t>> arriving_;  ///< a message, and the flight that waits for it
  std::vector<Expected> expected_;
  uint64_t form_ = 0;
  Outcome outcome_;
};

const char* text_of(Timing timing) {
  return timing == Timing::kAny ? "at random" : timing == Timing::kPostFirst ? "as early as can be" : "as late";
}

}  // namespace

bool legal(const Row& row, const Shape& shape) {
  for (int rank = 0; rank < shape.size; ++rank) {
    if (!row.legal(shape.layout(rank))) return false;
  }
  return true;
}

Script write_out(const Row& row, const Shape& shape) {
  Script script{shape, {}, {}};
  for (int rank = 0; rank < shape.size; ++rank) {
    const Layout layout = shape.layout(rank);
    script.scratch.push_back(row.scratch(layout, rank));
    script.steps.emplace_back(row.steps(layout, rank));
    for (uint64_t i = 0; i < script.steps.back().size(); ++i) script.steps.back()[i] = row.at(layout, rank, i);
  }
  return script;
}

std::string Conditions::text() const {
  return "depth " + std::to_string(depth) + (memory == Memory::kShared ? ", in place, " : ", ") + text_of(timing) +
         (late < 0 ? "" : ", rank " + std::to_string(late) + " late") + ", seed " + std::to_string(seed);
}

Outcome run_script(const Script& script, const Conditions& conditions) { return Runner(script, conditions).run(); }

std::string breach(const Row& row, const Shape& shape, const Outcome& outcome) {
  const auto over = [](const std::string& what, uint64_t is, uint64_t most) {
    return is <= most ? "" : what + " " + std::to_string(is) + ", not " + std::to_string(most) + "; ";
  };
  const uint64_t messages = most_messages(row, shape.size);
  std::string found = outcome.error + over("depth", outcome.depth, row.guarantee.depth(shape.size));
  for (int rank = 0; rank < shape.size; ++rank) {
    found += over("bytes sent", outcome.sent[size_t(rank)], most_sent(row, shape.layout(rank)));
    found += over("messages sent", outcome.messages_out[size_t(rank)], messages);
    found += over("messages received", outcome.messages_in[size_t(rank)], messages);
  }
  if (row.guarantee.order == Order::kUniform && !outcome.uniform) found += "not the same order for all elements; ";
  if (row.guarantee.order == Order::kRank && !outcome.by_rank) found += "not in the order of the ranks; ";
  return found.empty() ? "" : std::string(row.name) + ": " + found;
}

}  // namespace nvx::test
