#pragma once

#include "schedule/catalog.h"

/// Every rank exchanges with every other, in step k at distance k. The steps are independent, for the lowest latency.
namespace nvx::schedule {

struct PairwiseAllToAll : AnyLayout {
  static constexpr uint64_t steps(const Layout& l, int) { return uint64_t(l.size); }

  static constexpr Step at(const Layout& l, int rank, uint64_t i) {
    const int k = int(i) + 1, to = mod(rank + k, l.size), from = mod(rank - k, l.size);  // the last step: with itself
    return {.send_to = to,
            .send = l.to[size_t(to)].in(kInput),
            .recv_from = from,
            .recv = l.from[size_t(from)].in(kOutput)};
  }

  static constexpr uint64_t depth(int size) { return size > 1; }
};

struct DirectAllGather : AnyLayout {
  static constexpr uint64_t steps(const Layout& l, int) { return uint64_t(l.size); }

  static constexpr Step at(const Layout& l, int rank, uint64_t i) {
    const int k = int(i) + 1, from = mod(rank - k, l.size);  // the last step: from itself
    return {.send_to = mod(rank + k, l.size),
            .send = l.own(rank).in(kInput),
            .recv_from = from,
            .recv = l.block(from).in(kOutput)};
  }

  static constexpr uint64_t depth(int size) { return size > 1; }
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
  static constexpr uint64_t depth(int) { return 1; }
};

}  // namespace nvx::schedule
