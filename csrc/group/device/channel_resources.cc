#include "group/device/channel_resources.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <set>
#include <utility>

#include "base/contain.h"
#include "base/error.h"
#include "base/log.h"
#include "base/per_process.h"
#include "group/device/gpu_link.h"
#include "group/plan/device_plan.h"
#include "kernel/gpu/residency.h"
#include "memory/driver/gpu_info.h"
#include "memory/driver/thread_call.h"
#include "memory/gpu/device_work.h"

namespace nvx {
namespace {

using kernel::DevicePad;
using kernel::DeviceState;
using kernel::Part;

/// A rank's pad, as peers find it.
struct PadInfo {
  static constexpr uint32_t kMagic = 0x7078766e;  // "nvxp"
  uint32_t magic = kMagic;
  int32_t rank = -1;
  uint64_t offset = 0;  // in the rank's arena
};
static_assert(sizeof(PadInfo) == 16);

/// A rank's pool, as peers request it once it exists.
struct PoolInfo {
  static constexpr uint32_t kMagic = 0x6c78766e;  // "nvxl"
  uint32_t magic = kMagic;
  int32_t rank = -1;
  int32_t device = -1;
  uint32_t reserved = 0;
  ArenaId process;
  char socket[48] = {};
};
static_assert(sizeof(PoolInfo) == 80);

/// Whether this rank maps the peer's arena as device memory. The trial of that mapping also covers the peer's pool.
bool shares_virtual_memory(const DevicePeer& peer) {
  return peer.kind == ShareKind::kFabric || peer.kind == ShareKind::kFd || peer.kind == ShareKind::kPointer;
}

std::byte* pointer(DevicePtr at) { return reinterpret_cast<std::byte*>(at); }

void warn_if_not_shown(const DeviceProperties& properties) {
  static std::atomic<bool> warned{false};
  if (is_shown(properties.architecture, properties.cuda) || warned.exchange(true)) return;
  NVX_LOG(kWarn,
          "kernels have not been tested on sm_%d (%s) with a driver for CUDA %d.%d; a trial precedes their use. Next: "
          "scripts/gpu_evidence.py tests this machine",
          properties.architecture, properties.name.c_str(), properties.cuda / 1000, properties.cuda % 1000 / 10);
}

void warn_if_kernels_are_limited(const DeviceProperties& properties) {
  static std::atomic<bool> warned{false};
  if (!properties.limits_kernels || warned.exchange(true)) return;
  NVX_LOG(
      kWarn,
      "%s (%s) drives a display, and its driver may end a kernel that waits some seconds for a late rank: then this "
      "process loses its CUDA context. Next: move the display to another GPU, or set NVX_KERNELS=0",
      properties.name.c_str(), properties.bus.c_str());
}

}  // namespace

ChannelResources::ChannelResources(DeviceRegistry& registry, Bootstrap& bootstrap, const ChannelOptions& options,
                                   kernel::KernelLauncher& launcher)
    : registry_(registry), options_(options) {
  try {
    set_up(bootstrap, launcher);
  } catch (const std::exception& error) {
    release_memory();
    contain("notifying the other ranks that GPUs cannot be used", [&] { bootstrap.give_up(failure_of(error)); });
    const auto* known = dynamic_cast<const Error*>(&error);
    if (known && known->code() == Code::kPeerFailed) throw;
    throw Error(
        reason_for("GPU " + std::to_string(options_.device) + " cannot be used on " + options_.describe(options_.rank),
                   failure_of(error),
                   "scripts/gpu_evidence.py tests this machine's GPUs; the backend \"cpu:nvx,cuda:nccl\" "
                   "uses NCCL for CUDA tensors"));
  }
}

ChannelResources::~ChannelResources() { release_memory(); }

/// Requires that no kernel of this rank accesses the memory; peers may still write to it.
void ChannelResources::release_memory() {
  pools_.reset();  // before the memory that contains its views
  if (multicast_) multicast_->release_when(exported_ ? options_.peers_gone : [] { return true; });
  multicast_.reset();
  if (!span_) return;
  bool hung = false;
  {
    MutexLock lock(writes_->mutex);
    writes_->closed = true;
    hung = writes_->hung;
  }
  const Span span = std::exchange(span_, Span{});
  if (hung) {
    mappings_->arena().quarantine(span);
  } else if (exported_) {
    mappings_->arena().free_when(span, options_.peers_gone);
  } else {
    mappings_->arena().free(span);
  }
}

void ChannelResources::keep(User user) {
  if (!span_) return;
  if (user == User::kKernel) reservation_.keep();
  stop_kernels();
  if (user == User::kReplay) {
    auto stop = [&] {
      MutexLock lock(stop_mutex_);
      return stop_;
    }();
    const auto stopped = stop ? stop->get(Clock::time_point::max()) : std::nullopt;
    if (!stopped || !stopped->fine())
      NVX_LOG(kWarn, "group %s: replays of its graphs on GPU %d may still write to peers: %s", options_.group.c_str(),
              options_.device, stopped ? stopped->why.c_str() : "no thread could be started");
  }
  mappings_->arena().quarantine(std::exchange(span_, Span{}));
  control_->abandon();
  pools_->keep();
  if (multicast_) multicast_->keep();
  keep_until_exit(std::move(mappings_));  // the mappings of peers, to which a hung device may still write
}

void ChannelResources::stop_kernels() {
  MutexLock lock(stop_mutex_);
  if (stop_) return;
  std::optional<ThreadCall<PairVerdict>> begun;
  contain("stopping the kernels of a group", [&] { begun.emplace(mark_failed_); });
  if (begun) stop_.emplace(*begun);
}

/// A function that copies from pinned memory into the state, and may be called when this object has gone.
std::function<PairVerdict()> ChannelResources::state_writer(size_t to, DevicePtr from, size_t bytes) const {
  return [writes = writes_, driver = registry_.driver(), device = options_.device,
          touches = std::vector{mappings_->arena().hold(), control_}, at = state_at() + to, from, bytes,
          timeout = registry_.timeout()]() -> PairVerdict {
    MutexLock lock(writes->mutex);
    if (writes->closed) return {};
    const auto write = [=](DeviceWork& work) { work.copy(at, from, bytes); };
    const PairVerdict wrote = work_now(driver, device, touches, "a copy", write, Deadline::after(timeout));
    writes->hung |= wrote.state == PairState::kHung;
    return wrote;
  };
}

void ChannelResources::set_up(Bootstrap& bootstrap, kernel::KernelLauncher& launcher) {
  NVX_CHECK(uint32_t(options_.ranks) <= kernel::kMostRanks,
            "a channel between GPUs has at most " + std::to_string(kernel::kMostRanks) + " ranks");
  std::vector<kernel::KernelAttributes> attributes;  // loads the kernels before any peer's kernel waits for this rank's
  if (const Status loaded = launcher.attributes(&attributes); !loaded.ok()) throw Error(loaded);
  const int resident = kernel::resident_at_once(attributes);
  constexpr int kTries = 4;  // each failed try finds pairs that kernels cannot use, or a late rank
  std::string why;
  for (int tries = 1; !passes_trial(bootstrap, launcher, open_channel(bootstrap, resident), &why); ++tries) {
    NVX_CHECK(tries < kTries, "the first operations of GPU kernels failed: " + why);
    NVX_LOG(kWarn, "group %s: the first operations of GPU kernels failed, so the GPUs are opened again: %s",
            options_.group.c_str(), why.c_str());
    release_memory();
    exported_ = false;
    mappings_.reset();
    reservation_.release();
  }
  NVX_LOG(kInfo, "group %s: GPU %d, tuned for %s, %u blocks, %u packets, chunks of %u bytes, a pad of %zu KiB%s%s%s",
          options_.group.c_str(), options_.device, name(link_), channel_.shape.blocks, channel_.shape.packets,
          channel_.shape.chunk_bytes, pad_bytes() >> 10, why_fewer_.empty() ? "" : "; ", why_fewer_.c_str(),
          multicast_ ? "; the switch adds sums (NVX_NVLS=1)" : "");
}

/// Sets up and formats the memory that kernels need, on all ranks.
Trial ChannelResources::open_channel(Bootstrap& bootstrap, int resident) {
  mappings_ = std::make_unique<PeerMappings>(registry_, bootstrap, options_);
  multicast_ = mappings_->take_multicast();
  if (options_.multicast_bytes != 0 && !multicast_) give_up_multicast(mappings_->why_no_multicast());
  BlockGrant grant = reserve(bootstrap, resident);
  reservation_ = std::move(grant.reservation);
  why_fewer_ = std::move(grant.why_fewer);
  link_ = grant.link;
  channel_.shape = device_shape(uint32_t(options_.ranks), grant.blocks, pad_budget(grant.arena_free, options_.tuning),
                                options_.tuning);
  channel_.rank = uint32_t(options_.rank);
  Trial trial{.options = options_, .drain_timeout = registry_.timeout(), .multicast = multicast()};
  trial.shares_gpu = shares_gpu();
  trial.first_epoch = options_.first_epoch - trial.epochs();
  take_memory(trial.first_epoch);
  trial.channel = channel_;
  trial.control = &control();
  trial.pads = exchange_pads(bootstrap);
  grant.claim.release();
  trial.buffer = pin("the channel's initial state",
                     std::max(DevicePad{channel_.shape}.offset(Part::kStaging) + DeviceState{channel_.shape}.bytes(),
                              trial_bytes(trial)));
  trial.touches = format(trial);
  exported_ = true;
  connect_pools(bootstrap);  // it also ensures that all pads are formatted
  return trial;
}

/// Whether the trial succeeded for all pairs. Pairs that failed use host memory in the next try.
bool ChannelResources::passes_trial(Bootstrap& bootstrap, kernel::KernelLauncher& launcher, const Trial& trial,
                                    std::string* why) {
  try {
    const TrialVerdict verdict = try_kernels(registry_.driver(), bootstrap, launcher, trial);
    for (int r = 0; r < options_.ranks; ++r) {
      const PairVerdict& pair = verdict.peers[size_t(r)];
      const DevicePeer& peer = mappings_->peer(r);
      if (!pair.fine()) registry_.mark_unusable({peer.arena, peer.kind, options_.device}, pair.why);
    }
    NVX_CHECK(!verdict.wrong, verdict.why);
    if (!verdict.no_multicast.empty()) give_up_multicast(verdict.no_multicast);
    if (!verdict.failed) check_speed(verdict.each);
    *why = verdict.why;
    return !verdict.failed;
  } catch (const Error& error) {
    if (error.code() == Code::kTimeout) keep(User::kKernel);  // the kernel may still write to the memory
    throw;
  }
}

kernel::MulticastView ChannelResources::multicast() const {
  if (!multicast_) return {};
  return {pointer(multicast_->all()), pointer(multicast_->mine()), multicast_->bytes()};
}

/// All ranks do it alike, before the first operation.
void ChannelResources::give_up_multicast(const std::string& why) {
  options_.multicast_bytes = 0;
  if (multicast_) multicast_->release_when(options_.peers_gone);
  multicast_.reset();
  if (options_.rank == 0) NVX_LOG(kWarn, "group %s: NVX_NVLS=1 has no effect: %s", options_.group.c_str(), why.c_str());
}

/// Whether ranks of other processes are on this rank's GPU.
bool ChannelResources::shares_gpu() const {
  for (int r = 0; r < options_.ranks; ++r)
    if (mappings_->peer(r).same_gpu && mappings_->peer(r).kind != ShareKind::kPointer) return true;
  return false;
}

/// Throws Error, on all ranks, if the kernels are too slow to be used.
void ChannelResources::check_speed(std::chrono::microseconds each) const {
  char took[32];
  std::snprintf(took, sizeof took, "%.3g", double(each.count()) / 1e3);
  NVX_LOG(kInfo, "group %s: a small operation by nvx's kernels takes %s ms", options_.group.c_str(), took);
  if (options_.slowest.count() == 0 || each <= options_.slowest) return;
  const bool shared = shares_gpu();
  throw Error(Code::kInvalid,
              std::string("nvx: a small operation by nvx's kernels takes ") + took + " ms" +
                  (shared ? ": processes that share a GPU without MPS take turns on it" : ""),
              std::string(shared ? "start MPS (nvidia-cuda-mps-control -d), or run one process a GPU"
                                 : "check for other work on the group's GPUs") +
                  "; NVX_KERNELS=1 uses kernels however slow they are");
}

/// Agrees on the link between the GPUs, on the number of blocks that fit on every one, and on the free space of the
/// fullest arena.
BlockGrant ChannelResources::reserve(Bootstrap& bootstrap, int resident) {
  const DeviceProperties properties = call_or_throw<DeviceProperties>(
      "querying the GPU's UUID", Deadline::after(registry_.timeout()),
      [driver = registry_.driver(), device = options_.device] { return properties_of(*driver, device); });
  warn_if_kernels_are_limited(properties);
  const auto kind = uint32_t(properties.architecture * 1'000'000 + properties.cuda);
  BlockGrant grant = reserve_blocks(
      bootstrap, *mappings_, options_,
      {registry_.id(), properties.uuid, resident, link_to_peers(*mappings_, options_, registry_.timeout()), kind});
  if (grant.first_of_kind) warn_if_not_shown(properties);
  return grant;
}

std::shared_ptr<DeviceRegion> ChannelResources::pin(const std::string& what, size_t bytes) const {
  return call_or_throw<std::shared_ptr<DeviceRegion>>(
      "pinning " + what, Deadline::after(registry_.timeout()),
      [pinned = registry_.pinned(), device = options_.device, bytes] { return pinned->get(device, bytes); });
}

void ChannelResources::take_memory(uint32_t first_epoch) {
  span_ = mappings_->arena().allocate(pad_bytes() + DeviceState{channel_.shape}.bytes());
  writes_ = std::make_shared<StateWrites>();
  control_ = pin("the channel's control", kernel::control_bytes(channel_.shape.ranks));
  control().begun = first_epoch;
  for (uint64_t& ended : control().ended) ended = kernel::BlockEnd{first_epoch, 0}.word();
  channel_.state = pointer(state_at());
  channel_.control = reinterpret_cast<kernel::Control*>(control_->base());
  channel_.pools = reinterpret_cast<const kernel::PoolView*>(channel_.state + DeviceState{channel_.shape}.views());
  mark_failed_ = state_writer(DeviceState::rank() + offsetof(kernel::RankState, failed),
                              control_->base() + offsetof(kernel::Control, abort), sizeof(uint32_t));
}

/// Each rank publishes where its pad is. The location is checked against the size of the peer's mapping.
std::vector<kernel::PeerPads> ChannelResources::exchange_pads(Bootstrap& bootstrap) {
  PadInfo info;
  info.rank = options_.rank;
  info.offset = span_.offset;
  const auto infos = read_infos<PadInfo>(bootstrap.all_gather(bytes_of(info)), options_.name);
  std::vector<kernel::PeerPads> pads;
  for (size_t r = 0; r < infos.size(); ++r) {
    const DevicePeer& peer = mappings_->peer(int(r));
    const uint64_t offset = infos[r].offset;
    const bool inside = offset <= peer.bytes && pad_bytes() <= peer.bytes - offset && offset % kernel::kCacheLine == 0;
    if (!inside)
      throw Error(Code::kMismatch, "nvx: " + options_.name(int(r)) + " reports a pad outside its GPU memory",
                  kOneVersion);
    pads.push_back({pointer(peer.theirs + offset), pointer(peer.mine + span_.offset)});
  }
  return pads;
}

void ChannelResources::connect_pools(Bootstrap& bootstrap) {
  PoolInfo info;
  info.rank = options_.rank;
  info.device = options_.device;
  info.process = registry_.id();
  put(info.socket, registry_.pool_socket());
  const auto infos = read_infos<PoolInfo>(bootstrap.all_gather(bytes_of(info)), options_.name);
  std::vector<DevicePools::Rank> ranks(infos.size());
  for (size_t r = 0; r < infos.size(); ++r) {
    if (int(r) == options_.rank || !shares_virtual_memory(mappings_->peer(int(r)))) continue;
    ranks[r] = {PoolOwner{infos[r].process, infos[r].device, text_of(infos[r].socket)},
                &kernel::pool_views(&control())[r], options_.describe(int(r))};
  }
  const auto write = state_writer(DeviceState{channel_.shape}.views(), control_->base() + sizeof(kernel::Control),
                                  infos.size() * sizeof(kernel::PoolView));
  const auto show_all = [write, group = options_.group] {
    if (const PairVerdict wrote = write(); !wrote.fine())
      NVX_LOG(kWarn, "group %s: transfers stay staged: %s", group.c_str(), wrote.why.c_str());
  };
  pools_ = std::make_unique<DevicePools>(registry_, options_.device, options_.group, std::move(ranks),
                                         options_.pool_sizes, show_all);
}

/// Formats a pad wherever a peer writes for this rank: in the arena, in its fallback, or in both. Returns the memory
/// that kernels will access.
std::vector<std::shared_ptr<DeviceRegion>> ChannelResources::format(const Trial& trial) {
  const size_t pad = DevicePad{channel_.shape}.offset(Part::kStaging), state = DeviceState{channel_.shape}.bytes();
  const std::shared_ptr<DeviceRegion>& image = trial.buffer;
  kernel::format_pad(channel_.shape, trial.first_epoch, 0, image->host());
  kernel::format_state(channel_.shape, trial.first_epoch, 0, trial.pads.data(), image->host() + pad);
  std::set<DevicePtr> pads;
  for (const kernel::PeerPads& p : trial.pads) pads.insert(reinterpret_cast<DevicePtr>(p.mine));
  std::vector<std::shared_ptr<DeviceRegion>> touches{image, control_, mappings_->arena().hold()};
  if (*pads.begin() != mappings_->arena().at(span_.offset) || pads.size() > 1)
    touches.push_back(mappings_->arena().hold_fallback());
  const auto write = [pads, pad, state, from = image->base(), to = state_at()](DeviceWork& work) {
    for (const DevicePtr at : pads) work.copy(at, from, pad);
    work.copy(to, from + pad, state);
  };
  const PairVerdict wrote =
      work_now(registry_.driver(), options_.device, touches, "a copy", write, Deadline::after(registry_.timeout()));
  if (wrote.fine()) return touches;
  const bool hung = wrote.state == PairState::kHung;  // the device may still write to the pad
  if (hung) mappings_->arena().quarantine(std::exchange(span_, Span{}));
  throw Error(hung ? Code::kTimeout : Code::kSystem, "nvx: the GPU's pad cannot be initialized: " + wrote.why);
}

}  // namespace nvx
