#pragma once

#include "schedule/catalog.h"

/// Everybody exchanges with everybody, in step k with the ranks k further and k before. Nothing waits for anything
/// else, so a window of steps goes out at once: the least latency between few ranks.
namespace nvx::schedule {

struct EachOther : AnyLayout {
  static constexpr uint64_t messages(int size) { return uint64_t(size - 1); }
  static constexpr uint64_t depth(int size) { return size > 1; }
};

struct PairwiseAllToAll : EachOther {
  static constexpr uint64_t steps(const Layout& l, int) { return uint64_t(l.size); }

  static constexpr Step at(const Layout& l, int rank, uint64_t i) {
    const int k = int(i) + 1, to = mod(rank + k, l.size), from = mod(rank - k, l.size);  // at last with itself
    return {.send_to = to,
            .send = l.to[size_t(to)].in(kInput),
            .recv_from = from,
            .recv = l.from[size_t(from)].in(kOutput)};
  }

  static constexpr Order kOrder = Order::kNone;
  static constexpr size_t sent(const Layout& l) { return all_but_one(l.to); }
};

struct DirectAllGather : EachOther {
  static constexpr uint64_t steps(const Layout& l, int) { return uint64_t(l.size); }

  static constexpr Step at(const Layout& l, int rank, uint64_t i) {
    const int k = int(i) + 1, from = mod(rank - k, l.size);  // at last from itself
    return {.send_to = mod(rank + k, l.size),
            .send = l.own(rank).in(kInput),
            .recv_from = from,
            .recv = l.block(from).in(kOutput)};
  }

  static constexpr Order kOrder = Order::kNone;
  static constexpr size_t sent(const Layout& l) { return size_t(l.size - 1) * longest(l.blocks); }
};

/// Two ranks: each sends all it has and adds what comes. One message, where a ring would take two.
struct PairAllReduce : AnyLayout {
  static constexpr bool legal(const Layout& l) { return l.size == 2; }
  static constexpr uint64_t steps(const Layout&, int) { return 1; }

  static constexpr Step at(const Layout& l, int rank, uint64_t) {
    return {.send_to = 1 - rank,
            .send = l.whole().in(kInput),
            .recv_from = 1 - rank,
            .recv = l.whole().in(kOutput),
            .reduce = true,
            .with = l.whole().in(kInput)};
  }

  static constexpr Order kOrder = Order::kRank;
  static constexpr uint64_t messages(int) { return 1; }
  static constexpr uint64_t depth(int) { return 1; }
  static constexpr size_t sent(const Layout& l) { return l.bytes; }
};

/// What all ranks have for one place, brought there as it is and then added in the order of the ranks. The others'
/// parts lie in scratch one behind the other; the sum grows in the first of them and is finished in the output.
struct RankOrder {
  int size, rank;
  Range mine, result;  ///< the own part in the input, the sum in the output
  size_t bytes;

  constexpr Range of(int source) const {
    return source == rank ? mine : Range{kScratch, size_t(source - (source > rank)) * bytes, bytes};
  }
  /// The k-th addition, of rank k's part, 1 <= k < size. The own part may be where the result goes: until it has been
  /// added the sum stays in scratch.
  constexpr Step add(int k) const {
    const bool begun = k > rank && (rank > 0 || k > 1), done = k >= rank;
    return combine(rank, of(k), begun ? result : of(0), done ? result : of(0));
  }
};

/// Each rank gets its block from everybody as it is, and adds in the order of the ranks: the bits that one host gives.
struct PairwiseReduceScatter : EachOther {
  static constexpr uint64_t steps(const Layout& l, int) { return l.size == 1 ? 1 : 2 * uint64_t(l.size - 1); }

  static constexpr Step at(const Layout& l, int rank, uint64_t i) {
    const Block own = l.block(rank);
    if (l.size == 1) return move(rank, own.in(kInput), l.own(rank).in(kOutput));
    const RankOrder order{l.size, rank, own.in(kInput), l.own(rank).in(kOutput), own.bytes};
    const int k = int(i) + 1;
    if (k >= l.size) return order.add(k - l.size + 1);
    const int to = mod(rank + k, l.size), from = mod(rank - k, l.size);
    return {.send_to = to, .send = l.block(to).in(kInput), .recv_from = from, .recv = order.of(from)};
  }

  static constexpr size_t scratch(const Layout& l, int rank) { return size_t(l.size - 1) * l.block(rank).bytes; }
  static constexpr Order kOrder = Order::kRank;
  static constexpr size_t sent(const Layout& l) { return all_but_one(l.blocks); }
};

/// Everybody gets all of everybody's input, and adds in the order of the ranks.
struct DirectAllReduce : EachOther {
  static constexpr uint64_t steps(const Layout& l, int) { return l.size == 1 ? 1 : 2 * uint64_t(l.size - 1); }

  static constexpr Step at(const Layout& l, int rank, uint64_t i) {
    if (l.size == 1) return move(rank, l.whole().in(kInput), l.whole().in(kOutput));
    const RankOrder order{l.size, rank, l.whole().in(kInput), l.whole().in(kOutput), l.bytes};
    const int k = int(i) + 1;
    if (k >= l.size) return order.add(k - l.size + 1);
    const int from = mod(rank - k, l.size);
    return {.send_to = mod(rank + k, l.size), .send = l.whole().in(kInput), .recv_from = from, .recv = order.of(from)};
  }

  static constexpr size_t scratch(const Layout& l, int) { return size_t(l.size - 1) * l.bytes; }
  static constexpr Order kOrder = Order::kRank;
  static constexpr size_t sent(const Layout& l) { return size_t(l.size - 1) * l.bytes; }
};

}  // namespace nvx::schedule
