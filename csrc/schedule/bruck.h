#pragma once

#include "schedule/catalog.h"

/// Rounds of distance 1, 2, 4 ... over any number of ranks, with copies in scratch: for small blocks of one length.
namespace nvx::schedule {

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

}  // namespace nvx::schedule
