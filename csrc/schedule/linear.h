#pragma once

#include "schedule/catalog.h"

/// The root exchanges with each other rank directly. The data of each rank is different, so a tree would save no byte.
namespace nvx::schedule {

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

}  // namespace nvx::schedule
