#include "memory/gpu/mapping_setup.h"

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

void MappingSetup::introduce() {
  DeviceCard card;
  card.rank = options_.rank;
  card.device = options_.device;
  card.host = options_.host;
  card.process = registry_.id();
  if (!found_) found_ = registry_.probe(options_.device, options_.patience);
  probe_ = *found_;
  if (const DeviceArena* made = registry_.made(options_.device)) {
    for (const ShareKind kind : {ShareKind::kFabric, ShareKind::kFd, ShareKind::kIpc}) {
      if (made->region().kind() == kind || !probe_.has(kind)) continue;
      probe_.kinds &= ~(1u << int(kind));
      probe_.why_not[int(kind)] =
          std::string("its memory was made before, for another group, by ") + name(made->region().kind());
    }
  }
  card.kinds = probe_.kinds;
  for (int kind = 0; kind < kShareKinds; ++kind) put(card.why_not[kind], probe_.why_not[kind]);
  card.uuid = probe_.facts.uuid;
  put(card.socket, socket_name_);
  cards_ = read_cards<DeviceCard>(exchange_.all_gather(bytes_of(card)), 1, options_.name);
  for (size_t r = 0; r < ranks(); ++r) {
    const DeviceCard& other = cards_[r];
    if (other.magic != DeviceCard::kMagic || other.bytes != sizeof other || other.rank != int32_t(r))
      throw of_another_version(options_.name(int(r)));
  }
  mappings_.agreement_ = agree_on_kind(cards_, options_.name);
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
  const PairVerdict wrote = run_check(registry_.driver(), check, Deadline::after(registry_.patience()));
  if (!wrote.fine()) {
    hung_ = hung_ || wrote.state == PairState::kHung;
    throw Error(Code::kSystem, "nvx: GPU " + std::to_string(options_.device) +
                                   " cannot complete a copy to its own memory: " + wrote.why);
  }
  if (kind == ShareKind::kFabric || kind == ShareKind::kIpc)
    offer.handle = ask_own<HandleBytes>("exporting memory", [region] { return region->export_handle(); });
  offer.state = Offer::kHere;
  return offer;
}

/// Sends a descriptor to the servers of other ranks. Waits only while another user floods one.
void MappingSetup::send_fd(int fd, const std::vector<bool>& to) {
  const Deadline deadline = Deadline::after(options_.patience + std::chrono::milliseconds(1));
  for (size_t r = 0; r < ranks(); ++r) {
    if (!to[r]) continue;
    const std::string other = options_.name(int(r));
    const LocalSocket guest = connect_or_throw(text_of(cards_[r].socket), "the Unix socket of " + other, deadline);
    const Handover handover{Handover::kMagic, options_.rank, turn_, 0, mappings_.arena_->id()};
    if (!send_packet(guest, &handover, sizeof handover, {&fd, 1}))
      throw Error(Code::kPeerDied, "nvx: " + other + " ended before it received this rank's memory");
  }
}

/// Calls fill() to complete this rank's offer, sends all ranks the offer or the reason of its failure, and collects the
/// descriptors that come with the others' offers. Returns nothing if a rank wants to agree again.
std::optional<std::vector<Fd>> MappingSetup::trade(Offer mine, const std::function<void(Offer&)>& fill,
                                                   const std::vector<bool>& over_socket) {
  ++turn_;
  try {
    fill(mine);
  } catch (const Error& error) {
    mine.state = Offer::kNone;
    put(mine.said, error.reason());
  }
  if (!exchange_offers(mine)) return {};
  return collect(over_socket);
}

bool MappingSetup::exchange_offers(const Offer& mine) {
  touched_ = mine.state == Offer::kHere;
  offers_ = read_cards<Offer>(exchange_.all_gather(bytes_of(mine)), 1, options_.name);
  constexpr uint64_t kMost = uint64_t(1) << 40;
  bool anew = false;
  for (size_t r = 0; r < ranks(); ++r) {
    const Offer& offer = offers_[r];
    const uint64_t room = (ranks() + 1) * kCheckBytes;
    const bool named = offer.magic == Offer::kMagic && offer.state <= Offer::kAnew;
    if (named && offer.state == Offer::kNone) {
      touched_ = false;
      throw Error(r == me() ? Code::kSystem : Code::kPeerFailed,
                  "nvx: " + options_.name(int(r)) + ": " + text_of(offer.said));
    }
    const bool here = named && offer.rank == int32_t(r) && offer.kind < uint32_t(kShareKinds) && offer.bytes <= kMost &&
                      offer.bytes >= room && offer.check <= offer.bytes - room;
    if (!here && !(named && offer.state == Offer::kAnew))
      throw Error(Code::kMismatch, "nvx: " + options_.name(int(r)) + " describes GPU memory that it cannot have");
    anew = anew || offer.state == Offer::kAnew;
  }
  if (anew) touched_ = false;
  return !anew;
}

/// Handles a connection to this rank's server, on the server's thread.
void MappingSetup::receive_fd(const LocalSocket& guest) {
  Handover handover;
  Fd fd;
  try {
    if (!receive_packet(guest, &handover, sizeof handover, {&fd, 1})) return;
  } catch (const Error& error) {  // the process has reached its descriptor limit
    MutexLock lock(mutex_);
    refused_ = error.failure();
    came_cv_.notify_all();
    return;
  }
  if (handover.magic != Handover::kMagic || handover.rank < 0 || handover.rank >= options_.ranks || !fd) return;
  MutexLock lock(mutex_);
  came_.emplace_back(handover, std::move(fd));
  came_cv_.notify_all();
}

/// The descriptors of these ranks, all of which were sent. The code that needs a missing one reports it.
std::vector<Fd> MappingSetup::collect(const std::vector<bool>& from) {
  constexpr std::chrono::milliseconds kNow{1000};  // enough, because all have been sent
  std::vector<Fd> fds(ranks());
  const Deadline deadline = Deadline::after(kNow);
  MutexLock lock(mutex_);
  for (size_t left = size_t(std::count(from.begin(), from.end(), true));;) {
    for (auto& [handover, fd] : came_) {
      const size_t r = size_t(handover.rank);
      if (!from[r] || fds[r] || handover.arena != offers_[r].arena || handover.turn != turn_) continue;
      fds[r] = std::move(fd);
      --left;
    }
    came_.clear();
    if (refused_) throw Error(*refused_);
    if (left == 0 || deadline.passed(Clock::now())) return fds;
    lock.wait_for(came_cv_, deadline.end - Clock::now());
  }
}

}  // namespace nvx
