#include "group/device/block_budget.h"

#include <algorithm>
#include <cstdlib>
#include <map>
#include <set>
#include <string_view>
#include <utility>
#include <vector>

#include "base/log.h"
#include "base/mutex.h"
#include "kernel/gpu/residency.h"
#include "memory/driver/gpu_info.h"

namespace nvx {
namespace {

/// A rank's report of its GPU, before the channel's shape is decided. Fixed layout; comes from peers.
struct BlockInfo {
  static constexpr uint32_t kMagic = 0x6578766e;  // "nvxe"
  uint32_t magic = kMagic;
  int32_t rank = -1;
  int32_t device = -1;
  int32_t resident = 0;  // blocks that are resident at once
  std::array<uint8_t, 16> uuid{};
  ArenaId process;          // of the rank's process
  uint64_t arena_free = 0;  // bytes
  uint32_t wanted = 0;      // blocks
  uint32_t first_epoch = 0;
  uint32_t reserved_blocks = 0;  // by its process for other groups, on this GPU
  uint32_t sharers = 1;          // processes that may use the GPU
  uint32_t link = 0;             // a GpuLink
  uint32_t kind = 0;             // of GPU and driver

  /// Whether both ranks' kernels run on one GPU. Without UUIDs, the process and the device index identify it.
  bool same_gpu(const BlockInfo& other) const {
    if (uuid != decltype(uuid){}) return uuid == other.uuid;
    return process == other.process && device == other.device;
  }
};
static_assert(sizeof(BlockInfo) == 80);

/// Each GPU once, in the order of its first rank: the same on every rank. The process with the fewest free blocks
/// counts.
std::vector<kernel::GpuCapacity> capacities_of(const std::vector<BlockInfo>& infos) {
  std::vector<kernel::GpuCapacity> capacities;
  std::vector<const BlockInfo*> gpus;
  for (const BlockInfo& info : infos) {
    const auto known = std::ranges::find_if(gpus, [&](const BlockInfo* g) { return g->same_gpu(info); });
    const size_t index = size_t(known - gpus.begin());
    if (known == gpus.end()) {
      gpus.push_back(&info);
      capacities.push_back({info.resident, 0});
    }
    kernel::GpuCapacity& capacity = capacities[index];
    const auto beside = [&](const BlockInfo& other) { return other.process == info.process && other.same_gpu(info); };
    capacity = {std::min(capacity.resident, int(info.resident)),
                std::max(capacity.ranks, uint32_t(std::ranges::count_if(infos, beside))),
                std::max(capacity.reserved, info.reserved_blocks), std::max(capacity.processes, info.sharers)};
  }
  return capacities;
}

using Gpu = std::pair<ArenaId, int>;

/// The use of a GPU by this process's groups; exists while blocks are reserved there.
struct GpuUsage {
  uint32_t reserved = 0;
  std::set<ArenaId> here, elsewhere;  // the arenas of ranks of groups on this GPU and on others: one a process
};

/// All GPUs of this process, including simulated ones of tests.
struct Registry {
  Mutex mutex;
  std::map<Gpu, GpuUsage> usages GUARDED_BY(mutex);
  std::map<Gpu, std::set<std::pair<const void*, const StreamsInUse*>>> streams GUARDED_BY(mutex);
  // Of too few connections: for ranks that are threads, and for groups.
  std::set<Gpu> warned_of_ranks GUARDED_BY(mutex), warned_of_streams GUARDED_BY(mutex);
};

Registry& registry() {
  static auto* const kRegistry = new Registry;  // groups may outlive static objects
  return *kRegistry;
}

/// Whether this process has that rank on this GPU.
bool is_here(const PeerMappings& mappings, int rank) {
  return mappings.peer(rank).same_gpu && mappings.peer(rank).kind == ShareKind::kPointer;
}

/// Whether this rank reports for all ranks of the group that this process has on this GPU: it is the first of them.
bool reports_for_process(const PeerMappings& mappings, int rank) {
  for (int r = 0; r < rank; ++r) {
    if (is_here(mappings, r)) return false;
  }
  return true;
}

uint32_t ranks_here(const PeerMappings& mappings, int ranks) {
  uint32_t n = 0;
  for (int r = 0; r < ranks; ++r) n += is_here(mappings, r);
  return n;
}

/// The processes that may use this rank's GPU, of those that share a group with this process, this group's included.
uint32_t sharers(const PeerMappings& mappings, const ChannelOptions& options, const ArenaId& process) {
  MutexLock lock(registry().mutex);
  GpuUsage& usage = registry().usages[{process, options.device}];
  for (int r = 0; r < options.ranks; ++r) {
    const DevicePeer& peer = mappings.peer(r);
    (peer.same_gpu ? usage.here : usage.elsewhere).insert(peer.arena);
  }
  const uint32_t here = uint32_t(usage.here.size()), known = here + uint32_t(usage.elsewhere.size());
  return here == 1 ? 1 : here + (options.processes - std::min(options.processes, known));
}

/// The blocks that the options request, over this link.
uint32_t blocks_over(GpuLink link, const ChannelOptions& options) {
  if (options.blocks) return options.blocks;
  return std::max(uint32_t(options.tuning.of(Tune::kBlocks, size_t(options.ranks), link)), 1u);
}

uint32_t most_wanted(const ChannelOptions& options) {
  uint32_t most = 0;
  for (size_t link = 0; link < kGpuLinks; ++link) most = std::max(most, blocks_over(GpuLink(link), options));
  return most;
}

constexpr const char *kConnections = "CUDA_DEVICE_MAX_CONNECTIONS", *kLoading = "CUDA_MODULE_LOADING";
constexpr int kMostConnections = 32, kUnsetConnections = 8;  // CUDA's; all streams of the process share the connections

std::string is(const char* name, const char* set) { return std::string(name) + " is " + (set ? set : "not set"); }
std::string set_to(const char* name, const std::string& value) {
  return std::string(". Next: set ") + name + "=" + value + " in the environment before CUDA is initialized";
}

/// Warns once per GPU, since CUDA reads the variables only at initialization.
void warn_of_shared_gpu(const PeerMappings& mappings, const ChannelOptions& options, const ArenaId& process) {
  const uint32_t here = ranks_here(mappings, options.ranks);
  const std::string warnings[] = {connections_warning(here, std::getenv(kConnections)),
                                  eager_loading_warning(here, std::getenv(kLoading))};
  if (warnings[0].empty() && warnings[1].empty()) return;
  {
    MutexLock lock(registry().mutex);
    if (!registry().warned_of_ranks.insert({process, options.device}).second) return;
  }
  for (const std::string& warning : warnings) {
    if (!warning.empty()) NVX_LOG(kWarn, "GPU %d: %s", options.device, warning.c_str());
  }
}

}  // namespace

BlockReservation::BlockReservation(const ArenaId& process, int device,
                                   const std::function<uint32_t(uint32_t)>& how_many)
    : process_(process), device_(device) {
  MutexLock lock(registry().mutex);
  uint32_t& reserved = registry().usages[{process_, device_}].reserved;
  before_ = reserved;
  blocks_ = how_many(before_);
  reserved += blocks_;
}

BlockReservation& BlockReservation::operator=(BlockReservation&& other) noexcept {
  if (this == &other) return *this;
  release();
  process_ = other.process_, device_ = other.device_, before_ = other.before_;
  blocks_ = std::exchange(other.blocks_, 0);
  return *this;
}

void BlockReservation::release() {
  if (blocks_ == 0) return;
  MutexLock lock(registry().mutex);
  const auto it = registry().usages.find({process_, device_});
  it->second.reserved -= std::exchange(blocks_, 0);
  if (it->second.reserved == 0) registry().usages.erase(it);
}

StreamsInUse::~StreamsInUse() {
  MutexLock lock(registry().mutex);
  const auto it = registry().streams.find(gpu_);
  if (it == registry().streams.end()) return;
  for (const void* stream : known_) it->second.erase({stream, this});
}

void StreamsInUse::add(const void* stream) {
  known_.push_back(stream);
  std::string warning;
  {
    MutexLock lock(registry().mutex);
    auto& all = registry().streams[gpu_];
    all.insert({stream, this});
    std::set<const void*> streams;
    std::set<const StreamsInUse*> groups;
    for (const auto& [used, by] : all) streams.insert(used), groups.insert(by);
    warning = connections_warning_for(groups.size(), streams.size(), std::getenv(kConnections));
    if (warning.empty() || registry().warned_of_ranks.contains(gpu_)) return;
    if (!registry().warned_of_streams.insert(gpu_).second) return;
  }
  NVX_LOG(kWarn, "GPU %d: %s", gpu_.second, warning.c_str());
}

std::string connections_warning(uint32_t ranks, const char* set) {
  if (ranks < 2 || (set && std::atoi(set) >= kMostConnections)) return "";
  return std::to_string(ranks) + " ranks of this process share it, and " + is(kConnections, set) +
         ": the hardware may queue one rank's kernel behind another's that waits for it, until both time out" +
         set_to(kConnections, std::to_string(kMostConnections));
}

std::string eager_loading_warning(uint32_t ranks, const char* set) {
  if (ranks < 2 || (set && std::string_view(set) == "EAGER")) return "";
  return is(kLoading, set) + ", and " + std::to_string(ranks) + " ranks of this process share it" +
         ": the first launch of any other kernel loads it, which may wait for a rank's kernel that waits for the "
         "launching rank, until it times out" +
         set_to(kLoading, "EAGER");
}

std::string connections_warning_for(size_t groups, size_t streams, const char* set) {
  const int connections = set ? std::clamp(std::atoi(set), 1, kMostConnections) : kUnsetConnections;
  if (groups < 2 || streams <= size_t(connections)) return "";
  const std::string one_order = "call the groups in one order on all ranks";
  return std::to_string(groups) + " groups of this process use " + std::to_string(streams) +
         " of its streams, more than the " + std::to_string(connections) + " hardware queues, and " +
         is(kConnections, set) +
         ": where ranks call groups in different orders, the hardware may queue a kernel behind one that waits for it, "
         "until both time out" +
         (connections < kMostConnections ? set_to(kConnections, std::to_string(kMostConnections)) + ", or " + one_order
                                         : ". Next: " + one_order);
}

/// Processes may set up several groups at once. Before a process publishes its BlockInfo, its first rank on a GPU
/// claims all blocks that its ranks of the group can get there. So of two groups that share a process, one counts the
/// other in full, and together they never get more blocks than the process's part of the GPU has.
BlockGrant reserve_blocks(Bootstrap& bootstrap, const PeerMappings& mappings, const ChannelOptions& options,
                          const GpuToShare& gpu) {
  BlockInfo info;
  info.rank = options.rank;
  info.device = options.device;
  info.resident = gpu.resident;
  info.uuid = gpu.uuid;
  info.process = gpu.process;
  info.arena_free = mappings.arena().room();
  info.wanted = most_wanted(options);
  info.link = uint32_t(gpu.link);
  info.kind = gpu.kind;
  info.first_epoch = options.first_epoch;
  info.sharers = sharers(mappings, options, gpu.process);
  BlockGrant grant;
  if (reports_for_process(mappings, options.rank)) {
    grant.claim = BlockReservation(gpu.process, options.device, [&](uint32_t before) {
      const kernel::GpuCapacity capacity{gpu.resident, ranks_here(mappings, options.ranks), before, info.sharers};
      return std::min(kernel::share_of(capacity), info.wanted) * capacity.ranks;
    });
    info.reserved_blocks = grant.claim.before();
  }
  const auto infos = read_infos<BlockInfo>(bootstrap.all_gather(bytes_of(info)), options.name);
  grant.arena_free = UINT64_MAX;
  uint32_t wanted = info.wanted;
  for (size_t r = 0; r < infos.size(); ++r) {
    const bool alike =
        infos[r].first_epoch == info.first_epoch && infos[r].wanted > 0 && infos[r].link < uint32_t(kGpuLinks);
    if (!alike) throw of_another_version(options.name(int(r)));
    const auto in_arena = [&](const BlockInfo& other) {
      return other.process == infos[r].process && other.device == infos[r].device;
    };
    grant.arena_free =
        std::min(grant.arena_free, infos[r].arena_free / uint64_t(std::ranges::count_if(infos, in_arena)));
    wanted = std::min(wanted, infos[r].wanted);
    if (int(r) < options.rank && infos[r].kind == gpu.kind) grant.first_of_kind = false;
    grant.link = std::max(grant.link, GpuLink(infos[r].link));
  }
  wanted = std::min(wanted, blocks_over(grant.link, options));
  kernel::BlockAgreement agreed = kernel::agree_on_blocks(capacities_of(infos), wanted);
  NVX_CHECK(agreed.blocks > 0, agreed.why_fewer +
                                   ", so the ranks would wait for each other: put fewer ranks on it, or "
                                   "destroy groups that are no longer needed");
  if (reports_for_process(mappings, options.rank)) warn_of_shared_gpu(mappings, options, gpu.process);
  grant.blocks = agreed.blocks;
  grant.why_fewer = std::move(agreed.why_fewer);
  grant.reservation = BlockReservation(gpu.process, options.device, [&](uint32_t) { return grant.blocks; });
  return grant;
}

}  // namespace nvx
