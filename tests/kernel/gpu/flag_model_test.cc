// The packet and the chunk protocol as small state machines, of which every interleaving is searched. Without the
// double buffer, the credit or the order of flags, the same search must find the failure.

#include <gtest/gtest.h>

#include <cstdint>
#include <set>
#include <string>
#include <tuple>
#include <vector>

namespace nvx::test {
namespace {

/// Searches all states that are reachable from `first`. next(state, add) calls `add` for every step that a rank can
/// take, and returns what is wrong with the state, or "". A state without steps must be an end.
template <class State, class Next, class IsEnd>
std::string explore(const State& first, Next next, IsEnd is_end, size_t* states) {
  std::set<State> seen{first};
  std::vector<State> todo{first};
  while (!todo.empty()) {
    const State state = todo.back();
    todo.pop_back();
    size_t steps = 0;
    const std::string wrong = next(state, [&](const State& s) {
      ++steps;
      if (seen.insert(s).second) todo.push_back(s);
    });
    if (!wrong.empty()) return wrong;
    if (steps == 0 && !is_end(state)) return "ranks wait for ever";
  }
  *states = seen.size();
  return "";
}

// ---- Packets: in each epoch every rank writes to every other one, then reads from every other one.

struct PacketModel {
  int ranks = 2;
  int epochs = 6;
  int buffers = 2;       ///< the buffers that exist
  int stamp_range = 8;   ///< stamps are epochs modulo this
  int credit = 2;        ///< operations that a writer may be ahead of a reader that it has not met
  int rooted_every = 0;  ///< only rank 0 reads in each so many epochs; 0: never
};

struct PacketState {
  // By rank: its epoch; how many of its ranks * 2 steps of that epoch are done (writes, then reads).
  std::vector<int8_t> epoch, step;
  std::vector<int8_t> last_met;  ///< by rank and peer: the last epoch in which the peer was met
  std::vector<int8_t> done;      ///< by rank and peer: the last epoch that the peer has signalled as done
  std::vector<int8_t> slots;     ///< by owner, writer and buffer: the epoch that is written there; -1: none
  bool operator<(const PacketState& o) const {
    return std::tie(epoch, step, last_met, done, slots) < std::tie(o.epoch, o.step, o.last_met, o.done, o.slots);
  }
};

class Packets {
 public:
  explicit Packets(const PacketModel& m) : m_(m) {}

  std::string search(size_t* states) {
    const size_t n = size_t(m_.ranks);
    PacketState first;
    first.epoch.assign(n, 1), first.step.assign(n, 0);
    first.last_met.assign(n * n, 0), first.done.assign(n * n, 0);
    first.slots.assign(n * n * size_t(m_.buffers), -1);
    return explore(
        first, [&](const PacketState& s, auto add) { return next(s, add); },
        [&](const PacketState& s) {
          for (const int e : s.epoch) {
            if (e <= m_.epochs) return false;
          }
          return true;
        },
        states);
  }

 private:
  size_t pair(int a, int b) const { return size_t(a * m_.ranks + b); }
  size_t slot(int owner, int writer, int epoch) const {
    return pair(owner, writer) * size_t(m_.buffers) + size_t(epoch % m_.buffers);
  }
  bool rooted(int epoch) const { return m_.rooted_every != 0 && epoch % m_.rooted_every == 0; }
  bool reads(int rank, int epoch) const { return !rooted(epoch) || rank == 0; }

  template <class Add>
  std::string next(const PacketState& s, Add add) {
    for (int r = 0; r < m_.ranks; ++r) {
      const int epoch = s.epoch[size_t(r)], step = s.step[size_t(r)];
      if (epoch > m_.epochs) continue;
      const int peer = (r + 1 + step % m_.ranks) % m_.ranks;
      PacketState t = s;
      if (++t.step[size_t(r)] == 2 * m_.ranks) end(t, r, epoch);
      if (peer == r) {
        add(t);
      } else if (step < m_.ranks) {
        const bool is_free =
            s.last_met[pair(r, peer)] >= epoch - m_.credit + 1 || s.done[pair(r, peer)] >= epoch - m_.credit;
        if (!is_free) continue;
        t.slots[slot(peer, r, epoch)] = int8_t(epoch);
        add(t);
      } else if (!reads(r, epoch)) {
        add(t);
      } else {
        const int there = s.slots[slot(r, peer, epoch)];
        if (there >= 0 && there % m_.stamp_range == epoch % m_.stamp_range) {
          if (there != epoch) return "a rank takes an old packet for a new one";
          t.last_met[pair(r, peer)] = int8_t(epoch);
          add(t);
        } else if (there > epoch) {
          return "a packet is overwritten before it is read";
        }
      }
    }
    return "";
  }

  void end(PacketState& s, int r, int epoch) {
    s.epoch[size_t(r)] = int8_t(epoch + 1), s.step[size_t(r)] = 0;
    for (int p = 0; rooted(epoch) && p < m_.ranks; ++p) s.done[pair(p, r)] = int8_t(epoch);
  }

  const PacketModel m_;
};

std::string packets(const PacketModel& m, size_t* states = nullptr) {
  size_t count = 0;
  const std::string wrong = Packets(m).search(&count);
  if (states) *states = count;
  return wrong;
}

TEST(PacketProtocol, HoldsInEveryInterleaving) {
  for (const int ranks : {2, 3}) {
    for (const int rooted_every : {0, 1, 2, 3}) {
      size_t states = 0;
      const PacketModel m{.ranks = ranks, .epochs = ranks == 2 ? 9 : 4, .rooted_every = rooted_every};
      EXPECT_EQ(packets(m, &states), "") << ranks << " ranks, rooted every " << rooted_every;
      EXPECT_GT(states, 50u);
    }
  }
}

TEST(PacketProtocol, BreaksWithoutTheDoubleBuffer) {
  EXPECT_EQ(packets({.buffers = 1}), "a packet is overwritten before it is read");
}

/// If not all ranks meet each other, the double buffer alone is not enough.
TEST(PacketProtocol, BreaksWithoutCreditWhereNobodyAnswers) {
  EXPECT_EQ(packets({.credit = 100, .rooted_every = 1}), "a packet is overwritten before it is read");
  EXPECT_EQ(packets({.credit = 100, .rooted_every = 2}), "a packet is overwritten before it is read");
  EXPECT_EQ(packets({.credit = 100}), "") << "where all meet all, that is credit";
}

/// A packet of an epoch a whole range of stamps ago looks new.
TEST(PacketProtocol, BreaksWhereStampsRepeatWithinTheBuffers) {
  EXPECT_EQ(packets({.epochs = 8, .stamp_range = 2}), "a rank takes an old packet for a new one");
  EXPECT_EQ(packets({.epochs = 8, .stamp_range = 4}), "");
}

// ---- Chunks: a writer fills numbered slots, and a reader empties and returns them.

struct ChunkModel {
  int chunks = 9;
  int depth = 4;  ///< slots
  bool credits = true;
  bool ordered = true;  ///< a reader that sees the counter sees the data
  int range = 16;       ///< counters are modulo this, and compared modularly
};

struct ChunkState {
  int8_t written = 0;  ///< chunks whose data is there
  int8_t posted = 0;   ///< ... and announced
  int8_t read = 0;     ///< chunks whose data is read
  int8_t credit = 0;   ///< ... and given back
  std::vector<int8_t> slots;
  bool operator<(const ChunkState& o) const {
    return std::tie(written, posted, read, credit, slots) < std::tie(o.written, o.posted, o.read, o.credit, o.slots);
  }
};

std::string chunks(const ChunkModel& m) {
  const auto reached = [&](int value, int want) {
    return ((value - want) % m.range + m.range) % m.range < m.range / 2;
  };
  ChunkState first;
  first.slots.assign(size_t(m.depth), -1);
  size_t states = 0;
  return explore(
      first,
      [&](const ChunkState& s, auto add) -> std::string {
        if (s.written <= s.posted && s.written < m.chunks) {
          if (!m.credits || reached(s.credit % m.range, (s.written + 1 - m.depth + m.range) % m.range)) {
            ChunkState t = s;
            t.slots[size_t(s.written % m.depth)] = s.written;
            ++t.written;
            add(t);
          }
        }
        if (s.written > s.posted || (!m.ordered && s.posted == s.written && s.posted < m.chunks)) {
          ChunkState t = s;
          ++t.posted;
          add(t);
        }
        if (s.read == s.credit && s.read < m.chunks && reached(s.posted % m.range, (s.read + 1) % m.range)) {
          if (s.slots[size_t(s.read % m.depth)] != s.read) return "a reader finds another chunk than the next one";
          ChunkState t = s;
          ++t.read;
          add(t);
        }
        if (s.read > s.credit) {
          ChunkState t = s;
          ++t.credit;
          add(t);
        }
        return "";
      },
      [&](const ChunkState& s) { return s.credit == m.chunks; }, &states);
}

TEST(ChunkProtocol, HoldsInEveryInterleavingAndOverTheWrap) {
  EXPECT_EQ(chunks({}), "");
  EXPECT_EQ(chunks({.chunks = 40, .depth = 4, .range = 16}), "");
  EXPECT_EQ(chunks({.chunks = 40, .depth = 1, .range = 8}), "");
}

TEST(ChunkProtocol, BreaksWithoutCredits) {
  EXPECT_EQ(chunks({.credits = false}), "a reader finds another chunk than the next one");
}

TEST(ChunkProtocol, BreaksWhereACounterOvertakesItsData) {
  EXPECT_EQ(chunks({.ordered = false}), "a reader finds another chunk than the next one");
}

/// The slot is a remainder of the counter, which continues over the wrap only if it divides the range.
TEST(ChunkProtocol, BreaksWhereTheRangeIsTooSmallForTheDepth) {
  EXPECT_NE(chunks({.chunks = 40, .depth = 8, .range = 8}), "");
}

}  // namespace
}  // namespace nvx::test
