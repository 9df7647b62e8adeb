#pragma once

#include "schedule/catalog.h"

/// Every rank sends to the next and receives from the previous one. The fewest bytes, between neighbours only, but as
/// many messages in sequence as there are ranks. For large messages between few ranks.
namespace nvx::schedule {

/// Chunk c starts at rank c, collects sums, is complete at rank c - 1, then goes round once more. A rank adds its own
/// input when the chunk arrives, so nothing is copied in advance.
struct RingAllReduce : AnyLayout {
  static constexpr uint64_t steps(const Layout& l, int) { return l.size == 1 ? 1 : 2 * uint64_t(l.size - 1); }

  static constexpr Step at(const Layout& l, int rank, uint64_t i) {
    if (l.size == 1) return move(rank, l.whole().in(kInput), l.whole().in(kOutput));
    const bool gather = i >= uint64_t(l.size - 1);
    const int k = int(gather ? i - uint64_t(l.size - 1) : i);
    const Block out = l.chunk(mod(rank - k + gather, l.size)), in = l.chunk(mod(rank - k - !gather, l.size));
    return {.send_to = mod(rank + 1, l.size),
            .send = out.in(i == 0 ? kInput : kOutput),
            .recv_from = mod(rank - 1, l.size),
            .recv = in.in(kOutput),
            .reduce = !gather,
            .with = gather ? Range{} : in.in(kInput)};
  }

  static constexpr Order kOrder = Order::kByPlace;
  static constexpr uint64_t depth(int size) { return 2 * uint64_t(size - 1); }
};

/// Block b starts at rank b + 1 and collects sums until it reaches rank b. On the way it uses one of three slots, so
/// that the next block can arrive while the last one is still being sent.
struct RingReduceScatter : AnyLayout {
  static constexpr uint64_t steps(const Layout& l, int) { return l.size == 1 ? 1 : uint64_t(l.size - 1); }

  static constexpr Step at(const Layout& l, int rank, uint64_t i) {
    if (l.size == 1) return move(rank, l.block(rank).in(kInput), l.own(rank).in(kOutput));
    const int k = int(i);
    const Block out = l.block(mod(rank - 1 - k, l.size)), in = l.block(mod(rank - 2 - k, l.size));
    const size_t room = longest(l.blocks);
    return {.send_to = mod(rank + 1, l.size),
            .send = k == 0 ? out.in(kInput) : Range{kScratch, slot(k - 1) * room, out.bytes},
            .recv_from = mod(rank - 1, l.size),
            .recv = k == l.size - 2 ? l.own(rank).in(kOutput) : Range{kScratch, slot(k) * room, in.bytes},
            .reduce = true,
            .with = in.in(kInput)};
  }

  static constexpr int kSlots = 3;
  static constexpr size_t slot(int k) { return size_t(k % kSlots); }
  static constexpr size_t scratch(const Layout& l, int) {
    const int used = l.size - 2 < kSlots ? l.size - 2 : kSlots;
    return used > 0 ? size_t(used) * longest(l.blocks) : 0;
  }

  static constexpr Order kOrder = Order::kByPlace;
  static constexpr uint64_t depth(int size) { return uint64_t(size - 1); }
};

/// Block b goes round from rank b. The own block is copied last, while the last message is in flight.
struct RingAllGather : AnyLayout {
  static constexpr uint64_t steps(const Layout& l, int) { return uint64_t(l.size); }

  static constexpr Step at(const Layout& l, int rank, uint64_t i) {
    const int k = int(i);
    if (k == l.size - 1) return move(rank, l.own(rank).in(kInput), l.block(rank).in(kOutput));
    return {.send_to = mod(rank + 1, l.size),
            .send = k == 0 ? l.own(rank).in(kInput) : l.block(mod(rank - k, l.size)).in(kOutput),
            .recv_from = mod(rank - 1, l.size),
            .recv = l.block(mod(rank - k - 1, l.size)).in(kOutput)};
  }

  static constexpr uint64_t depth(int size) { return uint64_t(size - 1); }
};

}  // namespace nvx::schedule
