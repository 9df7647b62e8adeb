#include "support/simulate.h"

#include <algorithm>

namespace nvx::test {
namespace {

using schedule::Block;
using schedule::Collective;
using schedule::Layout;
using schedule::Range;
using schedule::Row;
using schedule::Step;

class Walk {
 public:
  Walk(const Row& row, const Shape& shape, const Costs& costs)
      : row_(row), shape_(shape), costs_(costs), ranks_(size_t(shape.size)) {}

  Simulated run() {
    for (int rank = 0; rank < shape_.size; ++rank) {
      ranks_[size_t(rank)].steps = row_.steps(shape_.layout(rank), rank);
      result_.most_steps = std::max(result_.most_steps, ranks_[size_t(rank)].steps);
      result_.most_scratch = std::max(result_.most_scratch, row_.scratch(shape_.layout(rank), rank));
      begin_next(rank);
    }
    while (!begun_.empty() && result_.error.empty()) {
      const int rank = begun_.back();
      begun_.pop_back();
      match(rank, ranks_[size_t(rank)].step.send_to, rank);
      match(ranks_[size_t(rank)].step.recv_from, rank, rank);
    }
    for (int rank = 0; rank < shape_.size; ++rank) sum_up(rank);
    return result_;
  }

 private:
  struct Rank {
    Step step;  ///< the one in flight
    uint64_t steps = 0, next = 0, messages = 0;
    bool sends = false, receives = false;
    double begun = 0, ends = 0;
    size_t sent = 0;
  };

  /// Advances to the next step that needs a peer.
  void begin_next(int rank) {
    Rank& r = ranks_[size_t(rank)];
    const Layout layout = shape_.layout(rank);
    r.sends = r.receives = false;
    r.begun = r.ends;
    while (r.next < r.steps) {
      r.step = row_.at(layout, rank, r.next++);
      if (r.step.send_to == rank) continue;
      r.sends = r.step.send_to >= 0, r.receives = r.step.recv_from >= 0;
      begun_.push_back(rank);
      return;
    }
  }

  /// Passes the message if sender and receiver are both at its step.
  void match(int from, int to, int because_of) {
    if (from < 0 || to < 0) return;
    Rank &sender = ranks_[size_t(from)], &receiver = ranks_[size_t(to)];
    if (!sender.sends || sender.step.send_to != to || !receiver.receives || receiver.step.recv_from != from) return;
    const size_t bytes = sender.step.send.bytes;
    if (bytes != receiver.step.recv.bytes) return fail(because_of, "a message of another length");
    sender.sends = receiver.receives = false;
    const double passed = std::max(sender.begun, receiver.begun) + costs_.message + double(bytes) * costs_.byte;
    sender.ends = std::max(sender.ends, passed);
    receiver.ends = std::max(receiver.ends, passed + (receiver.step.reduce ? double(bytes) * costs_.reduced_byte : 0));
    sender.sent += bytes;
    ++sender.messages;
    ++result_.messages;
    if (!sender.receives) begin_next(from);
    if (!receiver.sends && to != from) begin_next(to);
  }

  void sum_up(int rank) {
    const Rank& r = ranks_[size_t(rank)];
    if (r.sends || r.receives || r.next != r.steps) fail(rank, "waits for ever");
    result_.most_messages = std::max(result_.most_messages, r.messages);
    result_.most_sent = std::max(result_.most_sent, r.sent);
    result_.seconds = std::max(result_.seconds, r.ends);
  }

  void fail(int rank, const char* what) {
    if (!result_.error.empty()) return;
    result_.error = "rank " + std::to_string(rank) + " step " + std::to_string(ranks_[size_t(rank)].next) + ": " + what;
  }

  const Row& row_;
  const Shape& shape_;
  const Costs costs_;
  std::vector<Rank> ranks_;
  std::vector<int> begun_;
  Simulated result_;
};

/// The steps of one rank.
struct Steps {
  const Row& row;
  Layout layout;
  int rank;
  uint64_t count;

  Steps(const Row& r, const Shape& shape, int of)
      : row(r), layout(shape.layout(of)), rank(of), count(r.steps(layout, of)) {}
  Step at(uint64_t i) const { return row.at(layout, rank, i); }
};

/// Whether the number and lengths of messages between two ranks match on both sides.
bool agree(const Steps& from, const Steps& to) {
  uint64_t k = 0;
  for (uint64_t i = 0; i < from.count; ++i) {
    const Step sent = from.at(i);
    if (sent.send_to != to.rank) continue;
    while (k < to.count && to.at(k).recv_from != from.rank) ++k;
    if (k == to.count || to.at(k++).recv.bytes != sent.send.bytes) return false;
  }
  while (k < to.count && to.at(k).recv_from != from.rank) ++k;
  return k == to.count;
}

struct Bounds {
  size_t bytes[3];  ///< by Buffer

  bool holds(const Range& r, size_t width) const {
    const size_t room = bytes[int(r.buffer)];
    return r.bytes == 0 ||
           (r.bytes <= room && r.offset <= room - r.bytes && r.bytes % width == 0 && r.offset % width == 0);
  }
};

std::string sample_rank(const Row& row, const Shape& shape, const Steps& steps, Simulated* result) {
  const size_t scratch = row.scratch(steps.layout, steps.rank);
  const Bounds bounds{{shape.input_bytes(steps.rank), shape.output_bytes(steps.rank), scratch}};
  std::vector<int> peers;
  uint64_t messages = 0;
  size_t sent = 0;
  for (uint64_t i = 0; i < steps.count; ++i) {
    const Step s = steps.at(i);
    for (const Range& range : {s.send, s.recv, s.with}) {
      if (!bounds.holds(range, shape.width)) return "step " + std::to_string(i) + " is out of bounds";
    }
    if (s.send_to < 0 || s.send_to == steps.rank) continue;
    ++messages;
    sent += s.send.bytes;
    if (i == 0 || i == steps.count / 2 || i + 2 >= steps.count) peers.push_back(s.send_to);
  }
  std::sort(peers.begin(), peers.end());
  peers.erase(std::unique(peers.begin(), peers.end()), peers.end());
  for (const int peer : peers) {
    if (!agree(steps, Steps(row, shape, peer))) return "sends what rank " + std::to_string(peer) + " does not await";
  }
  result->messages += messages;
  result->most_steps = std::max(result->most_steps, steps.count);
  result->most_messages = std::max(result->most_messages, messages);
  result->most_sent = std::max(result->most_sent, sent);
  result->most_scratch = std::max(result->most_scratch, scratch);
  return "";
}

}  // namespace

Simulated simulate(const Row& row, const Shape& shape, const Costs& costs) { return Walk(row, shape, costs).run(); }

Simulated sample(const Row& row, const Shape& shape, std::span<const int> ranks) {
  Simulated result;
  for (const int rank : ranks) {
    const std::string error = sample_rank(row, shape, Steps(row, shape, rank), &result);
    if (!error.empty()) result.error = "rank " + std::to_string(rank) + ": " + error;
  }
  return result;
}

Shape large_shape(Collective collective, int size, size_t bytes_a_rank, size_t width) {
  Shape shape{.collective = collective, .size = size, .width = width};
  std::vector<Block> blocks;
  for (int i = 0; i < size; ++i) blocks.push_back({size_t(i) * bytes_a_rank, bytes_a_rank});
  if (collective == Collective::kAllToAll) {
    shape.to = shape.from = {blocks};
  } else if (has_blocks(collective)) {
    shape.blocks = blocks;
  } else {
    shape.bytes = size_t(size) * bytes_a_rank;
  }
  if (collective == Collective::kBarrier) shape.bytes = 0, shape.width = 1;
  return shape;
}

}  // namespace nvx::test
