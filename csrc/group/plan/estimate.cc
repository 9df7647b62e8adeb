#include "group/plan/estimate.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <vector>

#include "base/round_up.h"
#include "kernel/cpu/host_collectives.h"

namespace nvx {
namespace {

using kernel::Algorithm;
using kernel::Collective;
using kernel::DeviceAlgorithm;
using schedule::Block;
using schedule::Layout;

constexpr double kMicro = 1e-6, kMiB = 1 << 20;

/// Fitted to `bench/results/targets.json`, parts `all_reduce`, `others` and `four`, for 8 bytes to 64 MiB on 2 cores:
/// within a factor of 2 with 2 ranks, and of 3 with 4 ranks. `tests/bench` checks the fit.
constexpr double kCall = 5.5 * kMicro;  ///< torch's own part of a call, which its null backend has too
constexpr double kStep = 1.5 * kMicro;  ///< a spinning rank sees a flag
constexpr double kPeer = 0.1 * kMicro;  ///< ... and by each further rank
constexpr double kWake = 20 * kMicro;   ///< ... if ranks outnumber cores: a rank sleeps and is woken
constexpr double kCached =
    18 * kMicro / kMiB;  ///< a byte read or written, while the staged data fits the last-level cache
constexpr double kPast = 29 * kMicro / kMiB;  ///< ... and beyond it
constexpr char kInsideBasis[] = "bench/results/targets.json: 2 ranks on 2 cores of one machine";

/// Fitted to parts `far` and `far_others` of the same file, within a factor of 2.
constexpr double kTcpMessage = 15 * kMicro, kTcpByte = 500 * kMicro / kMiB;

constexpr double kHostCopy = 1 / 20e9, kHostCopyBegins = 10 * kMicro;

/// The busiest rank's reads and writes, in units of `bytes`, as in `kernel/cpu/host_collectives.h`. A copied byte
/// counts twice; a reduced one counts once per term and once for the result.
double passes(Algorithm algorithm, Collective collective, double n) {
  const double others = (n - 1) / n;
  switch (algorithm) {
    case Algorithm::kBarrier: return 0;
    case Algorithm::kReduceOneShot: return 2 + n + 1;
    case Algorithm::kReduceScatterOneShot:
    case Algorithm::kReduceScatterPipelined: return 2 * others + (n + 1) / n;
    case Algorithm::kReducePipelined:
      return 2 * others + (n + 1) / n + 2 * others + (collective == Collective::kAllReduce ? 2 / n : 0);
    case Algorithm::kPublishOneShot:
    case Algorithm::kPublishPipelined: return collective == Collective::kBroadcast ? 4 : 2 * (n + 1);
    case Algorithm::kExchange: return collective == Collective::kGather ? 2 + 2 * n : 2 * others + 2 / n + 2 * others;
  }
  return 0;
}

/// The number of sequential waits on the slowest rank.
uint64_t steps_of(Algorithm algorithm, Collective collective, size_t bytes, const PlanFacts& facts) {
  const size_t lease = plan(collective, bytes, facts).lease_bytes;
  const auto chunks = [&](size_t longest, size_t parts) {
    return lease ? kernel::Geometry::of(lease, longest, parts).chunks : size_t(1);
  };
  const size_t n = facts.ranks;
  switch (algorithm) {
    case Algorithm::kReducePipelined: return 1 + chunks(ceil_div(bytes, n), n) + 2;
    case Algorithm::kReduceScatterPipelined: return 1 + chunks(ceil_div(bytes, n), n) + 1;
    case Algorithm::kPublishPipelined: return 1 + chunks(bytes, 1) + 1;
    case Algorithm::kExchange: return lease ? 1 + chunks(ceil_div(bytes, n), n) + 1 : 1;
    default: return 1;
  }
}

/// The duration of a call without torch's own part.
Estimate inside_of(Algorithm algorithm, Collective collective, size_t bytes, const PlanFacts& facts) {
  Estimate e = count_inside(algorithm, collective, bytes, facts);
  const double a_byte = policy_to_keep(bytes, facts) == kernel::CachePolicy::kPast ? kPast : kCached;
  const double ranks_per_core = std::max(1.0, double(facts.ranks) / double(std::max<size_t>(facts.cores, 1)));
  e.seconds = double(e.steps) * signal_seconds(facts) + double(e.bytes) * a_byte * ranks_per_core;
  e.basis = kInsideBasis;
  return e;
}

/// The ranks of a host that send at once as much as the busiest one.
double senders(Collective collective, const InterHostPlan& inter_host, const PlanFacts& facts) {
  switch (collective) {
    case Collective::kAllReduce:
    case Collective::kReduceScatter:
    case Collective::kAllGather: return inter_host.by_leader ? 1 : double(facts.rails);
    case Collective::kAllToAll: return double(facts.ranks);
    default: return 1;
  }
}

/// The duration between hosts: from the time a host has its data to the time all have theirs, without torch's part and
/// the steps inside hosts. Sets `slices` to the number of consecutive slices.
Estimate on_the_wire(const schedule::Row& row, Collective collective, size_t bytes, const InterHostPlan& inter_host,
                     const PlanFacts& facts, const Medium& medium, double* slices = nullptr) {
  std::vector<Block> blocks;
  const RunBetween b = run_between(collective, bytes, inter_host, facts, blocks);
  if (slices) *slices = std::max(1.0, b.slices);
  if (!row.legal(b.layout)) return {};
  const Moved moved = moved_by(row, b.layout, b.host_ranks);
  const double depth = double(row.guarantee.depth(b.layout.size));
  const double posted = double(moved.messages) / double(kSlicesInFlight);
  const double byte = medium.byte * (medium.one_a_host ? senders(collective, inter_host, facts) : 1);
  // Only the first slice pays for its whole way; the later ones follow in the pipeline.
  const double fill = std::max(0.0, depth - double(moved.messages)) * double(moved.largest) * byte;
  Estimate e;
  e.bytes = size_t(double(moved.bytes) * b.slices);
  e.steps = uint64_t(std::max(depth, posted * std::ceil(b.slices)));
  e.seconds = double(e.steps) * medium.message + double(e.bytes) * byte + fill;
  e.basis = medium.basis;
  return e;
}

std::vector<Way> ways_inside(Collective collective, size_t bytes, const PlanFacts& facts) {
  const Choice choice = plan(collective, bytes, facts);
  const std::vector<kernel::Algorithm> algorithms = host_algorithms_of(collective);
  const bool has_choice = algorithms.size() > 1, can_change = has_choice && bytes <= kernel::kSlotBytes;
  std::vector<Way> ways;
  for (const kernel::Algorithm algorithm : algorithms) {
    const bool is_small = has_choice && algorithm == algorithms.front();
    Way way{"shared memory", kernel::name(algorithm), choice.why, can_change ? "NVX_ALGO, NVX_TUNE" : "nothing",
            algorithm == choice.algorithm};
    if (!way.runs) way.why = is_small ? "for shorter messages" : "for longer messages";
    if (is_small && bytes > kernel::kSlotBytes) {
      way.why = "a slot holds " + std::to_string(kernel::kSlotBytes) + " bytes";
    } else {
      way.estimate = estimate_inside(algorithm, collective, bytes, facts);
    }
    ways.push_back(std::move(way));
  }
  return ways;
}

std::vector<Way> ways_between(Collective collective, size_t bytes, const PlanFacts& facts, const Medium& medium) {
  const schedule::Collective what = across(collective);
  const InterHostPlan inter_host = plan_between(what, bytes, facts);
  std::vector<Way> ways;
  for (const schedule::Row& row : schedule::catalog()) {
    if (row.collective != what) continue;
    Way way{"between hosts", row.name, inter_host.why, "NVX_TUNE", &row == inter_host.row};
    if (!way.runs) way.why = "nvx's table of sizes and hosts names " + std::string(inter_host.row->name);
    way.estimate = estimate_between(row, collective, bytes, facts, medium);
    if (way.estimate.basis.empty()) way.why = "not for so many hosts";
    ways.push_back(std::move(way));
  }
  return ways;
}

}  // namespace

double signal_seconds(const PlanFacts& facts) {
  const double peers = double(std::max<size_t>(facts.ranks, 2) - 2) * kPeer;
  return (facts.ranks > facts.cores ? kWake : kStep) + peers;
}

Estimate count_inside(Algorithm algorithm, Collective collective, size_t bytes, const PlanFacts& facts) {
  Estimate e;
  if (facts.ranks == 1 || collective == Collective::kNone) return e;
  e.steps = steps_of(algorithm, collective, bytes, facts);
  e.bytes = size_t(passes(algorithm, collective, double(facts.ranks)) * double(bytes));
  return e;
}

RunBetween run_between(Collective collective, size_t bytes, const InterHostPlan& inter_host, const PlanFacts& facts,
                       std::vector<Block>& blocks) {
  RunBetween b;
  const auto all_alike = [&](size_t ranks, size_t each) {
    b.layout.size = int(ranks);
    for (size_t i = 0; i < ranks; ++i) blocks.push_back({i * each, each});
    b.layout.blocks = b.layout.to = b.layout.from = blocks;
  };
  const Sizes size = sizes(across(collective), bytes, inter_host, facts);
  const size_t slice = std::min(size.sliced, inter_host.slice);
  if (slice != 0) b.slices = double(size.sliced) / double(slice);
  b.layout.size = int(facts.hosts);
  switch (collective) {
    case Collective::kAllReduce: b.layout.bytes = inter_host.by_leader ? slice : size.after; break;
    case Collective::kBroadcast:
    case Collective::kReduce: b.layout.bytes = slice; break;
    case Collective::kReduceScatter:
    case Collective::kAllGather: all_alike(facts.hosts, slice); break;
    case Collective::kBarrier: break;
    default:  // directly to the destination rank
      b.host_ranks = int(facts.ranks);
      all_alike(facts.world, collective == Collective::kGather ? bytes : bytes / facts.world);
  }
  return b;
}

Medium tcp() {
  return {kTcpMessage, kTcpByte,
          "bench/results/targets.json: TCP over the loopback of one machine as two hosts of NVX_HOST_ID, without the "
          "time of a network card",
          /*one_a_host=*/true};
}

Medium rdma(double gb_s) {
  char text[128];
  std::snprintf(text, sizeof text, "not measured: RDMA, as 4 us a message and 0.8 of a port of %.1f GB/s", gb_s);
  return {4 * kMicro, 1 / (0.8 * gb_s * 1e9), text};
}

Moved moved_by(const schedule::Row& row, const Layout& layout, int host_ranks) {
  Moved most;
  for (const int rank : {0, layout.size - 1}) {
    Moved out, in;
    const auto is_remote = [&](int peer) {
      return peer >= 0 && peer != rank && peer / host_ranks != rank / host_ranks;
    };
    const auto count = [&](Moved& m, int peer, size_t bytes) {
      if (is_remote(peer)) ++m.messages, m.bytes += bytes, m.largest = std::max(m.largest, bytes);
    };
    const uint64_t steps = row.steps(layout, rank);
    for (uint64_t i = 0; i < steps; ++i) {
      const schedule::Step step = row.at(layout, rank, i);
      count(out, step.send_to, step.send.bytes);
      count(in, step.recv_from, step.recv.bytes);
    }
    for (const Moved& m : {out, in}) {
      most.messages = std::max(most.messages, m.messages);
      most.bytes = std::max(most.bytes, m.bytes);
      most.largest = std::max(most.largest, m.largest);
    }
  }
  return most;
}

Estimate estimate_inside(Algorithm algorithm, Collective collective, size_t bytes, const PlanFacts& facts) {
  Estimate e = inside_of(algorithm, collective, bytes, facts);
  e.seconds += kCall;
  return e;
}

Estimate estimate_between(const schedule::Row& row, Collective collective, size_t bytes, const PlanFacts& facts,
                          const Medium& medium) {
  const InterHostPlan inter_host = plan_between(across(collective), bytes, facts);
  Estimate e = on_the_wire(row, collective, bytes, inter_host, facts, medium);
  if (e.basis.empty()) return e;
  e.seconds += kCall;
  // Inside the hosts, the slices together are as large as the whole.
  const bool rails = !inter_host.by_leader && collective == Collective::kAllReduce;
  const size_t before = rails || collective == Collective::kReduceScatter ? bytes : inter_host.by_leader ? bytes : 0;
  const size_t after = rails ? ceil_div(bytes, facts.rails) : bytes;
  for (const auto& [inside, staged] : {std::pair{inter_host.before, before}, std::pair{inter_host.after, after}}) {
    if (inside == Collective::kNone) continue;
    const Estimate step = inside_of(plan(inside, staged, facts).algorithm, inside, staged, facts);
    e.seconds += step.seconds;
    e.steps += step.steps;
  }
  return e;
}

Estimate estimate_proxied(const InterHostPlan& inter_host, Collective collective, size_t bytes, const PlanFacts& facts,
                          const Medium& medium, const DeviceLink& link) {
  const bool reduces = collective != Collective::kAllGather, publishes = collective != Collective::kReduceScatter;
  const size_t share = reduces && !inter_host.by_leader ? bytes / facts.ranks : bytes;  // of a rank, to host memory
  const size_t back = collective == Collective::kAllReduce ? share
                      : publishes                          ? bytes * (facts.hosts - 1)
                                                           : bytes / facts.world;
  double slices = 1;
  Estimate e = on_the_wire(*inter_host.row, collective, bytes, inter_host, facts, medium, &slices);
  std::vector<double> stages{e.seconds, double(share) * kHostCopy, double(back) * kHostCopy};
  const auto pushed = [&](DeviceAlgorithm algorithm, Collective inside, size_t each) {
    const Estimate step = estimate_device_algorithm(algorithm, inside, each, shape_for(facts, link.kind), link);
    e.bytes += step.bytes;
    e.steps += step.steps;
    stages.push_back(step.seconds - kCall);
  };
  if (inter_host.by_leader) {
    pushed(DeviceAlgorithm::kReducePackets, Collective::kReduce, bytes);
    pushed(DeviceAlgorithm::kExchangePackets, Collective::kBroadcast, bytes);
  } else {
    if (reduces) pushed(DeviceAlgorithm::kReduceChunks, Collective::kReduceScatter, bytes);
    if (publishes)
      pushed(DeviceAlgorithm::kExchangeChunks, Collective::kAllGather, reduces ? share : bytes * facts.hosts);
  }
  // The stages overlap: the slowest one sets the pace, and each other one adds its time for one slice.
  double all = 0, slowest = 0;
  for (const double stage : stages) all += stage, slowest = std::max(slowest, stage);
  e.seconds = kCall + 2 * kHostCopyBegins + slowest + (all - slowest) / slices;
  e.bytes += share + back;
  e.basis = "predicted, not measured on a device: kernels over the link, " + link.hardware +
            "; copies at 20 GB/s; between hosts " + medium.basis;
  return e;
}

Estimate estimate_device_algorithm(DeviceAlgorithm algorithm, Collective collective, size_t bytes,
                                   const kernel::DeviceShape& shape, const DeviceLink& link) {
  const KernelCost cost = cost_of(algorithm, collective, bytes, shape, link);
  return {
      kCall + cost.seconds, cost.waits, cost.sent,
      std::string("predicted for ") + kernel::name(algorithm) + ": " + terms_of(cost, shape, link) +
          "; costs as on one H200 (bench/results/gpu_h200.json), the link not measured on a device: " + link.hardware};
}

/// From `src/graph/tuning.cc` of NCCL 2.30, for Hopper: rings with LL, which sends each byte twice, or Simple.
Estimate estimate_nccl(Collective collective, size_t bytes, size_t ranks, const DeviceLink& link) {
  constexpr double kBase[] = {6.6 * kMicro, 8.4 * kMicro}, kHop[] = {0.6 * kMicro, 3.4 * kMicro}, kTimes[] = {2, 1};
  const bool whole = collective == Collective::kAllReduce, parts = collective == Collective::kAllGather;
  const double n = double(ranks), hops = (whole ? 2 : 1) * (n - 1);
  Estimate e;
  e.steps = uint64_t(hops);
  e.bytes = size_t(double(bytes) * (parts ? n - 1 : whole ? 2 * (n - 1) / n : 1));
  for (int i = 0; i < 2; ++i) {
    const double took = kCall + kBase[i] + hops * kHop[i] + kTimes[i] * double(e.bytes) / usable(link, ranks);
    e.seconds = i == 0 ? took : std::min(e.seconds, took);
  }
  e.basis = "predicted, not measured on a device: the constants of NCCL's own tuner, and the same link";
  return e;
}

Estimate estimate_through_host(const Estimate& inside, Collective collective, size_t bytes, size_t ranks) {
  const size_t d2h = bytes, h2d = collective == Collective::kAllGather || collective == Collective::kGather
                                      ? bytes * ranks
                                  : collective == Collective::kReduceScatter || collective == Collective::kScatter
                                      ? bytes / std::max<size_t>(ranks, 1)
                                      : bytes;
  Estimate e = inside;
  e.seconds += double(d2h + h2d) * kHostCopy + 2 * kHostCopyBegins;
  e.bytes += d2h + h2d;
  e.basis = "predicted, not measured on a device: copies at 20 GB/s, 10 us each; between them " + inside.basis;
  return e;
}

std::vector<Way> ways_of(Collective collective, size_t bytes, const PlanFacts& facts, const Medium& medium) {
  return facts.hosts > 1 ? ways_between(collective, bytes, facts, medium) : ways_inside(collective, bytes, facts);
}

}  // namespace nvx
