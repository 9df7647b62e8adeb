#include "group/device/device_communicator.h"

#include <algorithm>
#include <set>
#include <thread>

#include "base/config.h"
#include "base/contain.h"
#include "base/log.h"
#include "base/text.h"
#include "group/core/core.h"
#include "group/core/thread_pool.h"
#include "group/device/device_pools.h"
#include "group/device/kernel_executor.h"
#include "group/device/rdma_trial.h"
#include "group/setup/store_bootstrap.h"
#include "group/setup/store_setup.h"
#include "kernel/gpu/launch_cuda.h"
#include "memory/gpu/device_arena.h"
#include "net/ucx/ucx.h"

namespace nvx {
namespace {

/// Whether any kernel may be running. Replays of graphs are not announced, and only the driver knows the end of
/// signals: until the end it is not asked, as it may hold a lock over a launch that waits for them. So the peers of a
/// group that has had either are watched until its end.
bool may_run(const KernelExecutor& kernels) {
  if (kernels.finished() != kernels.launched()) return true;
  const bool unseen = kernels.may_be_replayed() || kernels.has_signals();
  return (unseen && !ThreadPool::instance().stopping()) || !kernels.signals_have_ended();
}

std::chrono::milliseconds bootstrap_timeout(const Waits& waits) {
  return waits.timeout().count() > 0 ? waits.timeout() : std::chrono::hours(24);
}

/// The most processes of this host that a group of this process has had, including this one.
std::atomic<uint32_t> most_processes{0};

bool is_new_reason(const std::string& what) {
  static Mutex mutex;
  static auto* const kLogged = new std::set<std::string>;
  MutexLock lock(mutex);
  return kLogged->insert(what).second;
}

uint32_t processes_here(const Members& members) {
  std::set<ArenaId> processes;
  for (const int rank : members.ranks_of_host()) processes.insert(members.topology.ranks[size_t(rank)].arena);
  return uint32_t(processes.size());
}

}  // namespace

DeviceCommunicator::DeviceCommunicator(Core& core)
    : core_(core), members_(core.members), ranks_(core.members.ranks_of_host()) {
  const uint32_t here = processes_here(members_);
  for (uint32_t most = most_processes; most < here && !most_processes.compare_exchange_weak(most, here);) continue;
}

DeviceCommunicator::~DeviceCommunicator() = default;

bool DeviceCommunicator::open(Store& store, int device, const std::shared_ptr<StreamOrder>& order) {
  if (opened()) return true;
  MutexLock lock(mutex_);
  if (first_device_ >= 0) return opened() != nullptr;
  first_device_ = device;
  std::unique_ptr<KernelExecutor> executor;
  const auto carry_on_without = [&](const Error& error) {
    // A rank that refuses reports it to all, and one rank of each host warns, once. A rank that timed out, or was
    // interrupted, does not know the decision of the others.
    const Code code = error.code();
    const bool alone = code == Code::kTimeout || code == Code::kInterrupted || code == Code::kPeerDied;
    const bool warns = alone || (members_.local_rank() == 0 && is_new_reason(error.reason()));
    if (logs(kernel::built_with_cuda() && warns ? LogLevel::kWarn : LogLevel::kInfo))
      log_line("group %s: collectives on device %d go through host memory%s: %s", members_.name.c_str(), device,
               spans_hosts() ? " between hosts, though the GPUs are in one NVLink domain" : "", error.reason().c_str());
    if (alone) (void)core_.failures.fail(with_context(error.failure(), "while the ranks opened their devices"));
  };
  try {
    executor = make_executor(store, device, order);
  } catch (const Error& error) {
    carry_on_without(error);
  }
  try {
    if (members_.topology.hosts.size() > 1 && !spans_hosts()) {
      agree_on_kernels(store, /*has_one=*/executor != nullptr);
      agree_on_rdma(store, device);
    }
    if (executor) contain("opening the copy engines for messages", [&] { core_.copies = make_copies(*executor); });
    executor_ = std::move(executor);
    watcher_ = std::make_shared<Poller>(
        [this, owner = core_.owner()] {
          const std::shared_ptr<const void> group = owner.lock();
          return Poller::Seen{group && poll(), {}};
        },
        Poller::Pace{kWatchInterval, kWatchInterval});
  } catch (const Error& error) {
    carry_on_without(error);
    // A rank that does not know the agreement of the others cannot continue with them.
    if (error.code() != Code::kInvalid) (void)core_.failures.fail(error.failure());
  }
  opened_.store(executor_.get(), std::memory_order_release);
  core_.copies_open.store(core_.copies.get(), std::memory_order_release);
  return executor_ != nullptr;
}

StoreBootstrap DeviceCommunicator::bootstrap_of_all(Store& store, const std::string& what) {
  return {store,
          {.prefix = members_.key(what),
           .rank = members_.rank,
           .ranks = members_.size(),
           .timeout = bootstrap_timeout(core_.waits),
           .watch = [this](int rank) { check_while_waiting(rank); }}};
}

/// Throws Error if a rank does not take part.
void DeviceCommunicator::agree_on_rdma(Store& store, int device) {
  const auto& hosts = members_.topology.hosts;
  net::Messenger& messenger = core_.port->messenger();
  RdmaTrialSetting setting;
  setting.device = device;
  setting.registry = &DeviceRegistry::instance();
  setting.name = [this](int rank) { return members_.topology.describe(rank); };
  if (members_.kernels != Kernels::kIfFast) setting.slack = bootstrap_timeout(core_.waits);
  setting.obstacle = messenger.use_device_memory({});
  if (members_.facts.world != members_.facts.rails * hosts.size()) {
    setting.obstacle = "hosts have different numbers of ranks";
  } else {
    const auto next_host = size_t(members_.topology.host_of[size_t(members_.rank)] + 1) % hosts.size();
    setting.next = hosts[next_host][size_t(members_.local_rank())];
    std::vector<AddressPrefix> sources;
    for (const std::vector<int>& host : hosts) {
      const Hello& there = members_.topology.ranks[size_t(host[size_t(members_.local_rank())])];
      std::ranges::copy(sources_of(there, members_.topology.ranks[size_t(members_.rank)]), std::back_inserter(sources));
    }
    setting.open_link = [store_host = store.host(), sources] {
      auto link = net::open_ucx(store_host);
      link->admit(sources);
      return link;
    };
  }
  StoreBootstrap bootstrap = bootstrap_of_all(store, "device/rdma");
  why_no_rdma_ = nvx::why_no_rdma(bootstrap, setting);
  NVX_LOG(kInfo, "group %s: between hosts, %s%s", members_.name.c_str(),
          why_no_rdma_.empty() ? "all_gather goes from device to device memory (GPUDirect)"
                               : "device tensors go through pinned host memory: ",
          why_no_rdma_.c_str());
  if (!why_no_rdma_.empty()) return;
  const GrowingRegion& region = *setting.registry->pool(device).region();
  (void)messenger.use_device_memory({reinterpret_cast<const std::byte*>(region.base()), region.room()});
}

std::shared_ptr<std::byte> DeviceCommunicator::allocate_for_rdma(size_t bytes) const {
  DevicePool& pool = DeviceRegistry::instance().pool(opened()->resources().options().device);
  return {reinterpret_cast<std::byte*>(pool.allocate(bytes)),
          [&pool](std::byte* at) { (void)pool.free(reinterpret_cast<DevicePtr>(at)); }};
}

/// The schedules between hosts depend on the steps inside them. Throws Error, on all ranks, if a host has no kernels.
void DeviceCommunicator::agree_on_kernels(Store& store, bool has_one) {
  const std::byte mine{has_one};
  const std::vector<std::vector<std::byte>> all = bootstrap_of_all(store, "device/hosts").all_gather({&mine, 1});
  for (size_t r = 0; r < all.size(); ++r) {
    if (all[r].size() == 1 && all[r][0] == std::byte{1}) continue;
    throw Error(Code::kInvalid, "nvx: the host of " + members_.topology.describe(int(r)) + " cannot use kernels",
                "see the log of that rank");
  }
}

bool DeviceCommunicator::agree_to_connect(Store& store, const std::string& why_not) {
  constexpr std::chrono::milliseconds kMost{10'000};
  constexpr size_t kMostWords = 1024;
  const std::string come = members_.key("connect"), refusal = members_.key("connect/refused"),
                    decided = members_.key("connect/decided");
  if (!why_not.empty()) {
    const std::string note = members_.topology.describe(members_.rank) + " failed: " + without_name(why_not);
    store.set(refusal, {note.begin(), note.end()});
    throw Error(Code::kInvalid, why_not);
  }
  store.set(come + "/" + std::to_string(members_.rank), {1});
  store.add(come, 1);
  // A missing rank may already be in a call that waits for this one, and must not time out first.
  const std::chrono::milliseconds timeout =
      core_.waits.timeout().count() > 0 ? std::min(core_.waits.timeout() / 4, kMost) : kMost;
  const Deadline deadline = Deadline::after(timeout), last = Deadline::after(2 * timeout);
  const std::chrono::microseconds pause(2000 + 200 * members_.size());
  for (int checked = members_.rank;; std::this_thread::sleep_for(pause)) {
    // One rank decides for all, also for ranks that come later. Otherwise some would wait for others without end.
    if (const auto all = store.get(decided, std::chrono::milliseconds(0))) {
      if (all->size() == 1 && all->front() != 0) return true;
      warn_of_missing(store, come, deadline);
      return false;
    }
    const bool all = store.add(come, 0) >= members_.size();
    if ((all || deadline.passed(Clock::now())) && store.add(members_.key("connect/decide"), 1) == 1) {
      store.set(decided, {uint8_t(all)});
      continue;
    }
    if (const auto note = store.get(refusal, std::chrono::milliseconds(0)))
      throw Error(Code::kPeerFailed,
                  "nvx: not all ranks can open the devices that device_id names: " +
                      printable(std::string(note->begin(), note->begin() + std::min(note->size(), kMostWords))));
    if (last.passed(Clock::now()))
      throw Error(Code::kTimeout, "nvx: timed out after " + seconds(last) +
                                      ", while the ranks agreed to open the devices that device_id names");
    checked = (checked + 1) % members_.size();
    if (checked != members_.rank) check_while_waiting(checked);
  }
}

/// Runs during waits for a rank in the store. Throws Error if the wait has become pointless.
void DeviceCommunicator::check_while_waiting(int writer) {
  FailureState& failures = core_.failures;
  (void)failures.check_reports();
  if (failures.check_interrupt() || failures.failed()) throw Error(failures.failure());
  if (const Status alive = failures.check_alive(); !alive.ok()) throw Error(alive);
  check_for_deaths(core_.options, writer);
}

void DeviceCommunicator::warn_of_missing(Store& store, const std::string& come, const Deadline& deadline) {
  std::vector<std::string> missing;
  for (int r = 0; r < members_.size(); ++r) {
    if (!store.get(come + "/" + std::to_string(r), std::chrono::milliseconds(0)))
      missing.push_back(members_.topology.describe(r));
  }
  NVX_LOG(
      kWarn,
      "group %s: this rank passed device_id to init_process_group, but within %.0f s %s did not: the first collective "
      "opens the devices instead. Next: pass device_id on all ranks, or on none",
      members_.name.c_str(), deadline.elapsed_s(), missing.empty() ? "all other ranks" : joined(missing).c_str());
}

/// Throws Error, and then on all ranks unless one has exited.
std::unique_ptr<KernelExecutor> DeviceCommunicator::make_executor(Store& store, int device,
                                                                  const std::shared_ptr<StreamOrder>& order) {
  const int host = members_.topology.host_of[size_t(members_.rank)];
  const std::string where = members_.key("device/" + (spans_hosts() ? "domain" : std::to_string(host)));
  const std::vector<int> ranks = ranks_;
  const int own = kernel_rank_of(members_.local_rank());
  const auto name_of = [ranks](int s) { return nvx::of_rank(ranks[size_t(s)]); };
  StoreBootstrap bootstrap(store, {.prefix = where,
                                   .rank = own,
                                   .ranks = int(ranks.size()),
                                   .timeout = bootstrap_timeout(core_.waits),
                                   .name = name_of,
                                   .watch = [this, ranks](int s) { check_while_waiting(ranks[size_t(s)]); }});
  ChannelOptions options;
  options.group = members_.name;
  options.rank = own;
  options.ranks = int(ranks.size());
  options.device = device;
  options.host = 1 + uint64_t(host);
  options.processes = most_processes + uint32_t(ranks.size() - members_.ranks_of_host().size());
  if (config().nvls) options.multicast_bytes = kMulticastBytes;
  options.busy = bootstrap_timeout(core_.waits);
  if (members_.kernels == Kernels::kIfFast) options.slowest = std::chrono::milliseconds(1);
  options.check_peers = [this, ranks, turn = size_t(own)]() mutable {
    turn = (turn + 1) % ranks.size();
    check_while_waiting(ranks[turn]);
  };
  options.force = members_.facts.force;
  options.tuning = members_.facts.tuning;
  options.first_epoch = members_.first_epoch;
  options.on_launch = [this] { (void)watcher_->wake(); };
  options.peers_gone = members_.all_peers_gone_keeping_pads();
  if (spans_hosts())
    options.peers_gone = [] { return false; };  // a rank of another host cannot report it: never reused
  options.pool_sizes = {
      [this](uint64_t bytes) { members_.own_pad().header().pool_grown.store(bytes, std::memory_order_release); },
      [this](int s) { return is_remote(s) ? 0 : pool_of(members_.local_rank_of(ranks_[size_t(s)])); }};
  options.name = name_of;
  options.rank_of = [ranks](int s) { return ranks[size_t(s)]; };
  options.describe = [topology = members_.topology, ranks](int s) { return topology.describe(ranks[size_t(s)]); };
  try {
    const auto launcher = std::make_shared<kernel::KernelLauncher>();
    std::vector<kernel::KernelAttributes> attributes;
    NVX_LOG(kInfo, "group %s: loading kernels on device %d; if the build has none for this GPU, CUDA compiles them",
            members_.name.c_str(), device);
    if (const Status loaded = launcher->attributes(&attributes); !loaded.ok()) throw Error(loaded);
    DeviceRegistry& registry = DeviceRegistry::instance();
    options.place_of = [&pool = registry.made_pool(device)](const std::byte* at, size_t bytes) -> uint64_t {
      const DevicePool* made = pool.load(std::memory_order_acquire);
      const auto offset = made ? made->offset_of(at, bytes) : std::nullopt;
      return offset ? 1 + *offset : 0;
    };
    return std::make_unique<KernelExecutor>(registry, bootstrap, options, launcher, order);
  } catch (const Error& error) {
    contain("reporting why there are no kernels", [&] { bootstrap.give_up(failure_of(error)); });
    throw;
  }
}

std::shared_ptr<DeviceCopies> DeviceCommunicator::make_copies(const KernelExecutor& executor) const {
  const ChannelResources& resources = executor.resources();
  DeviceRegistry& registry = DeviceRegistry::instance();
  DeviceCopies::Setting setting{.driver = registry.driver(),
                                .device = resources.options().device,
                                .timeout = registry.timeout(),
                                .arena = &resources.mappings().arena(),
                                .place_of = resources.options().place_of,
                                .peers = {}};
  for (int s = 0; s < members_.local_ranks(); ++s) {
    const DevicePeer& peer = resources.mappings().peer(kernel_rank_of(s));
    setting.peers.push_back({peer.theirs, peer.mine, peer.bytes, registry.find({peer.arena, peer.kind, setting.device}),
                             resources.peer_pool(kernel_rank_of(s))});
  }
  return DeviceCopies::of(std::move(setting));
}

void DeviceCommunicator::update_pools() {
  if (KernelExecutor* const executor = opened()) executor->update_pools();
}

std::optional<PoolStats> DeviceCommunicator::pool_stats() const {
  const KernelExecutor* const executor = opened();
  if (!executor) return {};
  return executor->resources().pool_stats(executor->direct());
}

std::shared_ptr<PeerPool> DeviceCommunicator::peer_pool(int local_rank) const {
  const KernelExecutor* const executor = opened();
  return executor ? executor->resources().peer_pool(kernel_rank_of(local_rank)) : nullptr;
}

/// The size of the rank's pool, as that rank reports it. 0 if it has left, since its pad may belong to another group.
uint64_t DeviceCommunicator::pool_of(int local_rank) const {
  const kernel::PadHeader& header = members_.pad(local_rank).header();
  const uint64_t grown = header.pool_grown.load(std::memory_order_acquire);
  return header.group == members_.id ? grown : 0;
}

Status DeviceCommunicator::launch(std::span<const Operation* const> operations, const LaunchStream& stream,
                                  const CompletionFlag& completion) {
  NVX_TRY(core_.failures.check_alive());
  NVX_TRY(check_kernels());
  KernelExecutor& executor = *opened();
  const Status status =
      executor.launch(operations, stream, core_.waits.span_of(operations.front()->timeout), completion);
  if (!status.ok() && status.code() != Code::kInvalid) return core_.failures.fail(status.failure());
  const bool is_call = !completion.at && stream.capture == 0;  // otherwise a round of a host proxy, or a graph's
  for (size_t i = 0; status.ok() && is_call && i < operations.size(); ++i)
    core_.status->launched(*operations[i], executor.launched());
  if (status.ok()) (void)watcher_->wake();
  if (core_.failures.failed())
    abort(core_.failures.failure());  // the failure may have aborted before these kernels were launched
  return status;
}

Status DeviceCommunicator::signal(kernel::SignalJob job, const LaunchStream& stream,
                                  std::chrono::milliseconds timeout) {
  NVX_TRY(core_.failures.check_alive());
  NVX_TRY(check_kernels());
  KernelExecutor* const executor = opened();
  if (!executor)
    return {Code::kInvalid, "nvx: signals of symmetric memory need nvx's kernels, and this group has none"};
  job.timeout_ns = uint64_t(std::chrono::nanoseconds(core_.waits.span_of(timeout)).count());
  const Status status = executor->signal(job, stream);
  if (!status.ok() && status.code() != Code::kInvalid) return core_.failures.fail(status.failure());
  if (status.ok()) (void)watcher_->wake();
  if (core_.failures.failed()) abort(core_.failures.failure());  // as in launch()
  return status;
}

const char* DeviceCommunicator::kernel_for(const Operation& operation) const {
  const KernelExecutor* const executor = opened();
  return executor ? kernel::name(executor->choose(operation).algorithm) : "none";
}

uint64_t DeviceCommunicator::launched() const {
  const KernelExecutor* const executor = opened();
  return executor ? executor->launched() : 0;
}

uint64_t DeviceCommunicator::finished() const {
  const KernelExecutor* const executor = opened();
  return executor && !core_.failures.forked() ? executor->finished() : 0;
}

bool DeviceCommunicator::is_quiet() const {
  const KernelExecutor* const executor = opened();
  return !executor || core_.failures.forked() || executor->settled();
}

Status DeviceCommunicator::check_kernels() {
  if (core_.failures.forked()) return core_.failures.check_alive();
  if (core_.failures.failed()) return core_.failures.failure();
  KernelExecutor* const executor = opened();
  if (!executor) return {};
  const Status verdict = executor->verdict();
  return verdict.ok() ? Status() : core_.failures.fail(verdict.failure());
}

/// Whether kernels in flight remain. No kernel detects a dead peer, so this checks for dead peers and for verdicts.
bool DeviceCommunicator::poll() {
  KernelExecutor& kernels = *opened();
  check_kernels_and_peers(kernels);
  if (core_.failures.failed()) {
    abort(core_.failures.failure());  // the failure may have aborted before these kernels were launched
    return false;
  }
  const bool more = may_run(kernels);
  core_.status->completed(kernels.finished());  // not before: the last check must see the last end
  return more;
}

void DeviceCommunicator::check_kernels_and_peers(KernelExecutor& kernels) {
  (void)check_kernels();
  if (!core_.failures.failed()) (void)core_.failures.fail_as_reported();
  for (int s = 0; s < members_.local_ranks() && !core_.failures.failed(); ++s) {
    members_.warn_if_stopped(s);
    if (waits_for_missing_rank(kernels, s)) core_.failures.fail_as_gone(s);
  }
  if (spans_hosts() && !core_.failures.failed() && !core_.failures.closed()) check_remote_ranks();
}

/// Whether an operation in flight waits for this rank although its process is dead, or it has left with fewer
/// operations than were launched here. Only the device counts replays.
bool DeviceCommunicator::waits_for_missing_rank(const KernelExecutor& kernels, int local_rank) const {
  if (local_rank == members_.local_rank()) return false;
  const kernel::PadHeader& header = members_.pad(local_rank).header();
  if (header.group == members_.id && header.presence.load() == kernel::Presence::kLeft)
    return int64_t(kernels.launched() - header.launched.load(std::memory_order_acquire)) > 0 ||
           (kernels.may_be_replayed() &&
            int32_t(kernels.begun_epoch() - header.ended_epoch.load(std::memory_order_acquire)) > 0);
  return members_.dead(local_rank);
}

void DeviceCommunicator::abort(const Status& why) {
  KernelExecutor* const kernels = opened();
  if (!kernels) return;
  for (int s = 0; s < members_.local_ranks(); ++s) {
    if (s != members_.local_rank() && members_.dead(s)) kernels->note_dead(kernel_rank_of(s));
  }
  if (spans_hosts()) note_dead_remote_ranks(*kernels);
  kernels->abort(why);
}

bool DeviceCommunicator::finalize() {
  KernelExecutor* const kernels = opened();
  if (!kernels) return true;
  check_kernels_and_peers(*kernels);
  const bool quiet = kernels->finalize();
  kernel::PadHeader& own = members_.own_pad().header();
  own.launched.store(kernels->launched(), std::memory_order_release);
  own.ended_epoch.store(kernels->ended_epoch(), std::memory_order_release);
  return quiet;
}

void DeviceCommunicator::close() {
  opened_.store(nullptr, std::memory_order_release);
  executor_.reset();
}

void DeviceCommunicator::leave_to_parent() { (void)executor_.release(); }

}  // namespace nvx
