#include "group/plan/device_plan.h"

#include <algorithm>
#include <iterator>

namespace nvx {
namespace {

using kernel::Collective;
using kernel::DeviceAlgorithm;

constexpr size_t kNoLimit = SIZE_MAX;

enum class PacketTrips { kOne, kTwo };
/// Whether all ranks have the length of every piece, or only the two ranks of a pair. In the second case lengths decide
/// nothing for all ranks: each pair decides for its own piece.
enum class Lengths { kOnAllRanks, kPerPair };

/// One row per collective: the algorithm while packets hold the data, and the one for any length.
struct DeviceRow {
  Collective collective;
  DeviceAlgorithm packets;
  DeviceAlgorithm chunks;
  PacketTrips trips = PacketTrips::kOne;  ///< the most trips of packets, used if one trip would transfer too many bytes
  Lengths lengths = Lengths::kOnAllRanks;
  bool pair_by_pair() const { return lengths == Lengths::kPerPair; }
};

constexpr DeviceRow kDeviceTable[] = {
    {Collective::kAllReduce, DeviceAlgorithm::kReducePackets, DeviceAlgorithm::kReduceChunks, PacketTrips::kTwo},
    {Collective::kReduce, DeviceAlgorithm::kReducePackets, DeviceAlgorithm::kReduceChunks},
    {Collective::kReduceScatter, DeviceAlgorithm::kReducePackets, DeviceAlgorithm::kReduceChunks},
    {Collective::kAllGather, DeviceAlgorithm::kExchangePackets, DeviceAlgorithm::kExchangeChunks},
    {Collective::kBroadcast, DeviceAlgorithm::kExchangePackets, DeviceAlgorithm::kExchangeChunks},
    {Collective::kAllToAll, DeviceAlgorithm::kExchangePieces, DeviceAlgorithm::kExchangeChunks, PacketTrips::kOne,
     Lengths::kPerPair},
    {Collective::kGather, DeviceAlgorithm::kExchangePieces, DeviceAlgorithm::kExchangeChunks, PacketTrips::kOne,
     Lengths::kPerPair},
    {Collective::kScatter, DeviceAlgorithm::kExchangePieces, DeviceAlgorithm::kExchangeChunks, PacketTrips::kOne,
     Lengths::kPerPair},
    {Collective::kBarrier, DeviceAlgorithm::kExchangePackets, DeviceAlgorithm::kExchangeChunks},
};

const DeviceRow& device_row(Collective collective) {
  for (const DeviceRow& r : kDeviceTable) {
    if (r.collective == collective) return r;
  }
  return kDeviceTable[std::size(kDeviceTable) - 1];
}

bool is_whole(Collective collective) {
  return collective == Collective::kAllReduce || collective == Collective::kReduce;
}

size_t one_trip_limit(const DeviceRow& row, const DevicePlanFacts& facts) {
  const size_t held = most_bytes(row.packets, facts.shape);
  if (facts.force == PlanFacts::Force::kOneShot) return held;
  return std::min(held, facts.tuned(is_whole(row.collective) ? Tune::kOneShot : Tune::kPiece));
}

}  // namespace

size_t most_bytes(DeviceAlgorithm algorithm, const kernel::DeviceShape& shape) {
  const size_t packs = kernel::most_packs(algorithm, shape);
  if (packs == SIZE_MAX) return kNoLimit;
  // Each block has packets of its own. In two trips they hold one slice, and there is one slice per rank.
  const size_t slices = algorithm == DeviceAlgorithm::kReducePacketsTwoShot ? shape.ranks : 1;
  return packs * sizeof(kernel::Pack) * shape.blocks * slices;
}

std::vector<DeviceAlgorithm> algorithms_of(Collective collective) {
  const DeviceRow& r = device_row(collective);
  if (r.trips == PacketTrips::kTwo) return {r.packets, DeviceAlgorithm::kReducePacketsTwoShot, r.chunks};
  return {r.packets, r.chunks};
}

DeviceChoice plan(Collective collective, size_t bytes, const DevicePlanFacts& facts) {
  const DeviceRow& r = device_row(collective);
  if (bytes == 0 && !r.pair_by_pair()) return {r.packets, "there is no data to move"};
  if (facts.force == PlanFacts::Force::kPipelined) return {r.chunks, "NVX_ALGO requests chunks"};
  if (r.pair_by_pair()) return {r.packets, "each pair decides: packets if its piece fits, otherwise chunks"};
  if (bytes <= one_trip_limit(r, facts)) return {r.packets, "it fits into packets: one trip"};
  const size_t two_shot =
      std::min(most_bytes(DeviceAlgorithm::kReducePacketsTwoShot, facts.shape), facts.tuned(Tune::kTwoShot));
  if (r.trips == PacketTrips::kTwo && bytes <= two_shot)
    return {DeviceAlgorithm::kReducePacketsTwoShot, "every rank's slice fits into packets: two trips, for fewer bytes"};
  return {r.chunks, "too large for packets: chunks"};
}

DeviceChoice plan_all_reduce(size_t bytes, DType dtype, ReduceOp op, const DevicePlanFacts& facts) {
  const DeviceChoice choice = plan(Collective::kAllReduce, bytes, facts);
  const bool is_type = dtype == DType::kF32 || dtype == DType::kBF16 || dtype == DType::kF16;
  if (!facts.has_multicast || !is_type || op != ReduceOp::kSum || choice.algorithm == DeviceAlgorithm::kReducePackets)
    return choice;
  return {DeviceAlgorithm::kReduceMulticast, "NVX_NVLS=1: the switch adds"};
}

/// With M bytes of packets an all-reduce takes two trips up to M / 8 bytes: two buffers of 16 bytes for each 8 bytes,
/// half of them for each trip. It takes one trip up to M / 4 divided by the number of ranks, as does a piece of an
/// exchange. For a pad of 16 MiB that is 1 MiB and, with 8 ranks, 256 KiB: packets are rounded up to whole rows, so
/// that they hold these sizes with any number of blocks.
///
/// In a round a block sends a chunk to each peer. With 24 blocks and a pad of 16 MiB these are 64 KiB or more, as many
/// as the lanes of a block load at once: chunks are 64 KiB for 2 ranks, 21.4 KiB for 4 and 10.8 KiB for 8. To hold
/// that, chunks of 2 ranks take 12 MiB, not half of the pad, and those of 3 ranks 9 MiB. A group that finds the arena
/// partly used keeps to half, so that as many groups as with more ranks find room.
kernel::DeviceShape device_shape(uint32_t ranks, uint32_t blocks, size_t pad_bytes, const Tuning& tuning) {
  constexpr size_t kFewestPackets = kernel::kRowPackets, kMostPackets = 8192, kSmallestChunk = 1 << 10,
                   kLargestChunk = 64 << 10;
  const size_t cells = size_t(std::max(ranks, 1u)) * std::max(blocks, 1u), half = pad_bytes / 2;
  const bool is_whole = pad_bytes >= tuning.of(Tune::kPad, ranks);
  const size_t staging = is_whole ? std::max(half, pad_bytes * 3 / 8 * ranks / (std::max(ranks, 2u) - 1)) : half;
  kernel::DeviceShape shape{ranks, blocks};
  const size_t rows = ceil_div(half, kernel::kBuffers * sizeof(kernel::Packet) * cells * kernel::kRowPackets);
  const size_t lines = ceil_div(staging, kernel::kChunks * cells * kernel::kCacheLine);
  shape.packets = uint32_t(std::clamp(rows * kernel::kRowPackets, kFewestPackets, kMostPackets));
  shape.chunk_bytes = uint32_t(std::clamp(lines * kernel::kCacheLine, kSmallestChunk, kLargestChunk));
  if (const uint64_t own = tuning.of(Tune::kPackets, ranks)) shape.packets = uint32_t(own);
  if (const uint64_t own = tuning.of(Tune::kChunkBytes, ranks)) shape.chunk_bytes = uint32_t(own);
  return shape;
}

/// The arena serves all groups of the process. Of 64 MiB the first group gets the most that pays, 16 MiB and a little;
/// with 2 ranks 20 MiB. Later groups get less until others have gone, and nothing only if the arena is nearly full.
size_t pad_budget(size_t free_bytes, const Tuning& tuning) {
  constexpr size_t kLeast = 512 << 10;
  return std::clamp(free_bytes / 4, kLeast, size_t(tuning.of(Tune::kPad, 2)));
}

}  // namespace nvx
