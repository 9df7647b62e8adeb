#pragma once

#include "schedule/tree.h"

namespace nvx::schedule {

/// Scatters the whole, one part per rank, down a binomial tree; then a ring all-gathers the parts. No rank sends much
/// more than the whole; the root sends less than twice that. A place already has the parts of its subtree, so the ring
/// does not send it those, and sends the root nothing.
struct ScatterAllGatherBroadcast : AnyLayout {
  static constexpr uint64_t steps(const Layout& l, int rank) { return uint64_t(Walk(l, rank).steps()); }

  static constexpr Step at(const Layout& l, int rank, uint64_t i) {
    const Walk walk(l, rank);
    const int k = int(i) - !walk.root();
    if (k < 0) return {.recv_from = rank_at(l, walk.tree.parent()), .recv = walk.parts(walk.tree).in(kOutput)};
    if (k < walk.children) return walk.scatter(walk.children - 1 - k);
    if (k < walk.children + walk.rounds()) return walk.around_ring(k - walk.children);
    return move(rank, l.whole().in(kInput), l.whole().in(kOutput));
  }

  static constexpr uint64_t depth(int size) { return uint64_t(log2_up(size) + size - 1); }

 private:
  struct Walk {
    const Layout& l;
    BinomialTree tree, next;  ///< of this place, and of the next one in the ring
    int children;

    constexpr Walk(const Layout& layout, int rank)
        : l(layout),
          tree{place_of(layout, rank), layout.size},
          next{mod(tree.v + 1, layout.size), layout.size},
          children(tree.children()) {}

    constexpr bool root() const { return tree.v == 0; }
    constexpr int steps() const { return !root() + children + rounds() + root(); }
    /// The ring ends for this rank when neither this place nor the next one lacks a part.
    constexpr int rounds() const { return lacks(tree) > lacks(next) ? lacks(tree) : lacks(next); }
    constexpr int lacks(const BinomialTree& t) const { return l.size - t.weight(); }
    constexpr Block parts(const BinomialTree& t) const { return l.parts(t.v, t.v + t.weight(), l.size); }
    constexpr Buffer source() const { return root() ? kInput : kOutput; }

    constexpr Step scatter(int j) const {
      const BinomialTree child{tree.child(j), l.size};
      return {.send_to = rank_at(l, child.v), .send = parts(child).in(source())};
    }

    constexpr Step around_ring(int k) const {
      Step step;
      if (k < lacks(next)) {
        step.send_to = rank_at(l, next.v);
        step.send = l.chunk(mod(tree.v - k, l.size)).in(source());
      }
      if (k < lacks(tree)) {
        step.recv_from = rank_at(l, tree.v - 1);
        step.recv = l.chunk(mod(tree.v - 1 - k, l.size)).in(kOutput);
      }
      return step;
    }
  };
};

}  // namespace nvx::schedule
