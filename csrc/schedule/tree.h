#pragma once

#include "schedule/catalog.h"

/// Trees and chains from a root and to it. Places are ranks counted from the root: place v is rank root + v.
namespace nvx::schedule {

/// A binomial tree over the places 0 .. size - 1. Each subtree begins with its place and is contiguous, as is its data.
struct BinomialTree {
  int v, size;

  /// Child j is place v + 2^j. Later children have larger subtrees.
  constexpr int children() const {
    const int below = v == 0 ? 31 : std::countr_zero(unsigned(v)), there = log2_up(size - v);
    return below < there ? below : there;
  }
  constexpr int child(int j) const { return v + (1 << j); }
  constexpr int parent() const { return v & (v - 1); }
  /// The number of places in its subtree.
  constexpr int weight() const {
    const int most = v == 0 ? size : 1 << std::countr_zero(unsigned(v));
    return most < size - v ? most : size - v;
  }
};

constexpr int place_of(const Layout& l, int rank) { return mod(rank - l.root, l.size); }
constexpr int rank_at(const Layout& l, int place) { return mod(l.root + place, l.size); }

/// The root sends to the largest subtree first. Each place that has the data passes it on.
struct BinomialBroadcast : AnyLayout {
  static constexpr uint64_t steps(const Layout& l, int rank) {
    return 1 + uint64_t(BinomialTree{place_of(l, rank), l.size}.children());
  }

  static constexpr Step at(const Layout& l, int rank, uint64_t i) {
    const BinomialTree tree{place_of(l, rank), l.size};
    const bool root = tree.v == 0;
    const int children = tree.children(), k = int(i) - !root;
    if (k < 0) return {.recv_from = rank_at(l, tree.parent()), .recv = l.whole().in(kOutput)};
    if (k == children) return move(rank, l.whole().in(kInput), l.whole().in(kOutput));
    return {.send_to = rank_at(l, tree.child(children - 1 - k)), .send = l.whole().in(root ? kInput : kOutput)};
  }

  static constexpr uint64_t depth(int size) { return uint64_t(log2_up(size)); }
};

/// The same tree from the leaves to the root. Places other than the root accumulate in scratch.
struct BinomialReduce : AnyLayout {
  static constexpr uint64_t steps(const Layout& l, int rank) {
    const BinomialTree tree{place_of(l, rank), l.size};
    return l.size == 1 ? 1 : uint64_t(tree.children() + (tree.v != 0));
  }

  static constexpr Step at(const Layout& l, int rank, uint64_t i) {
    const Block whole = l.whole();
    if (l.size == 1) return move(rank, whole.in(kInput), whole.in(kOutput));
    const BinomialTree tree{place_of(l, rank), l.size};
    const Range sum = whole.in(tree.v == 0 ? kOutput : kScratch), before = i == 0 ? whole.in(kInput) : sum;
    const int k = int(i);
    if (k == tree.children()) return {.send_to = rank_at(l, tree.parent()), .send = before};
    return {.recv_from = rank_at(l, tree.child(k)), .recv = sum, .reduce = true, .with = before};
  }

  static constexpr size_t scratch(const Layout& l, int rank) {
    const BinomialTree tree{place_of(l, rank), l.size};
    return tree.v == 0 || tree.children() == 0 ? 0 : l.bytes;
  }
  static constexpr Order kOrder = Order::kUniform;
  static constexpr uint64_t depth(int size) { return uint64_t(log2_up(size)); }
};

/// From place to place. In slices, all links are busy at once, and each rank sends the whole only once.
struct ChainBroadcast : AnyLayout {
  static constexpr uint64_t steps(const Layout& l, int rank) {
    const int v = place_of(l, rank);
    return 1 + uint64_t(v + 1 < l.size);
  }

  static constexpr Step at(const Layout& l, int rank, uint64_t i) {
    const Block whole = l.whole();
    const int v = place_of(l, rank);
    const bool first = i == 0, last = i + 1 == steps(l, rank);
    if (v > 0 && first) return {.recv_from = rank_at(l, v - 1), .recv = whole.in(kOutput)};
    if (v == 0 && last) return move(rank, whole.in(kInput), whole.in(kOutput));
    return {.send_to = rank_at(l, v + 1), .send = whole.in(v == 0 ? kInput : kOutput)};
  }

  static constexpr uint64_t depth(int size) { return uint64_t(size - 1); }
};

/// The same chain in the other direction: each place adds its input to the received sum.
struct ChainReduce : AnyLayout {
  static constexpr uint64_t steps(const Layout& l, int rank) {
    const int v = place_of(l, rank);
    return 1 + uint64_t(v > 0 && v + 1 < l.size);
  }

  static constexpr Step at(const Layout& l, int rank, uint64_t i) {
    const Range mine = l.whole().in(kInput);
    const int v = place_of(l, rank);
    const bool end = v + 1 == l.size;
    const Range sum = l.whole().in(v == 0 ? kOutput : kScratch);
    if (l.size == 1) return move(rank, mine, sum);
    if (end || i == 1) return {.send_to = rank_at(l, v - 1), .send = end ? mine : sum};
    return {.recv_from = rank_at(l, v + 1), .recv = sum, .reduce = true, .with = mine};
  }

  static constexpr size_t scratch(const Layout& l, int rank) {
    const int v = place_of(l, rank);
    return v > 0 && v + 1 < l.size ? l.bytes : 0;
  }
  static constexpr Order kOrder = Order::kUniform;
  static constexpr uint64_t depth(int size) { return uint64_t(size - 1); }
};

}  // namespace nvx::schedule
