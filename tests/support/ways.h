#pragma once

#include <utility>
#include <vector>

#include "kernel/gpu/job.h"
#include "support/specs.h"

/// Collectives for the device algorithms.
namespace nvx::test {

using kernel::Collective;
using kernel::DeviceAlgorithm;

inline constexpr uint64_t kMillisecond = 1'000'000;  // ns

/// The collectives of each algorithm; the reducing algorithms come first.
inline constexpr size_t kReducingCases = 7;
inline constexpr std::pair<DeviceAlgorithm, Collective> kWays[] = {
    {DeviceAlgorithm::kReducePackets, Collective::kAllReduce},
    {DeviceAlgorithm::kReducePackets, Collective::kReduce},
    {DeviceAlgorithm::kReducePackets, Collective::kReduceScatter},
    {DeviceAlgorithm::kReducePacketsTwoShot, Collective::kAllReduce},
    {DeviceAlgorithm::kReduceChunks, Collective::kAllReduce},
    {DeviceAlgorithm::kReduceChunks, Collective::kReduce},
    {DeviceAlgorithm::kReduceChunks, Collective::kReduceScatter},
    {DeviceAlgorithm::kExchangePackets, Collective::kAllGather},
    {DeviceAlgorithm::kExchangePackets, Collective::kBroadcast},
    {DeviceAlgorithm::kExchangePackets, Collective::kAllToAll},
    {DeviceAlgorithm::kExchangePackets, Collective::kGather},
    {DeviceAlgorithm::kExchangePackets, Collective::kScatter},
    {DeviceAlgorithm::kExchangePackets, Collective::kBarrier},
    {DeviceAlgorithm::kExchangeChunks, Collective::kAllGather},
    {DeviceAlgorithm::kExchangeChunks, Collective::kBroadcast},
    {DeviceAlgorithm::kExchangeChunks, Collective::kAllToAll},
    {DeviceAlgorithm::kExchangeChunks, Collective::kGather},
    {DeviceAlgorithm::kExchangeChunks, Collective::kScatter},
    {DeviceAlgorithm::kExchangeChunks, Collective::kBarrier},
    {DeviceAlgorithm::kExchangePieces, Collective::kAllGather},
    {DeviceAlgorithm::kExchangePieces, Collective::kBroadcast},
    {DeviceAlgorithm::kExchangePieces, Collective::kAllToAll},
    {DeviceAlgorithm::kExchangePieces, Collective::kGather},
    {DeviceAlgorithm::kExchangePieces, Collective::kScatter},
    {DeviceAlgorithm::kExchangePieces, Collective::kBarrier},
};

inline Spec spec_of(Collective collective, size_t n, int ranks, uint64_t round) {
  Spec spec{.collective = collective, .counts = counts_around(n, ranks, collective), .round = round};
  if (is_rooted(collective)) spec.root = int(round) % ranks;
  return spec;
}

}  // namespace nvx::test
