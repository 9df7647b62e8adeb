#pragma once

#include "schedule/catalog.h"

/// Rounds between partners whose distance halves or doubles: the fewest messages in sequence. The rounds need a power
/// of two ranks, the core. If there are more ranks, the extra ones are folded in: each sends its input to a rank of the
/// core before the rounds, and receives its result from that rank after them.
namespace nvx::schedule {

/// Of the first 2 * extra ranks, those with odd numbers are extra. The rank before an extra one has its input, too, and
/// is in the core. So the data of a contiguous range of the core's places is that of a contiguous range of ranks.
struct Fold {
  int core, extra;

  static constexpr Fold of(int size) {
    const int core = 1 << log2_down(size);
    return {core, size - core};
  }
  constexpr bool is_extra(int rank) const { return rank < 2 * extra && rank % 2 == 1; }
  constexpr bool has_extra(int rank) const { return rank < 2 * extra && rank % 2 == 0; }
  constexpr int place(int rank) const { return rank < 2 * extra ? rank / 2 : rank - extra; }
  /// The rank of the core at a place. The place after the last one gives `size`.
  constexpr int rank(int place) const { return place < extra ? 2 * place : place + extra; }
  constexpr int rounds() const { return log2_down(core); }
};

struct FoldedRound {
  Fold fold;
  int place, k;
  Buffer from;  ///< the partial sum: in the input until something has been added to it
};

/// An all_reduce of the core, with a step before and after it for the extra ranks.
template <class Core>
struct FoldedAllReduce : AnyLayout {
  static constexpr uint64_t steps(const Layout& l, int rank) {
    const Fold fold = Fold::of(l.size);
    if (l.size == 1) return 1;
    return fold.is_extra(rank) ? 2 : uint64_t(Core::rounds(fold) + 2 * fold.has_extra(rank));
  }

  static constexpr Step at(const Layout& l, int rank, uint64_t i) {
    const Range input = l.whole().in(kInput), output = l.whole().in(kOutput);
    const Fold fold = Fold::of(l.size);
    if (l.size == 1) return move(rank, input, output);
    if (fold.is_extra(rank)) {
      return i == 0 ? Step{.send_to = rank - 1, .send = input} : Step{.recv_from = rank - 1, .recv = output};
    }
    const bool has_extra = fold.has_extra(rank);
    const int k = int(i) - has_extra;
    if (k < 0) return {.recv_from = rank + 1, .recv = output, .reduce = true, .with = input};
    if (k == Core::rounds(fold)) return {.send_to = rank + 1, .send = output};
    return Core::round(l, {fold, fold.place(rank), k, k == 0 && !has_extra ? kInput : kOutput});
  }

  static constexpr Order kOrder = Core::kOrder;
  static constexpr uint64_t depth(int size) {
    const Fold fold = Fold::of(size);
    return uint64_t(Core::rounds(fold) + 2 * (fold.extra > 0));
  }
};

/// Partners exchange everything they have. For small messages.
struct DoublingCore {
  static constexpr int rounds(const Fold& fold) { return fold.rounds(); }

  static constexpr Step round(const Layout& l, const FoldedRound& r) {
    const int partner = r.fold.rank(r.place ^ (1 << r.k));
    return {.send_to = partner,
            .send = l.whole().in(r.from),
            .recv_from = partner,
            .recv = l.whole().in(kOutput),
            .reduce = true,
            .with = l.whole().in(r.from)};
  }

  static constexpr Order kOrder = Order::kUniform;
};
using RecursiveDoublingAllReduce = FoldedAllReduce<DoublingCore>;

/// Partners split their common range: each reduces one half, until every place has one part. Then the parts return the
/// same way. It sends hardly more bytes than a ring. (Rabenseifner)
struct HalvingDoublingCore {
  static constexpr int rounds(const Fold& fold) { return 2 * fold.rounds(); }

  static constexpr Step round(const Layout& l, const FoldedRound& r) {
    const bool halving = r.k < r.fold.rounds();
    const int distance = halving ? r.fold.core >> (r.k + 1) : 1 << (r.k - r.fold.rounds());
    const int mine = r.place & ~(distance - 1), theirs = mine ^ distance;  // the starts of the two ranges
    const Block own = l.parts(mine, mine + distance, r.fold.core);
    const Block other = l.parts(theirs, theirs + distance, r.fold.core);
    const int partner = r.fold.rank(r.place ^ distance);
    if (!halving) {
      return {.send_to = partner, .send = own.in(kOutput), .recv_from = partner, .recv = other.in(kOutput)};
    }
    return {.send_to = partner,
            .send = other.in(r.from),
            .recv_from = partner,
            .recv = own.in(kOutput),
            .reduce = true,
            .with = own.in(r.from)};
  }

  static constexpr Order kOrder = Order::kByPlace;
};
using HalvingDoublingAllReduce = FoldedAllReduce<HalvingDoublingCore>;

/// The first half of the above, over contiguous blocks: a rank of the core ends with the sum of its own block, and of
/// the block of its extra rank, if any. Partial sums are in scratch, in the order of the blocks.
struct HalvingReduceScatter : AnyLayout {
  static constexpr bool legal(const Layout& l) { return contiguous(l.blocks); }

  static constexpr uint64_t steps(const Layout& l, int rank) {
    const Fold fold = Fold::of(l.size);
    if (l.size == 1) return 1;
    return fold.is_extra(rank) ? 2 : uint64_t(fold.rounds() + 3 * fold.has_extra(rank));
  }

  static constexpr Step at(const Layout& l, int rank, uint64_t i) {
    const Fold fold = Fold::of(l.size);
    const Range result = l.own(rank).in(kOutput);
    if (l.size == 1) return move(rank, run(l, 0, 1, kInput), result);
    if (fold.is_extra(rank)) {
      return i == 0 ? Step{.send_to = rank - 1, .send = run(l, 0, l.size, kInput)}
                    : Step{.recv_from = rank - 1, .recv = result};
    }
    const bool has_extra = fold.has_extra(rank);
    const int k = int(i) - has_extra;
    if (k < 0) {
      return {.recv_from = rank + 1,
              .recv = run(l, 0, l.size, kScratch),
              .reduce = true,
              .with = run(l, 0, l.size, kInput)};
    }
    if (k == fold.rounds()) return {.send_to = rank + 1, .send = run(l, rank + 1, rank + 2, kScratch)};
    if (k > fold.rounds()) return move(rank, run(l, rank, rank + 1, kScratch), result);
    return halve(l, {fold, fold.place(rank), k, k == 0 && !has_extra ? kInput : kScratch}, result);
  }

  static constexpr size_t scratch(const Layout& l, int rank) {
    const Fold fold = Fold::of(l.size);
    return fold.is_extra(rank) || (l.size == 2) || l.size == 1 ? 0 : total(l.blocks);
  }
  static constexpr Order kOrder = Order::kByPlace;
  static constexpr uint64_t depth(int size) {
    const Fold fold = Fold::of(size);
    return uint64_t(fold.rounds() + 2 * (fold.extra > 0));
  }

 private:
  /// The blocks first .. last - 1. In scratch they begin at 0.
  static constexpr Range run(const Layout& l, int first, int last, Buffer buffer) {
    const Block from = l.block(first), to = l.block(last - 1);
    return {buffer, from.offset - (buffer == kScratch ? l.block(0).offset : 0), to.end() - from.offset};
  }

  /// A round of the core. A rank without an extra one writes its last round directly to the output.
  static constexpr Step halve(const Layout& l, const FoldedRound& r, Range result) {
    const int distance = r.fold.core >> (r.k + 1);
    const int mine = r.place & ~(distance - 1), theirs = mine ^ distance;
    const auto blocks = [&](int place, Buffer in) {
      return run(l, r.fold.rank(place), r.fold.rank(place + distance), in);
    };
    const bool last = distance == 1 && r.place >= r.fold.extra;
    const int partner = r.fold.rank(r.place ^ distance);
    return {.send_to = partner,
            .send = blocks(theirs, r.from),
            .recv_from = partner,
            .recv = last ? result : blocks(mine, kScratch),
            .reduce = true,
            .with = blocks(mine, r.from)};
  }
};

}  // namespace nvx::schedule
