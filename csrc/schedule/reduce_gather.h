#pragma once

#include "schedule/halving_doubling.h"
#include "schedule/ring.h"
#include "schedule/tree.h"

/// Reduces each part of the whole on a different rank, then gathers the parts on the root. The busiest rank moves the
/// whole twice, or three times where `HalvingGather` folds ranks in.
namespace nvx::schedule {

/// `Parts` has the steps of a place, counted from the root: it names places for ranks, and the output for the memory of
/// partial sums, which is scratch everywhere but on the root.
template <class Parts>
struct ReduceThenGather : AnyLayout {
  static constexpr uint64_t steps(const Layout& l, int rank) {
    return l.size == 1 ? 1 : uint64_t(Parts(l, place_of(l, rank)).steps());
  }

  static constexpr Step at(const Layout& l, int rank, uint64_t i) {
    const int v = place_of(l, rank);
    if (l.size == 1) return move(rank, l.whole().in(kInput), l.whole().in(kOutput));
    Step step = Parts(l, v).at(int(i));
    if (step.send_to >= 0) step.send_to = rank_at(l, step.send_to);
    if (step.recv_from >= 0) step.recv_from = rank_at(l, step.recv_from);
    for (Range* range : {&step.send, &step.recv, &step.with}) {
      if (v != 0 && range->buffer == kOutput) range->buffer = kScratch;
    }
    return step;
  }

  static constexpr size_t scratch(const Layout& l, int rank) {
    const int v = place_of(l, rank);
    return v != 0 && Parts(l, v).sums() ? l.bytes : 0;
  }
  static constexpr Order kOrder = Order::kByPlace;
  static constexpr uint64_t depth(int size) { return Parts::depth(size); }
};

/// Once around the ring, after which place v has the sum of chunk v + 1.
struct RingGather {
  const Layout& l;
  int v;

  constexpr RingGather(const Layout& layout, int place) : l(layout), v(place) {}
  constexpr int rounds() const { return l.size - 1; }
  constexpr int steps() const { return rounds() + (v == 0 ? rounds() : 1); }
  constexpr bool sums() const { return true; }
  static constexpr uint64_t depth(int size) { return uint64_t(size); }

  constexpr Step at(int i) const {
    if (i < rounds()) return RingAllReduce::at(l, v, uint64_t(i));
    const int from = v == 0 ? i - rounds() + 1 : v;
    const Range sum = l.chunk(mod(from + 1, l.size)).in(kOutput);
    return v == 0 ? Step{.recv_from = from, .recv = sum} : Step{.send_to = 0, .send = sum};
  }
};
using RingGatherReduce = ReduceThenGather<RingGather>;

/// By halving, after which a place of the core has the sum of one part; then up a binomial tree. (Rabenseifner)
struct HalvingGather {
  const Layout& l;
  int v;
  Fold fold;
  BinomialTree tree;  ///< of its place in the core

  constexpr HalvingGather(const Layout& layout, int place)
      : l(layout), v(place), fold(Fold::of(layout.size)), tree{fold.place(v), fold.core} {}
  constexpr int steps() const {
    return fold.is_extra(v) ? 1 : fold.has_extra(v) + fold.rounds() + tree.children() + (v != 0);
  }
  constexpr bool sums() const { return !fold.is_extra(v); }
  static constexpr uint64_t depth(int size) {
    const Fold fold = Fold::of(size);
    return uint64_t(2 * fold.rounds() + (fold.extra > 0));
  }

  constexpr Step at(int i) const {
    const Range input = l.whole().in(kInput), output = l.whole().in(kOutput);
    if (fold.is_extra(v)) return {.send_to = v - 1, .send = input};
    const bool has_extra = fold.has_extra(v);
    const int k = i - has_extra, j = k - fold.rounds();
    if (k < 0) return {.recv_from = v + 1, .recv = output, .reduce = true, .with = input};
    if (j < 0) return HalvingDoublingCore::round(l, {fold, tree.v, k, k == 0 && !has_extra ? kInput : kOutput});
    if (j == tree.children()) return {.send_to = fold.rank(tree.parent()), .send = sum_of(tree)};
    const BinomialTree child{tree.child(j), fold.core};
    return {.recv_from = fold.rank(child.v), .recv = sum_of(child)};
  }

  constexpr Range sum_of(const BinomialTree& t) const { return l.parts(t.v, t.v + t.weight(), fold.core).in(kOutput); }
};
using HalvingGatherReduce = ReduceThenGather<HalvingGather>;

}  // namespace nvx::schedule
