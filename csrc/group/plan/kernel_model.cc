#include "group/plan/kernel_model.h"

#include <algorithm>
#include <cstdio>

#include "group/plan/device_plan.h"
#include "kernel/gpu/launch_cuda.h"

namespace nvx {
namespace {

using kernel::Collective;
using kernel::DeviceAlgorithm;

constexpr double kUs = 1e-6, kGiga = 1e9;

/// Fitted to the all_reduces of `bench/results/gpu_h200.json`, parts `product` and `bench`: 2 to 32 ranks that share
/// one H200, in a graph. `tests/group/plan/kernel_model_test.cc` checks the fit. Those kernels began with a read of a
/// host word, of 0.3 us by the file's rows without it, which hot kernels do not make any more.
constexpr double kLaunch = 3.9 * kUs;
/// The arrival of each rank beyond the second, by GpuLink: fitted where ranks share a GPU, which starts their launches
/// in turn; else what the file's rounds of flags (`flag_round`) take longer with 8 ranks than with 2.
constexpr double kArrival[] = {0.24 * kUs, 0.04 * kUs, 0.04 * kUs};
constexpr double kRound = 2.8 * kUs;         ///< of chunks: two barriers, a fence, and a flag
constexpr double kLoad = 0.32 * kUs;         ///< from a lane's loads to its stores
constexpr double kBlockRate = 33.6 * kGiga;  ///< bytes that a block sends by chunks, beside the terms above
/// Packets pass at this rate, the first of them while the trip lasts.
constexpr double kPacketRate = 21 * kGiga, kFirstPackets = 20e3;

/// A trip of a store until a waiting lane has seen it, by GpuLink: measured in a GPU, assumed over links.
constexpr double kTrip[] = {1.2 * kUs, 1.5 * kUs, 3 * kUs};
/// A round takes three trips longer over a link: a fence waits for its stores' way there and back; a flag follows.
constexpr double kTripsOfRound = 3;
/// The share of a data sheet's rate that stores reach; assumed. NCCL's rings reach 370 of 450 GB/s over NVLink.
constexpr double kOfLink = 0.82;
/// Rounds in which a block does not send all that it could: the first, and the last two.
constexpr double kRoundsToFill = 3;

/// The bytes that the busiest rank pushes or receives, in units of `bytes`, and those of the longest piece.
struct Moves {
  double units, piece;
};

Moves moves_of(DeviceAlgorithm algorithm, Collective collective, double n) {
  // Half of a packet is its stamp.
  constexpr double kPacked = double(sizeof(kernel::Packet)) / (double(sizeof(kernel::Pack)) / 2);
  const double others = (n - 1) / n;
  const bool cut = collective == Collective::kReduceScatter || collective == Collective::kAllToAll ||
                   collective == Collective::kScatter;
  const bool once = collective == Collective::kReduceScatter || collective == Collective::kReduce;
  const double straight = cut ? others : n - 1, piece = cut ? 1 / n : 1;
  switch (algorithm) {
    case DeviceAlgorithm::kReducePackets:
    case DeviceAlgorithm::kExchangePackets:
    case DeviceAlgorithm::kExchangePieces: return {kPacked * straight, piece};
    case DeviceAlgorithm::kReducePacketsTwoShot: return {kPacked * 2 * others, 1 / n};
    case DeviceAlgorithm::kReduceChunks: return {once ? others : 2 * others, 1 / n};
    case DeviceAlgorithm::kExchangeChunks: return {straight, piece};
    case DeviceAlgorithm::kMoveOwn: break;          // pushes nothing
    case DeviceAlgorithm::kReduceMulticast: break;  // not modelled
  }
  return {0, 0};
}

bool in_chunks(DeviceAlgorithm algorithm) {
  return algorithm == DeviceAlgorithm::kReduceChunks || algorithm == DeviceAlgorithm::kExchangeChunks;
}

/// Packs of one rank that a lane loads at once: with few ranks, the loads that they leave take further packs.
uint32_t packs_each(uint32_t ranks, uint32_t loads) {
  uint32_t packs = 1;
  while (2 * packs * std::min(ranks, kLoadsAtOnce) <= loads) packs *= 2;
  return packs;
}

/// A lane's loads one behind another, in all rounds: to send, to reduce, and to store the sums or pieces of others.
size_t loads_in_turn(DeviceAlgorithm algorithm, Collective collective, size_t share, const kernel::DeviceShape& shape,
                     uint32_t loads) {
  constexpr size_t kStep = kernel::kLanes * sizeof(kernel::Pack);
  const auto turns = [&](size_t bytes, uint32_t ranks) {
    return ceil_div(bytes, kStep * packs_each(ranks, loads)) * ceil_div(ranks, kLoadsAtOnce);
  };
  const auto in_chunk = [&](size_t bytes) {
    const size_t copy = turns(bytes, shape.ranks - 1), sum = turns(bytes, shape.ranks);
    if (algorithm != DeviceAlgorithm::kReduceChunks) return 2 * copy;
    return copy + sum + (collective == Collective::kReduceScatter ? 0 : copy);
  };
  return share / shape.chunk_bytes * in_chunk(shape.chunk_bytes) + in_chunk(share % shape.chunk_bytes);
}

}  // namespace

kernel::DeviceShape shape_for(const PlanFacts& facts, GpuLink link) {
  const auto blocks = uint32_t(facts.tuning.of(Tune::kBlocks, facts.ranks, link));
  return device_shape(uint32_t(facts.ranks), blocks, pad_budget(SIZE_MAX, facts.tuning), facts.tuning);
}

double usable(const DeviceLink& link, size_t ranks) {
  const double rate = std::max(link.gb_s, 0.1) * kGiga;
  return link.kind == DeviceLink::Kind::kOneGpu ? rate / double(ranks) : kOfLink * rate;
}

KernelCost cost_of(DeviceAlgorithm algorithm, Collective collective, size_t bytes, const kernel::DeviceShape& shape,
                   const DeviceLink& link, uint32_t loads) {
  KernelCost c;
  const Moves moves = moves_of(algorithm, collective, shape.ranks);
  c.sent = size_t(moves.units * double(bytes));
  if (shape.ranks < 2 || c.sent == 0) return c;
  const double trip = kTrip[size_t(link.kind)], block_sent = double(c.sent) / shape.blocks;
  // Inside a GPU packets stay in its cache.
  const bool has_limit = in_chunks(algorithm) || link.kind != DeviceLink::Kind::kOneGpu;
  const double by_link = has_limit ? double(c.sent) / usable(link, shape.ranks) : 0;
  double by_block = 0, to_fill = 0;
  size_t held = 0;
  c.waits = algorithm == DeviceAlgorithm::kReducePacketsTwoShot ? 2 : 1;
  const auto packs = ceil_div(size_t(moves.piece * double(bytes)), sizeof(kernel::Pack));
  const size_t share = ceil_div(packs, size_t(shape.blocks)) * sizeof(kernel::Pack);
  const double begins = kLaunch + double(c.waits) * trip + double(shape.ranks - 2) * kArrival[size_t(link.kind)];
  if (in_chunks(algorithm)) {
    const bool passes_on = algorithm == DeviceAlgorithm::kReduceChunks && collective != Collective::kReduceScatter;
    c.rounds = ceil_div(share, size_t(shape.chunk_bytes)) + (passes_on ? 2 : 1);
    c.waits += c.rounds;
    const double round = kRound + kTripsOfRound * (trip - kTrip[0]);
    to_fill = kRoundsToFill * round;
    by_block = double(c.rounds) * round + block_sent / kBlockRate +
               double(loads_in_turn(algorithm, collective, share, shape, loads)) * kLoad;
    held = std::min<size_t>(share, shape.chunk_bytes);
    loads = std::min(loads, packs_each(shape.ranks - 1, loads) * (shape.ranks - 1));
  } else {
    by_block = std::max(0.0, block_sent - kFirstPackets) / kPacketRate;
    held = share;
    loads /= 2;  // the packets of a pack take twice its registers
  }
  c.seconds = begins + std::max(by_block, by_link + to_fill);
  c.in_flight = std::min(size_t(loads) * kernel::kLanes * sizeof(kernel::Pack), held * (shape.ranks - 1));
  c.block_gb_s = block_sent / (begins + by_block) / kGiga;
  c.gb_s = double(c.sent) / c.seconds / kGiga;
  return c;
}

std::string terms_of(const KernelCost& cost, const kernel::DeviceShape& shape, const DeviceLink& link) {
  const double kib = double(cost.in_flight) / 1024;
  char text[240];
  if (cost.rounds == 0)
    std::snprintf(text, sizeof text, "packets without a fence, %.0f KiB in flight in each of %u blocks; ", kib,
                  shape.blocks);
  else
    std::snprintf(text, sizeof text,
                  "%llu rounds with a fence each, %.0f KiB in flight in each of %u blocks, which sends %.1f GB/s; ",
                  static_cast<unsigned long long>(cost.rounds), kib, shape.blocks, cost.block_gb_s);
  std::string terms = text;
  std::snprintf(text, sizeof text, "a rank sends %.0f GB/s, the link carries %.0f of %.0f GB/s", cost.gb_s,
                usable(link, shape.ranks) / kGiga, link.gb_s);
  return terms + text;
}

}  // namespace nvx
