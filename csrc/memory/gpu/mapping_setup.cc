#include "memory/gpu/mapping_setup.h"

#include <algorithm>
#include <string>

#include "memory/shm/unix_socket.h"

namespace nvx {

/// The part for checks is not reused while others may still write to it.
MappingSetup::~MappingSetup() {
  if (!check_) return;
  if (touched_ || hung_) {
    mappings_.arena_->quarantine(check_);
  } else {
    mappings_.arena_->free(check_);
  }
}

void MappingSetup::exchange_infos() {
  DeviceInfo info;
  info.rank = options_.rank;
  info.device = options_.device;
  info.host = options_.host;
  info.process = registry_.id();
  if (!found_) found_ = registry_.probe(options_.device, options_.timeout);
  probe_ = *found_;
  if (const DeviceArena* made = registry_.made(options_.device)) {
    for (const ShareKind kind : {ShareKind::kFabric, ShareKind::kFd, ShareKind::kIpc}) {
      if (made->region().kind() == kind || !probe_.has(kind)) continue;
      probe_.kinds &= ~(1u << int(kind));
      probe_.why_not[int(kind)] =
          std::string("its memory was made before, for another group, by ") + name(made->region().kind());
    }
  }
  info.kinds = probe_.kinds;
  for (int kind = 0; kind < kShareKinds; ++kind) put(info.why_not[kind], probe_.why_not[kind]);
  info.uuid = probe_.properties.uuid;
  put(info.socket, socket_name_);
  infos_ = read_infos<DeviceInfo>(bootstrap_.all_gather(bytes_of(info)), options_.name);
  mappings_.agreement_ = agree_on_kind(infos_, options_.name);
}

/// If no process can map the arena now, members of later groups may: it is made by the kind that most have.
ShareKind MappingSetup::kind_to_make() const {
  const ShareKind agreed = mappings_.agreement_.kind;
  if (agreed != ShareKind::kPointer && agreed != ShareKind::kHost) return agreed;
  for (const ShareKind kind : {ShareKind::kFd, ShareKind::kFabric, ShareKind::kIpc}) {
    if (probe_.has(kind)) return kind;
  }
  return ShareKind::kPointer;
}

/// Writes this rank's pattern where the others will read it, and returns the data that they need to find it.
Offer MappingSetup::prepare(const std::shared_ptr<DeviceRegion>& region) {
  const ShareKind kind = region->kind();
  Offer offer;
  offer.kind = uint32_t(kind);
  offer.rank = options_.rank;
  offer.arena = mappings_.arena_->id();
  offer.base = region->base();
  offer.bytes = region->bytes();
  offer.check = check_.offset;
  offer.seed = random_arena_id().low;
  const PairCheck check{options_.device, 0, 0, region->base() + check_.offset, offer.seed, {region}};
  const PairVerdict wrote = run_check(registry_.pinned(), check, Deadline::after(registry_.timeout()));
  if (!wrote.fine()) {
    hung_ = hung_ || wrote.state == PairState::kHung;
    throw Error(Code::kSystem, "nvx: GPU " + std::to_string(options_.device) +
                                   " cannot complete a copy to its own memory: " + wrote.why);
  }
  if (kind == ShareKind::kFabric || kind == ShareKind::kIpc)
    offer.handle = call_on_own_gpu<HandleBytes>("exporting memory", [region] { return region->export_handle(); });
  offer.state = Offer::kHere;
  return offer;
}

/// Sends a descriptor to the servers of other ranks. Waits only while another user floods one, and while there is no
/// room for descriptors.
void MappingSetup::send_fd(int fd, const std::vector<bool>& to) {
  const Deadline deadline = Deadline::after(options_.timeout + std::chrono::milliseconds(1));
  for (size_t r = 0; r < ranks(); ++r) {
    if (!to[r]) continue;
    const std::string other = options_.name(int(r));
    const LocalSocket client = connect_or_throw(text_of(infos_[r].socket), "the Unix socket of " + other, deadline);
    const DescriptorInfo info{DescriptorInfo::kMagic, options_.rank, turn_, 0, mappings_.arena_->id()};
    if (!send_before(client, &info, sizeof info, {&fd, 1}, deadline))
      throw Error(Code::kPeerDied, "nvx: " + other + " ended before it received this rank's memory");
  }
}

/// Calls fill() to complete this rank's offer, sends all ranks the offer or the reason of its failure, and collects the
/// descriptors that come with the others' offers. Returns nothing if a rank requests a new agreement.
std::optional<std::vector<Fd>> MappingSetup::exchange(Offer mine, const std::function<void(Offer&)>& fill,
                                                      const std::vector<bool>& over_socket) {
  ++turn_;
  try {
    fill(mine);
  } catch (const Error& error) {
    mine.state = Offer::kNone;
    put(mine.why_not, error.reason());
  }
  if (!exchange_offers(mine)) return {};
  return collect(over_socket);
}

bool MappingSetup::exchange_offers(const Offer& mine) {
  touched_ = mine.state == Offer::kHere;
  offers_ = read_infos<Offer>(bootstrap_.all_gather(bytes_of(mine)), 1, options_.name);
  constexpr uint64_t kMost = uint64_t(1) << 40;
  bool retry = false;
  for (size_t r = 0; r < ranks(); ++r) {
    const Offer& offer = offers_[r];
    const uint64_t room = (ranks() + 1) * kCheckBytes;
    const bool named = offer.magic == Offer::kMagic && offer.state <= Offer::kRetry;
    if (named && offer.state == Offer::kNone) {
      touched_ = false;
      throw Error(r == me() ? Code::kSystem : Code::kPeerFailed,
                  "nvx: " + options_.name(int(r)) + ": " + text_of(offer.why_not));
    }
    const bool here = named && offer.rank == int32_t(r) && offer.kind < uint32_t(kShareKinds) && offer.bytes <= kMost &&
                      offer.bytes >= room && offer.check <= offer.bytes - room;
    if (!here && !(named && offer.state == Offer::kRetry))
      throw Error(Code::kMismatch, "nvx: " + options_.name(int(r)) + " sent an invalid description of its GPU memory");
    retry = retry || offer.state == Offer::kRetry;
  }
  if (retry) touched_ = false;
  return !retry;
}

/// Handles a connection to this rank's server, on the server's thread.
void MappingSetup::receive_fd(const LocalSocket& client) {
  DescriptorInfo info;
  Fd fd;
  try {
    if (!receive_packet(client, &info, sizeof info, {&fd, 1})) return;
  } catch (const Error& error) {  // the process has reached its descriptor limit
    MutexLock lock(mutex_);
    refused_ = error.failure();
    received_cv_.notify_all();
    return;
  }
  if (info.magic != DescriptorInfo::kMagic || info.rank < 0 || info.rank >= options_.ranks || !fd) return;
  MutexLock lock(mutex_);
  received_.emplace_back(info, std::move(fd));
  received_cv_.notify_all();
}

/// The descriptors of these ranks, all of which were sent. The code that needs a missing one reports it.
std::vector<Fd> MappingSetup::collect(const std::vector<bool>& from) {
  constexpr std::chrono::milliseconds kNow{1000};  // enough, because all have been sent
  std::vector<Fd> fds(ranks());
  const Deadline deadline = Deadline::after(kNow);
  MutexLock lock(mutex_);
  for (size_t left = size_t(std::ranges::count(from, true));;) {
    for (auto& [info, fd] : received_) {
      const size_t r = size_t(info.rank);
      if (!from[r] || fds[r] || info.arena != offers_[r].arena || info.turn != turn_) continue;
      fds[r] = std::move(fd);
      --left;
    }
    received_.clear();
    if (refused_) throw Error(*refused_);
    if (left == 0 || deadline.passed(Clock::now())) return fds;
    lock.wait_for(received_cv_, deadline.end - Clock::now());
  }
}

// --- the trial of every pair of ranks

/// The deadline of the next call or check. If several hang, they take the budget, and then each an eighth of `timeout`.
Deadline MappingSetup::soon(const Deadline& budget, std::chrono::milliseconds timeout) {
  using std::chrono::milliseconds;
  const auto left = std::chrono::duration_cast<milliseconds>(budget.end - Clock::now());
  return Deadline::after(std::clamp(left, milliseconds(1) + timeout / 8, milliseconds(1) + timeout));
}

/// The memory of a rank of this process, made accessible to this rank's device.
std::shared_ptr<DeviceRegion> MappingSetup::open(size_t r, ShareKind kind, const std::shared_ptr<const void>& call) {
  DeviceArena* const arena = registry_.made(infos_[r].device);
  NVX_CHECK(arena && arena->id() == offers_[r].arena && arena->region().bytes() == offers_[r].bytes,
            "it is not this process's arena of that GPU");
  if (kind == ShareKind::kHost) return arena->hold_fallback();
  return call_or_throw<std::shared_ptr<DeviceRegion>>(
      "giving access to GPU " + std::to_string(options_.device), soon_mapped(),
      [driver = registry_.driver(), device = options_.device, peer = infos_[r].device, theirs = arena->hold(), call] {
        check_peer_access(*driver, device, peer);
        theirs->allow_access(device);
        return theirs;
      });
}

/// The memory of a rank of another process, mapped for this rank's device.
std::shared_ptr<DeviceRegion> MappingSetup::import(size_t r, ShareKind kind, Fd fd,
                                                   const std::shared_ptr<const void>& call) {
  const Offer& offer = offers_[r];
  const DeviceRegistry::Import import{offer.arena, kind, options_.device};
  if (auto known = registry_.find(import); known && known->bytes() == offer.bytes) return known;
  const bool by_descriptor = kind == ShareKind::kFd || kind == ShareKind::kHost;
  if (by_descriptor && !fd) throw Error(Code::kSystem, "nvx: its descriptor did not arrive through the Unix socket");
  const auto map = [driver = registry_.driver(), device = options_.device, kind, bytes = offer.bytes,
                    handle = offer.handle, call,
                    fd = std::make_shared<Fd>(std::move(fd))]() -> std::shared_ptr<DeviceRegion> {
    if (kind == ShareKind::kFd) return DeviceRegion::import_fd(driver, device, fd->get(), bytes);
    if (kind == ShareKind::kHost) return DeviceRegion::pin(driver, device, fd->get(), bytes);
    return DeviceRegion::import_handle(driver, device, kind, handle, bytes);
  };
  const auto region = call_or_throw<std::shared_ptr<DeviceRegion>>(
      "mapping it on GPU " + std::to_string(options_.device), soon_mapped(), map);
  registry_.adopt(import, region);
  return region;
}

/// Maps another rank's memory, checks the pattern in it, and leaves a mark.
PairVerdict MappingSetup::reach(size_t r, ShareKind kind, Fd fd, DevicePtr* at) {
  const Offer& offer = offers_[r];
  const bool by_pointer = same_process(r) && kind != ShareKind::kHost;  // an arena and its fallback are two imports
  const DeviceRegistry::Import import{offer.arena, by_pointer ? ShareKind::kPointer : kind, options_.device};
  // Not tried again, so nothing can hang in it.
  if (const std::string why = registry_.why_unusable(import); !why.empty()) return {PairState::kRefused, why};
  const std::string by_earlier = " (found by an earlier group)";
  const auto call = std::make_shared<const char>();  // shared with the call that maps
  const auto began = Clock::now();
  std::shared_ptr<DeviceRegion> region;
  try {
    region = same_process(r) ? open(r, kind, call) : this->import(r, kind, std::move(fd), call);
  } catch (const Error& error) {
    budget_.end += Clock::now() - began;
    if (error.code() == Code::kTimeout) registry_.mark_unusable(import, error.reason() + by_earlier, call);
    return {PairState::kRefused, error.reason()};
  }
  budget_.end += Clock::now() - began;
  if (!same_process(r)) mappings_.kept_.add(region);
  *at = region->base();
  const DevicePtr part = *at + offer.check;
  const PairCheck check{options_.device,        part,    offer.seed, part + (me() + 1) * kCheckBytes,
                        mark(offers_[me()], r), {region}};
  const PairVerdict verdict = run_check(registry_.pinned(), check, soon_checked());
  if (verdict.state == PairState::kHung || verdict.state == PairState::kCorrupt)
    registry_.mark_unusable(import, verdict.why + by_earlier);
  return verdict;
}

/// Checks whether another rank's mark has arrived in this rank's memory.
PairVerdict MappingSetup::check_mark(size_t r, const std::shared_ptr<DeviceRegion>& region) {
  const DevicePtr slot = region->base() + check_.offset + (r + 1) * kCheckBytes;
  return run_check(registry_.pinned(), {options_.device, slot, mark(offers_[r], me()), 0, 0, {region}}, soon_checked());
}

std::vector<PairVerdict> MappingSetup::exchange_findings(const std::vector<PairVerdict>& mine) {
  std::vector<Finding> findings(ranks());
  for (size_t r = 0; r < ranks(); ++r) {
    findings[r].state = uint32_t(mine[r].state);
    put(findings[r].why, mine[r].why);
  }
  const auto received =
      read_infos<Finding>(bootstrap_.all_gather(std::as_bytes(std::span(findings))), ranks(), options_.name);
  std::vector<PairVerdict> all;
  for (const Finding& finding : received)
    all.push_back({PairState(std::min(finding.state, uint32_t(PairState::kCorrupt))), text_of(finding.why)});
  return all;
}

/// The first failure in either direction.
PairVerdict MappingSetup::pair_verdict(size_t a, size_t b, const std::vector<PairVerdict>& reached,
                                       const std::vector<PairVerdict>& marked) const {
  for (const auto& [found, what] :
       {std::pair(&reached, " with the memory of "), std::pair(&marked, " with the data from ")}) {
    for (const auto& [from, to] : {std::pair(a, b), std::pair(b, a)}) {
      const PairVerdict& verdict = (*found)[from * ranks() + to];
      if (!verdict.fine())
        return {verdict.state, options_.name(int(from)) + what + options_.name(int(to)) + ": " + verdict.why};
    }
  }
  return {};
}

/// Tries every pair in both directions. Returns the verdicts by pair, the same on all ranks.
std::vector<PairVerdict> MappingSetup::verify(const std::shared_ptr<DeviceRegion>& region, ShareKind kind,
                                              const std::vector<bool>& with, std::vector<Fd> fds,
                                              std::vector<DevicePtr>& at) {
  mapping_budget_ = Deadline::after(registry_.timeout() + std::chrono::milliseconds(1));
  budget_ = Deadline::after(2 * options_.timeout + std::chrono::milliseconds(1));
  std::vector<PairVerdict> mine(ranks());
  for (size_t r = 0; r < ranks(); ++r) {
    if (with[r]) mine[r] = reach(r, kind, std::move(fds[r]), &at[r]);
  }
  const std::vector<PairVerdict> reached = exchange_findings(mine);
  budget_ =
      Deadline::after(2 * options_.timeout + std::chrono::milliseconds(1));  // other ranks may have mapped for long
  for (size_t r = 0; r < ranks(); ++r) {
    const bool left = with[r] && reached[r * ranks() + me()].fine();
    mine[r] = left ? check_mark(r, region) : PairVerdict{};
  }
  const std::vector<PairVerdict> marked = exchange_findings(mine);
  // Not by the pair's verdict, the first failure only: work that hangs in the other direction may still write here.
  for (size_t r = 0; r < ranks(); ++r) {
    for (const auto* found : {&reached, &marked}) {
      hung_ = hung_ || (*found)[r * ranks() + me()].state == PairState::kHung ||
              (*found)[me() * ranks() + r].state == PairState::kHung;
    }
  }
  std::vector<PairVerdict> pairs(ranks() * ranks());
  for (size_t a = 0; a < ranks(); ++a) {
    for (size_t b = 0; b < ranks(); ++b) {
      pairs[a * ranks() + b] = pair_verdict(std::min(a, b), std::max(a, b), reached, marked);
    }
  }
  touched_ = false;
  return pairs;
}

}  // namespace nvx
