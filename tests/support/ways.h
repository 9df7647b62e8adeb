#pragma once

#include <utility>
#include <vector>

#include "kernel/job.h"
#include "support/plays.h"

/// Plays for the pushed algorithms, whoever performs them.
namespace nvx::test {

using kernel::Collective;
using kernel::Pushed;

inline constexpr uint64_t kMillisecond = 1'000'000;  // in ns

/// What each algorithm is for; first those that reduce.
inline constexpr size_t kWaysThatReduce = 7;
inline constexpr std::pair<Pushed, Collective> kWays[] = {
    {Pushed::kReducePackets, Collective::kAllReduce},     {Pushed::kReducePackets, Collective::kReduce},
    {Pushed::kReducePackets, Collective::kReduceScatter}, {Pushed::kReducePacketsTwoShot, Collective::kAllReduce},
    {Pushed::kReduceChunks, Collective::kAllReduce},      {Pushed::kReduceChunks, Collective::kReduce},
    {Pushed::kReduceChunks, Collective::kReduceScatter},  {Pushed::kExchangePackets, Collective::kAllGather},
    {Pushed::kExchangePackets, Collective::kBroadcast},   {Pushed::kExchangePackets, Collective::kAllToAll},
    {Pushed::kExchangePackets, Collective::kGather},      {Pushed::kExchangePackets, Collective::kScatter},
    {Pushed::kExchangePackets, Collective::kBarrier},     {Pushed::kExchangeChunks, Collective::kAllGather},
    {Pushed::kExchangeChunks, Collective::kBroadcast},    {Pushed::kExchangeChunks, Collective::kAllToAll},
    {Pushed::kExchangeChunks, Collective::kGather},       {Pushed::kExchangeChunks, Collective::kScatter},
    {Pushed::kExchangeChunks, Collective::kBarrier},      {Pushed::kExchangePieces, Collective::kAllGather},
    {Pushed::kExchangePieces, Collective::kBroadcast},    {Pushed::kExchangePieces, Collective::kAllToAll},
    {Pushed::kExchangePieces, Collective::kGather},       {Pushed::kExchangePieces, Collective::kScatter},
    {Pushed::kExchangePieces, Collective::kBarrier},
};

inline Play play_of(Collective collective, size_t n, int ranks, uint64_t round) {
  Play play{.collective = collective, .counts = counts_around(n, ranks, collective), .round = round};
  if (is_rooted(collective)) play.root = int(round) % ranks;
  return play;
}

}  // namespace nvx::test
