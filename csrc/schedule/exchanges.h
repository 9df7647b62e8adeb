#pragma once

#include "schedule/catalog.h"

/// Direct exchanges between ranks, and rounds between ranks at distance 1, 2, 4 ...
namespace nvx::schedule {

/// Every rank exchanges with every other, in step k at distance k. The steps are independent, for the lowest latency.
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

/// The same for one block of each rank.
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

/// Rounds of distance 1, 2, 4 ... over any number of ranks, with copies in scratch: for small blocks of one length.
/// Scratch holds the blocks of rank, rank + 1, ...; each round nearly doubles them. The last steps copy them out.
struct BruckAllGather : AnyLayout {
  static constexpr bool legal(const Layout& l) { return equally_long(l.blocks); }

  static constexpr uint64_t steps(const Layout& l, int) {
    return 1 + uint64_t(log2_up(l.size)) + (contiguous(l.blocks) ? 2 : uint64_t(l.size));
  }

  static constexpr Step at(const Layout& l, int rank, uint64_t i) {
    const int rounds = log2_up(l.size), k = int(i) - 1;
    if (k < 0) return move(rank, l.own(rank).in(kInput), held(l, 0, 1));
    if (k >= rounds) return turn(l, rank, k - rounds);
    const int have = 1 << k, more = have < l.size - have ? have : l.size - have;
    return {.send_to = mod(rank - have, l.size),
            .send = held(l, 0, more),
            .recv_from = mod(rank + have, l.size),
            .recv = held(l, have, more)};
  }

  static constexpr size_t scratch(const Layout& l, int) { return total(l.blocks); }
  static constexpr uint64_t depth(int size) { return uint64_t(log2_up(size)); }

 private:
  static constexpr Range held(const Layout& l, int first, int blocks) {
    return {kScratch, size_t(first) * l.block(0).bytes, size_t(blocks) * l.block(0).bytes};
  }

  /// Copies the blocks to the output: in two copies where they are contiguous, from the own block on and before it.
  static constexpr Step turn(const Layout& l, int rank, int j) {
    if (!contiguous(l.blocks)) return move(rank, held(l, j, 1), l.block(mod(rank + j, l.size)).in(kOutput));
    const int first = j == 0 ? rank : 0, blocks = j == 0 ? l.size - rank : rank;
    const Range from = held(l, j == 0 ? 0 : l.size - rank, blocks);
    return move(rank, from, {kOutput, l.block(first).offset, from.bytes});
  }
};

/// The root exchanges with each other rank directly. The data of each rank is different, so a tree would save no byte.
struct Linear : AnyLayout {
  static constexpr uint64_t steps(const Layout& l, int rank) { return rank == l.root ? uint64_t(l.size) : 1; }
  static constexpr uint64_t depth(int size) { return size > 1; }
};

struct LinearGather : Linear {
  static constexpr Step at(const Layout& l, int rank, uint64_t i) {
    const Range mine = l.own(rank).in(kInput);
    if (rank != l.root) return {.send_to = l.root, .send = mine};
    const int from = mod(l.root + 1 + int(i), l.size);
    if (from == l.root) return move(rank, mine, l.block(rank).in(kOutput));
    return {.recv_from = from, .recv = l.block(from).in(kOutput)};
  }
};

struct LinearScatter : Linear {
  static constexpr Step at(const Layout& l, int rank, uint64_t i) {
    const Range mine = l.own(rank).in(kOutput);
    if (rank != l.root) return {.recv_from = l.root, .recv = mine};
    const int to = mod(l.root + 1 + int(i), l.size);
    if (to == l.root) return move(rank, l.block(rank).in(kInput), mine);
    return {.send_to = to, .send = l.block(to).in(kInput)};
  }
};

/// In round k each rank sends a message to the rank at distance 2^k: it has arrived, and so have all ranks whose
/// messages reached it in earlier rounds. The message is one byte instead of none: the next round sends the byte that
/// this round receives, and so waits for it.
struct DisseminationBarrier : AnyLayout {
  static constexpr uint64_t steps(const Layout& l, int) { return uint64_t(log2_up(l.size)); }

  static constexpr Step at(const Layout& l, int rank, uint64_t i) {
    const int distance = 1 << i;
    return {.send_to = mod(rank + distance, l.size),
            .send = {kScratch, i, 1},
            .recv_from = mod(rank - distance, l.size),
            .recv = {kScratch, i + 1, 1}};
  }

  static constexpr size_t scratch(const Layout& l, int) { return size_t(log2_up(l.size)) + 1; }
  static constexpr uint64_t depth(int size) { return uint64_t(log2_up(size)); }
};

}  // namespace nvx::schedule
