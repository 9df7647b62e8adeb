#pragma once

#include "schedule/catalog.h"

namespace nvx::schedule {

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
