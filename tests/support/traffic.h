#pragma once

#include <algorithm>
#include <string_view>

#include "schedule/catalog.h"
#include "schedule/halving_doubling.h"

/// Upper bounds of the traffic of each schedule, for every rank. With a for the latency of a message, b for the time of
/// a byte, and at most w steps in flight, a call takes about max(depth, messages / w) * a + bytes * b.
namespace nvx::test {

/// The messages that a rank sends, and that it receives.
inline uint64_t most_messages(const schedule::Row& row, int size) {
  using enum schedule::Collective;
  const std::string_view name = row.name;
  const bool linear = row.collective == kGather || row.collective == kScatter || name == "pairwise" || name == "direct";
  if (name == "chain") return size > 1;
  if (linear) return uint64_t(size - 1);
  if (name == "ring_gather") return 2 * uint64_t(size - 1);
  if (name == "binomial" && row.collective == kReduce) return uint64_t(schedule::log2_up(size));
  return row.guarantee.depth(size);
}

/// The bytes of all blocks but one.
inline size_t all_but_one(std::span<const schedule::Block> blocks) {
  const auto shorter = [](const schedule::Block& a, const schedule::Block& b) { return a.bytes < b.bytes; };
  return schedule::total(blocks) - std::min_element(blocks.begin(), blocks.end(), shorter)->bytes;
}

/// The bytes that a rank with this layout sends to others.
inline size_t most_sent(const schedule::Row& row, const schedule::Layout& l) {
  using enum schedule::Collective;
  const std::string_view name = row.name;
  const auto others = size_t(l.size - 1), rounds = size_t(schedule::log2_up(l.size));
  const auto fold = schedule::Fold::of(l.size);
  const bool folded = fold.extra > 0;
  switch (row.collective) {
    case kAllReduce:
      if (name == "pair") return l.bytes;
      if (name == "ring") return 2 * others * l.chunk(0).bytes;
      if (name == "recursive_doubling") return size_t(fold.rounds() + folded) * l.bytes;
      return 2 * size_t(fold.core - 1) * l.part(l.bytes, 0, fold.core).bytes + (folded ? l.bytes : 0);
    case kReduceScatter: return name == "halving" && folded ? schedule::total(l.blocks) : all_but_one(l.blocks);
    case kAllGather: return name == "direct" ? others * schedule::longest(l.blocks) : all_but_one(l.blocks);
    case kBroadcast:
      if (name == "scatter_all_gather") return 2 * others * l.chunk(0).bytes;
      return name == "binomial" ? rounds * l.bytes : (l.size > 1 ? l.bytes : 0);
    case kReduce:
      if (name == "ring_gather" && l.size > 1) return (others + 1) * l.chunk(0).bytes;
      if (name == "halving_gather" && fold.core > 1)
        return size_t(fold.core - 1 + fold.core / 2) * l.part(l.bytes, 0, fold.core).bytes;
      return l.size > 1 ? l.bytes : 0;
    case kGather: return l.size > 1 ? schedule::longest(l.blocks) : 0;
    case kScatter: return schedule::total(l.blocks) - l.block(l.root).bytes;
    case kAllToAll: return all_but_one(l.to);
    case kBarrier: return rounds;
    case kNone: break;
  }
  return 0;
}

}  // namespace nvx::test
