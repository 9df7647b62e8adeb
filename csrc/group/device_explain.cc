#include "group/device_explain.h"

#include <algorithm>

#include "base/config.h"
#include "base/round_up.h"
#include "group/hierarchy/host_proxy.h"
#include "group/plan/chunks.h"
#include "group/plan/delegate_plan.h"

namespace nvx {
namespace {

using kernel::Collective;
using kernel::DeviceAlgorithm;

size_t ranks_of(const ExplainRequest& q) { return q.facts.hosts > 1 ? q.facts.world : q.facts.ranks; }

/// Counts like `plan()` for devices: one piece of a scatter or an exchange.
size_t bytes_of_piece(const ExplainRequest& q) {
  const bool in_pieces = q.collective == Collective::kReduceScatter || q.collective == Collective::kAllToAll ||
                         q.collective == Collective::kScatter;
  return in_pieces ? q.bytes / std::max<size_t>(q.facts.ranks, 1) : q.bytes;
}

Way by_delegate(const ExplainRequest& q) {
  const size_t ranks = ranks_of(q), whole = bytes_of_whole(q.collective, q.bytes, ranks);
  const DelegateRule* rule = rule_for(q.collective, config().delegate);
  Way way{"NCCL", "torch's ProcessGroupNCCL", q.no_nccl, "NVX_DELEGATE"};
  const bool never = !may_be_delegated(name(q.collective));
  if (q.no_nccl.empty() && ranks > 1 && !never && q.facts.hosts == 1)
    way.estimate = estimate_nccl(q.collective, q.bytes, q.facts.ranks, q.link);
  if (!q.no_nccl.empty()) {
    way.set_by = "another torch";
  } else if (never) {
    way.why = "NVX_DELEGATE cannot name it";
    way.set_by = "nothing";
  } else if (ranks < 2) {
    way.why = "a group of one rank passes nothing to NCCL";
  } else if (const char* why_not =
                 why_not_delegated({q.collective, DType::kF32, ReduceOp::kSum, whole}, config().delegate)) {
    way.why = why_not;
    if (rule && whole < rule->least_bytes)
      way.why += ": " + std::to_string(whole) + " of at least " + std::to_string(rule->least_bytes) + " bytes";
  } else {
    way.why = "NVX_DELEGATE names it, where each rank has a GPU to itself; not in captures";
    way.runs = true;
  }
  return way;
}

std::string limit_of(DeviceAlgorithm algorithm, const kernel::DeviceShape& shape) {
  const size_t most = most_bytes(algorithm, shape);
  return most == SIZE_MAX ? "for any size" : "for pieces of at most " + std::to_string(most) + " bytes";
}

bool kernel_can(DeviceAlgorithm algorithm, const ExplainRequest& q, const kernel::DeviceShape& shape) {
  return q.collective != Collective::kBarrier && bytes_of_piece(q) <= most_bytes(algorithm, shape);
}

/// The algorithm for a piece. Where each pair decides for itself, the piece's length decides.
DeviceAlgorithm moved_as(DeviceAlgorithm algorithm, const ExplainRequest& q, const kernel::DeviceShape& shape) {
  if (algorithm != DeviceAlgorithm::kExchangePieces) return algorithm;
  return bytes_of_piece(q) <= most_bytes(DeviceAlgorithm::kExchangePackets, shape) ? algorithm
                                                                                   : DeviceAlgorithm::kExchangeChunks;
}

std::vector<Way> by_kernels(const ExplainRequest& q) {
  const DevicePlanFacts facts{shape_for(q.facts, q.link.kind), q.facts.force, q.facts.tuning,
                              /*has_multicast=*/false, q.link.kind};
  const DeviceChoice choice = plan(q.collective, bytes_of_piece(q), facts);
  std::vector<Way> ways;
  const DevicePlanFacts with_switch{facts.shape, facts.force, facts.tuning, /*has_multicast=*/config().nvls,
                                    facts.link};
  const auto sum = plan_all_reduce(q.bytes, DType::kF32, ReduceOp::kSum, with_switch).algorithm;
  if (q.collective == Collective::kAllReduce && sum == DeviceAlgorithm::kReduceMulticast && q.facts.ranks > 1)
    ways.push_back(
        {"kernels", kernel::name(sum),
         "sums of float32, float16 and bfloat16, where the GPUs of all ranks can multicast: the switch adds, in "
         "other bits than the ways below",
         "NVX_NVLS", q.has_kernels});
  for (const DeviceAlgorithm algorithm : algorithms_of(q.collective)) {
    const bool chosen = algorithm == choice.algorithm;
    Way way{"kernels", kernel::name(algorithm), chosen ? choice.why : limit_of(algorithm, facts.shape),
            "NVX_ALGO, NVX_TUNE", chosen && q.has_kernels};
    if (kernel_can(algorithm, q, facts.shape))
      way.estimate =
          estimate_device_algorithm(moved_as(algorithm, q, facts.shape), q.collective, q.bytes, facts.shape, q.link);
    if (!q.has_kernels) way.why = "this build has no kernels", way.set_by = "a build with NVX_CUDA=1";
    if (q.collective == Collective::kBarrier) way.why = "a barrier runs on the CPU", way.runs = false;
    ways.push_back(std::move(way));
  }
  return ways;
}

/// Over several hosts: kernels of all ranks. Only the ranks' GPUs can show whether they do it.
Way by_domain(const ExplainRequest& request) {
  ExplainRequest q = request;
  q.facts.ranks = q.facts.world;
  q.facts.hosts = 1;
  std::vector<Way> ways = by_kernels(q);
  const auto chosen = std::ranges::find_if(ways, [](const Way& way) { return way.runs; });
  Way way = chosen == ways.end() ? ways.front() : *chosen;
  way.why = "where the GPUs of all ranks are in one NVLink domain: " + way.why;
  way.runs = false;
  return way;
}

/// The fingerprint's count for byte tensors.
size_t count_of(const ExplainRequest& q) { return bytes_of_whole(q.collective, q.bytes, ranks_of(q)); }

/// The part of a proxy's data that each rank moves over its bus.
const char* moved_by_proxy(Collective collective, const InterHostPlan& inter_host) {
  if (inter_host.by_leader)
    return "small: one rank of each host copies the host's sum to host memory, and the result back";
  switch (collective) {
    case Collective::kReduceScatter:
      return "each rank copies the host's sums for its local_rank on every host to host memory, and its own result "
             "back";
    case Collective::kAllGather:
      return "each rank copies its own block to host memory, and those of its local_rank on the other hosts back";
    default: return "each rank copies its part of the host's sum to host memory and back";
  }
}

/// A proxy over several hosts: kernels or the host perform the steps inside each host.
Way by_proxy(const ExplainRequest& q, const InterHostPlan& inter_host) {
  Way way{"kernels and host memory", std::string("between hosts ") + inter_host.row->name, "", "nothing"};
  const char* const why_not = why_not_by_kernels(q.collective, DType::kU8, count_of(q), q.facts);
  if (!q.has_kernels) {
    way.why = "this build has no kernels", way.set_by = "a build with NVX_CUDA=1";
  } else if (why_not) {
    way.why = why_not;
  } else if (!can_be_proxied(q.collective, DType::kU8, count_of(q), q.facts)) {
    way.why = "too many hosts: a kernel launch cannot list so many pieces";
  } else if (!config().delegate.empty()) {
    way.why = "not together with NCCL's kernels", way.set_by = "NVX_DELEGATE";
  } else {
    way.why = moved_by_proxy(q.collective, inter_host), way.set_by = "NVX_TUNE";
    way.runs = true;
  }
  if (!why_not) way.estimate = estimate_proxied(inter_host, q.collective, q.bytes, q.facts, q.medium, q.link);
  return way;
}

Way by_all_hosts(const ExplainRequest& q, const InterHostPlan& inter_host) {
  const Estimate there = estimate_between(*inter_host.row, q.collective, q.bytes, q.facts, q.medium);
  Way way{"host memory", std::string("between hosts ") + inter_host.row->name,
          std::string("if no way above is possible: ") + inter_host.why, "NVX_TUNE", true};
  if (q.has_kernels && config().delegate.empty() && can_be_proxied(q.collective, DType::kU8, count_of(q), q.facts))
    way.why += "; kernels copy each rank's data to host memory and back, so the caller does not wait";
  if (q.collective != Collective::kBarrier)
    way.estimate = estimate_through_host(there, q.collective, q.bytes, q.facts.world);
  return way;
}

/// For an operation in chunks, this is the plan of one chunk.
Way by_host(const ExplainRequest& q) {
  const size_t whole = bytes_of_whole(q.collective, q.bytes, q.facts.ranks);
  const bool in_chunks = goes_in_chunks(q.collective, DType::kU8, whole);
  const size_t bytes = in_chunks ? q.bytes / ceil_div(whole, kChunk) : q.bytes;
  const Choice choice = plan(q.collective, bytes, q.facts);
  std::string why = std::string("if no way above is possible: ") + choice.why;
  if (in_chunks) why += "; in chunks of " + std::to_string(kChunk >> 20) + " MiB";
  const Estimate there = estimate_inside(choice.algorithm, q.collective, q.bytes, q.facts);
  const std::string set_by = ways_of(q.collective, bytes, q.facts, q.medium).front().set_by;  // the same for all
  return {"host memory", kernel::name(choice.algorithm),
          why,           set_by,
          true,          estimate_through_host(there, q.collective, q.bytes, q.facts.ranks)};
}

}  // namespace

size_t bytes_of_whole(Collective collective, size_t bytes, size_t ranks) {
  return collective == Collective::kAllGather || collective == Collective::kGather ? bytes * ranks : bytes;
}

DeviceLink slowest_link(const GpuTopology& topology) {
  using Kind = DeviceLink::Kind;
  if (topology.gpus.empty()) return {Kind::kNvlink, 450, "no GPU here: assumes 18 lanes of NVLink 4 between all"};
  if (topology.pairs.empty()) return {Kind::kOneGpu, 1000, "one GPU here: assumes that all ranks share it"};
  const GpuPair& pair = *std::ranges::min_element(topology.pairs, {}, &GpuPair::expected_gb_s);
  const std::string hardware = "GPU " + std::to_string(pair.a) + " and GPU " + std::to_string(pair.b) + ", " +
                               pair.label() + ", the slowest pair here";
  if (pair.expected_gb_s <= 0) return {Kind::kPcie, 16, hardware + ", of unknown speed: assumes PCIe 3.0 x16"};
  const bool nvlink = pair.lanes > 0 && pair.no_peer_access.empty();
  return {nvlink ? Kind::kNvlink : Kind::kPcie, pair.expected_gb_s, hardware};
}

uint64_t tuned(Tune key, const PlanFacts& facts, GpuLink link) {
  switch (key) {
    case Tune::kLease: return most_lease(facts);
    case Tune::kPastCaches: return past_caches(facts);
    case Tune::kPackets: return shape_for(facts, link).packets;
    case Tune::kChunkBytes: return shape_for(facts, link).chunk_bytes;
    default: return facts.tuning.of(key, facts.ranks, link);
  }
}

std::vector<Way> explain_on_device(const ExplainRequest& request) {
  std::vector<Way> ways{by_delegate(request)};
  if (request.facts.hosts > 1) {
    const InterHostPlan inter_host = plan_between(across(request.collective), request.bytes, request.facts);
    ways.push_back(by_proxy(request, inter_host));
    ways.push_back(by_all_hosts(request, inter_host));
    if (request.facts.world <= kernel::kMostRanks) ways.push_back(by_domain(request));
  } else {
    for (Way& way : by_kernels(request)) ways.push_back(std::move(way));
    ways.push_back(by_host(request));
  }
  bool found = false;  // the first possible way runs
  for (Way& way : ways) {
    way.runs = way.runs && !found;
    found |= way.runs;
  }
  return ways;
}

}  // namespace nvx
