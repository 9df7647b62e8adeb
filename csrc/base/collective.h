#pragma once

#include <cstddef>
#include <cstdint>

namespace nvx {

enum class Collective : uint8_t {
  kNone,
  kAllReduce,
  kReduce,
  kReduceScatter,
  kAllGather,
  kBroadcast,
  kAllToAll,
  kGather,
  kScatter,
  kBarrier,
};

/// Whether the collective combines the ranks' elements.
constexpr bool reduces(Collective c) {
  return c == Collective::kAllReduce || c == Collective::kReduce || c == Collective::kReduceScatter;
}

constexpr const char* name(Collective collective) {
  constexpr const char* kNames[] = {"nothing",   "all_reduce", "reduce", "reduce_scatter", "all_gather",
                                    "broadcast", "all_to_all", "gather", "scatter",        "barrier"};
  return kNames[collective <= Collective::kBarrier ? size_t(collective) : 0];
}

}  // namespace nvx
