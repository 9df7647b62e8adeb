#pragma once

#include "schedule/catalog.h"

/// Every rank exchanges with every other, in step k with the ranks at distance k. The steps are independent, so several
/// go out at once: the lowest latency between few ranks.
namespace nvx::schedule {

struct PairwiseExchange : AnyLayout {
  static constexpr uint64_t messages(int size) { return uint64_t(size - 1); }
  static constexpr uint64_t depth(int size) { return size > 1; }
};

struct PairwiseAllToAll : PairwiseExchange {
  static constexpr uint64_t steps(const Layout& l, int) { return uint64_t(l.size); }

  static constexpr Step at(const Layout& l, int rank, uint64_t i) {
    const int k = int(i) + 1, to = mod(rank + k, l.size), from = mod(rank - k, l.size);  // the last step: with itself
    return {.send_to = to,
            .send = l.to[size_t(to)].in(kInput),
            .recv_from = from,
            .recv = l.from[size_t(from)].in(kOutput)};
  }

  static constexpr Order kOrder = Order::kNone;
  static constexpr size_t sent(const Layout& l) { return all_but_one(l.to); }
};

struct DirectAllGather : PairwiseExchange {
  static constexpr uint64_t steps(const Layout& l, int) { return uint64_t(l.size); }

  static constexpr Step at(const Layout& l, int rank, uint64_t i) {
    const int k = int(i) + 1, from = mod(rank - k, l.size);  // the last step: from itself
    return {.send_to = mod(rank + k, l.size),
            .send = l.own(rank).in(kInput),
            .recv_from = from,
            .recv = l.block(from).in(kOutput)};
  }

  static constexpr Order kOrder = Order::kNone;
  static constexpr size_t sent(const Layout& l) { return size_t(l.size - 1) * longest(l.blocks); }
};

/// Two ranks: each sends its whole input and adds what it receives. One message, where a ring takes two.
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

/// Receives the inputs of all ranks unreduced and adds them in rank order. Scratch holds the other ranks' parts in
/// order. The sum grows in the first of them and is completed in the output.
struct RankOrder {
  int size, rank;
  Range mine, result;  ///< the rank's part of the input, and the output
  size_t bytes;

  constexpr Range of(int source) const {
    return source == rank ? mine : Range{kScratch, size_t(source - (source > rank)) * bytes, bytes};
  }
  /// The k-th addition: of rank k's part, 1 <= k < size. `mine` and `result` may be the same memory, so the sum stays
  /// in scratch until `mine` has been added.
  constexpr Step add(int k) const {
    const bool begun = k > rank && (rank > 0 || k > 1), done = k >= rank;
    return combine(rank, of(k), begun ? result : of(0), done ? result : of(0));
  }
};

/// Each rank receives its block from every rank unreduced and adds in rank order: the same bits as inside one host.
struct PairwiseReduceScatter : PairwiseExchange {
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

/// Every rank receives every input whole and adds in rank order.
struct DirectAllReduce : PairwiseExchange {
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
