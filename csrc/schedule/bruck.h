#pragma once

#include "schedule/catalog.h"

/// Rounds of distance 1, 2, 4 ... over any number of ranks, at the price of copies in scratch. They suit small blocks,
/// which must have equal lengths.
namespace nvx::schedule {

/// Scratch holds the blocks of rank, rank + 1, ... in this order. Each round nearly doubles their number. The last
/// steps copy them to their places in the output.
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
  static constexpr Order kOrder = Order::kNone;
  static constexpr uint64_t messages(int size) { return uint64_t(log2_up(size)); }
  static constexpr uint64_t depth(int size) { return uint64_t(log2_up(size)); }
  static constexpr size_t sent(const Layout& l) { return all_but_one(l.blocks); }

 private:
  static constexpr Range held(const Layout& l, int first, int blocks) {
    return {kScratch, size_t(first) * l.block(0).bytes, size_t(blocks) * l.block(0).bytes};
  }

  /// Copies the blocks to the output. Where they are contiguous, two copies suffice: the own block and those after it,
  /// then those before it.
  static constexpr Step turn(const Layout& l, int rank, int j) {
    if (!contiguous(l.blocks)) return move(rank, held(l, j, 1), l.block(mod(rank + j, l.size)).in(kOutput));
    const int first = j == 0 ? rank : 0, blocks = j == 0 ? l.size - rank : rank;
    const Range from = held(l, j == 0 ? 0 : l.size - rank, blocks);
    return move(rank, from, {kOutput, l.block(first).offset, from.bytes});
  }
};

/// The block for the rank at distance d travels d as a sum of powers of two: in round k all blocks whose d has bit k
/// travel 2^k, as one message. Scratch holds the outgoing blocks, then the blocks received in each round.
struct BruckAllToAll : AnyLayout {
  static constexpr bool legal(const Layout& l) {
    return equally_long(l.to) && equally_long(l.from) && l.to[0].bytes == l.from[0].bytes;
  }

  static constexpr uint64_t steps(const Layout& l, int) {
    uint64_t sum = uint64_t(l.size);
    for (int k = 0; k < log2_up(l.size); ++k) sum += uint64_t(travelling(l.size, k)) + 1;
    return sum;
  }

  /// Each round packs its blocks, then exchanges them. The last steps copy each block to the output from the round of
  /// its highest bit.
  static constexpr Step at(const Layout& l, int rank, uint64_t i) {
    int left = int(i), k = 0;
    for (; k < log2_up(l.size); ++k) {
      const int packed = travelling(l.size, k);
      if (left < packed) return move(rank, last_place(l, rank, distance(left, k), k), slots(l, -1, left, 1));
      if (left == packed) {
        return {.send_to = mod(rank + (1 << k), l.size),
                .send = slots(l, -1, 0, packed),
                .recv_from = mod(rank - (1 << k), l.size),
                .recv = slots(l, k, 0, packed)};
      }
      left -= packed + 1;
    }
    return move(rank, last_place(l, rank, left, k), l.from[size_t(mod(rank - left, l.size))].in(kOutput));
  }

  static constexpr size_t scratch(const Layout& l, int) {
    return size_t(log2_up(l.size) + 1) * size_t(l.size / 2) * l.to[0].bytes;
  }
  static constexpr Order kOrder = Order::kNone;
  static constexpr uint64_t messages(int size) { return uint64_t(log2_up(size)); }
  static constexpr uint64_t depth(int size) { return uint64_t(log2_up(size)); }
  static constexpr size_t sent(const Layout& l) { return size_t(log2_up(l.size)) * size_t(l.size / 2) * l.to[0].bytes; }

 private:
  /// The number of distances below `size` that have bit k; at most half of them.
  static constexpr int travelling(int size, int k) {
    const int rest = (size & ((2 << k) - 1)) - (1 << k);
    return ((size >> (k + 1)) << k) + (rest > 0 ? rest : 0);
  }
  /// The j-th distance with bit k, and its inverse: the index of such a distance.
  static constexpr int distance(int j, int k) { return ((j >> k) << (k + 1)) | (1 << k) | (j & ((1 << k) - 1)); }
  static constexpr int index(int d, int k) { return ((d >> (k + 1)) << k) | (d & ((1 << k) - 1)); }

  /// Slots of the blocks received in round k, or of the outgoing blocks for k = -1.
  static constexpr Range slots(const Layout& l, int k, int first, int blocks) {
    const size_t each = l.to[0].bytes, before = size_t(k + 1) * size_t(l.size / 2) + size_t(first);
    return {kScratch, before * each, size_t(blocks) * each};
  }

  /// The place of a block before round k: where its last round stored it, or the input.
  static constexpr Range last_place(const Layout& l, int rank, int d, int k) {
    const int travelled = d & ((1 << k) - 1);
    if (travelled == 0) return l.to[size_t(mod(rank + d, l.size))].in(kInput);
    const int last = log2_down(travelled);
    return slots(l, last, index(d, last), 1);
  }
};

}  // namespace nvx::schedule
