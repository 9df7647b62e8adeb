#include "memory/device_share.h"

#include <poll.h>

#include <algorithm>
#include <cstring>
#include <functional>

#include "base/error.h"
#include "base/log.h"
#include "memory/unix_socket.h"

namespace nvx {
namespace {

template <size_t N>
void put(char (&field)[N], const std::string& text) {
  const size_t n = std::min(text.size(), N - 1);
  std::memcpy(field, text.data(), n);
  std::memset(field + n, 0, N - n);
}

/// It comes from a peer and goes into messages.
template <size_t N>
std::string text_of(const char (&field)[N]) {
  std::string text(field, strnlen(field, N));
  std::replace_if(
      text.begin(), text.end(), [](unsigned char c) { return c < ' ' || c > '~'; }, '?');
  return text;
}

template <class T>
std::span<const std::byte> bytes_of(const T& value) {
  return std::as_bytes(std::span(&value, 1));
}

/// Memory that a rank offers to the others: its arena, or its window.
struct Offer {
  static constexpr uint32_t kMagic = 0x4f78766e;
  uint32_t magic = kMagic;
  uint32_t ok = 0;
  uint32_t kind = 0;
  int32_t rank = -1;
  ArenaId arena;
  uint64_t base = 0;  // where its own process sees it
  uint64_t bytes = 0;
  uint64_t check = 0;  // offset of its part for checks: its own pattern, then a slot a rank
  uint64_t seed = 0;
  HandleBytes handle{};
  char said[160] = {};
};
static_assert(sizeof(Offer) == 16 + 16 + 32 + 64 + 160);

/// Goes with each descriptor.
struct Handover {
  static constexpr uint32_t kMagic = 0x4678766e;
  uint32_t magic = kMagic;
  int32_t rank = -1;
  ArenaId arena;
};

/// How a rank finds its use of another one's memory.
struct Finding {
  uint32_t state = 0;
  char why[124] = {};
};

std::string of_rank(int rank) { return "rank " + std::to_string(rank); }

bool one_process(std::span<const DeviceCard> cards) {
  return std::all_of(cards.begin(), cards.end(), [&](const DeviceCard& c) { return c.home == cards[0].home; });
}

bool one_host(std::span<const DeviceCard> cards) {
  return std::all_of(cards.begin(), cards.end(), [&](const DeviceCard& c) { return c.host == cards[0].host; });
}

/// What each rank has said, if it is of the right shape.
template <class T>
std::vector<T> read_cards(const std::vector<std::vector<std::byte>>& said, size_t each) {
  std::vector<T> cards(said.size() * each);
  for (size_t r = 0; r < said.size(); ++r) {
    if (said[r].size() != each * sizeof(T))
      throw Error(Code::kMismatch,
                  "nvx: what " + of_rank(int(r)) + " says of its GPU is damaged, or of another version");
    std::memcpy(cards.data() + r * each, said[r].data(), said[r].size());
  }
  return cards;
}

}  // namespace

ShareAgreement agree_on_kind(std::span<const DeviceCard> cards) {
  if (one_process(cards)) return {ShareKind::kPointer, ""};
  ShareAgreement agreement;
  for (const ShareKind kind : {ShareKind::kFabric, ShareKind::kFd, ShareKind::kIpc, ShareKind::kHost}) {
    const auto lacks = [&](const DeviceCard& card) { return !(card.kinds >> int(kind) & 1); };
    const auto without = std::find_if(cards.begin(), cards.end(), lacks);
    std::string& why = agreement.why_not_better;
    if (without != cards.end()) {
      why += (why.empty() ? "" : "; ") + std::string("no ") + name(kind) + ": " + of_rank(without->rank) + ": " +
             text_of(without->why_not[int(kind)]);
    } else if (kind != ShareKind::kFabric && !one_host(cards)) {
      why += (why.empty() ? "" : "; ") + std::string("no ") + name(kind) + ": the ranks are on several hosts";
    } else {
      agreement.kind = kind;
      return agreement;
    }
  }
  throw Error(Code::kSystem, "nvx: the GPUs of these ranks can share no memory: " + agreement.why_not_better);
}

/// One making of a DeviceShare: what is needed only until it stands.
class Meeting {
 public:
  Meeting(DeviceShare& share, DeviceHome& home, Exchange& exchange, const ShareOptions& options)
      : share_(share),
        home_(home),
        exchange_(exchange),
        options_(options),
        door_name_(fresh_socket_name()),
        door_(listen_on(door_name_)),
        budget_(Deadline::after(options.patience + std::chrono::milliseconds(1))) {}
  ~Meeting();

  void introduce();
  void share_arenas();
  void share_windows();

 private:
  size_t ranks() const { return size_t(options_.ranks); }
  size_t me() const { return size_t(options_.rank); }
  const DeviceCard& own() const { return cards_[me()]; }
  bool same_process(size_t r) const { return cards_[r].home == own().home; }
  bool same_host(size_t r) const { return cards_[r].host == own().host; }

  ShareKind kind_to_make() const;
  Offer prepare(const DeviceRegion& region, ShareKind kind);
  void hand_over(int fd, const std::vector<bool>& to);
  std::vector<Fd> trade(Offer mine, const std::function<void(Offer&)>& fill, const std::vector<bool>& over_socket);
  void exchange_offers(const Offer& mine);
  std::vector<Fd> collect(const std::vector<bool>& from);
  std::shared_ptr<DeviceRegion> import(size_t r, ShareKind kind, const Fd& fd);
  PairVerdict reach(size_t r, ShareKind kind, const Fd& fd, DevicePtr* at);
  PairVerdict look_for_mark(size_t r, const DeviceRegion& region);
  std::vector<PairVerdict> tell_findings(const std::vector<PairVerdict>& mine);
  PairVerdict judge(size_t a, size_t b, const std::vector<PairVerdict>& reached,
                    const std::vector<PairVerdict>& marked) const;
  std::vector<PairVerdict> verify(const DeviceRegion& region, ShareKind kind, const std::vector<bool>& with,
                                  const std::vector<Fd>& fds, std::vector<DevicePtr>& at);
  Deadline soon() const;
  static uint64_t mark(const Offer& by, size_t to) { return by.seed ^ (0x9e3779b97f4a7c15 * (to + 1)); }

  DeviceShare& share_;
  DeviceHome& home_;
  Exchange& exchange_;
  const ShareOptions options_;
  const std::string door_name_;
  Fd door_;
  ShareProbe probe_;
  std::vector<DeviceCard> cards_;
  std::vector<Offer> offers_;
  std::vector<PairVerdict> pairs_;  // rank by rank: how a pair fares with its arenas
  Span check_;
  bool touched_ = false;  // others may be using check_ ...
  bool hung_ = false;     // ... and may never end
  Deadline budget_;
};

/// While others may yet write to it, the part for checks is not used for anything else.
Meeting::~Meeting() {
  if (!check_) return;
  if (touched_ || hung_) {
    share_.arena_->quarantine(check_);
  } else {
    share_.arena_->free(check_);
  }
}

/// For the next check. Where several hang, all of them together cost little more than two would.
Deadline Meeting::soon() const {
  using std::chrono::milliseconds;
  const auto left = std::chrono::duration_cast<milliseconds>(budget_.end - Clock::now());
  return Deadline::after(
      std::clamp(left, milliseconds(1) + options_.patience / 8, milliseconds(1) + options_.patience));
}

void Meeting::introduce() {
  DeviceCard card;
  card.rank = options_.rank;
  card.device = options_.device;
  card.host = options_.host;
  card.home = home_.id();
  ShareProbe& probe = probe_;
  probe = probe_share_kinds(home_.driver(), options_.device);
  if (const DeviceArena* made = home_.made(options_.device)) {
    for (const ShareKind kind : {ShareKind::kFabric, ShareKind::kFd, ShareKind::kIpc}) {
      if (made->region().kind() == kind || !probe.has(kind)) continue;
      probe.kinds &= ~(1u << int(kind));
      probe.why_not[int(kind)] =
          std::string("its memory was made before, for another group, by ") + name(made->region().kind());
    }
  }
  card.kinds = probe.kinds;
  for (int kind = 0; kind < kShareKinds; ++kind) put(card.why_not[kind], probe.why_not[kind]);
  DeviceFacts facts;
  if (home_.driver()->describe(options_.device, &facts) == 0) card.uuid = facts.uuid;
  put(card.door, door_name_);
  cards_ = read_cards<DeviceCard>(exchange_.all_gather(bytes_of(card)), 1);
  for (size_t r = 0; r < ranks(); ++r) {
    const DeviceCard& other = cards_[r];
    if (other.magic != DeviceCard::kMagic || other.bytes != sizeof other || other.rank != int32_t(r))
      throw Error(Code::kMismatch, "nvx: " + of_rank(int(r)) + " says of its GPU what another version of nvx would");
  }
  share_.agreement_ = agree_on_kind(cards_);
}

/// Where nobody outside this process can map the arena now, later groups may have members that can: the kind that most
/// processes have, then.
ShareKind Meeting::kind_to_make() const {
  const ShareKind agreed = share_.agreement_.kind;
  if (agreed != ShareKind::kPointer && agreed != ShareKind::kHost) return agreed;
  for (const ShareKind kind : {ShareKind::kFd, ShareKind::kFabric, ShareKind::kIpc}) {
    if (probe_.has(kind)) return kind;
  }
  return ShareKind::kPointer;
}

/// This rank's pattern where the others will read it, and what they need to find it.
Offer Meeting::prepare(const DeviceRegion& region, ShareKind kind) {
  Offer offer;
  offer.kind = uint32_t(kind);
  offer.rank = options_.rank;
  offer.arena = share_.arena_->id();
  offer.base = region.base();
  offer.bytes = region.bytes();
  offer.check = check_.offset;
  offer.seed = random_arena_id().low;
  const PairCheck check{options_.device, 0, 0, region.base() + check_.offset, offer.seed};
  const PairVerdict wrote = run_check(home_.driver(), check, soon());
  if (!wrote.fine()) {
    hung_ = hung_ || wrote.state == PairState::kHung;
    throw Error(Code::kSystem, "nvx: GPU " + std::to_string(options_.device) +
                                   " does not get through with a copy to its own memory: " + wrote.why);
  }
  if (kind == ShareKind::kFabric || kind == ShareKind::kIpc) offer.handle = region.export_handle();
  offer.ok = 1;
  return offer;
}

/// Puts a descriptor behind others' doors: there it waits for them, and nobody waits for anybody.
void Meeting::hand_over(int fd, const std::vector<bool>& to) {
  for (size_t r = 0; r < ranks(); ++r) {
    if (!to[r]) continue;
    const Fd guest = connect_to(text_of(cards_[r].door));
    const Handover handover{Handover::kMagic, options_.rank, share_.arena_->id()};
    if (!guest || !send_packet(guest.get(), &handover, sizeof handover, {&fd, 1}))
      throw Error(Code::kPeerDied, "nvx: " + of_rank(int(r)) + " cannot be reached over its Unix socket (" +
                                       std::strerror(errno) + "): it has ended, or belongs to another user");
  }
}

/// Tells all what fill() makes of mine, or why it could not, and collects the descriptors that are sent for it.
std::vector<Fd> Meeting::trade(Offer mine, const std::function<void(Offer&)>& fill,
                               const std::vector<bool>& over_socket) {
  try {
    fill(mine);
  } catch (const Error& error) {
    mine.ok = 0;
    put(mine.said, error.reason());
  }
  exchange_offers(mine);
  return collect(over_socket);
}

void Meeting::exchange_offers(const Offer& mine) {
  touched_ = mine.ok;
  offers_ = read_cards<Offer>(exchange_.all_gather(bytes_of(mine)), 1);
  constexpr uint64_t kMost = uint64_t(1) << 40;
  for (size_t r = 0; r < ranks(); ++r) {
    const Offer& offer = offers_[r];
    const uint64_t room = (ranks() + 1) * kCheckBytes;
    if (!offer.ok) {
      touched_ = false;
      throw Error(r == me() ? Code::kSystem : Code::kPeerFailed,
                  "nvx: " + of_rank(int(r)) + ": " + text_of(offer.said));
    }
    if (offer.magic != Offer::kMagic || offer.rank != int32_t(r) || offer.kind >= uint32_t(kShareKinds) ||
        offer.bytes > kMost || offer.bytes < room || offer.check > offer.bytes - room)
      throw Error(Code::kMismatch, "nvx: " + of_rank(int(r)) + " describes GPU memory that it cannot have");
  }
}

/// The descriptors of these ranks, which have all been sent by now. One that did not come is missed by who needs it.
std::vector<Fd> Meeting::collect(const std::vector<bool>& from) {
  constexpr int kNowMs = 1000;  // for what waits already
  std::vector<Fd> fds(ranks());
  const Deadline deadline = Deadline::after(std::chrono::milliseconds(kNowMs));
  for (size_t left = size_t(std::count(from.begin(), from.end(), true)); left > 0;) {
    pollfd ask{door_.get(), POLLIN, 0};
    if (deadline.passed(Clock::now()) || poll(&ask, 1, kNowMs) != 1) break;
    Fd guest, fd;
    Handover handover;
    if (accept_from(door_.get(), &guest) != Came::kGuest) continue;
    pollfd packet{guest.get(), POLLIN, 0};
    if (poll(&packet, 1, kNowMs) != 1 || !receive_packet(guest.get(), &handover, sizeof handover, {&fd, 1})) continue;
    if (handover.magic != Handover::kMagic || handover.rank < 0 || handover.rank >= options_.ranks || !fd) continue;
    const size_t r = size_t(handover.rank);
    if (!from[r] || fds[r] || handover.arena != offers_[r].arena) continue;
    fds[r] = std::move(fd);
    --left;
  }
  return fds;
}

std::shared_ptr<DeviceRegion> Meeting::import(size_t r, ShareKind kind, const Fd& fd) {
  const Offer& offer = offers_[r];
  const DeviceHome::Import import{offer.arena, kind, options_.device};
  if (auto known = home_.find(import); known && known->bytes() == offer.bytes) return known;
  std::shared_ptr<DeviceRegion> region;
  const bool by_descriptor = kind == ShareKind::kFd || kind == ShareKind::kHost;
  if (by_descriptor && !fd) throw Error(Code::kSystem, "nvx: its descriptor did not come through the Unix socket");
  if (kind == ShareKind::kFd) {
    region = DeviceRegion::import_fd(home_.driver(), options_.device, fd.get(), offer.bytes);
  } else if (kind == ShareKind::kHost) {
    region = DeviceRegion::pin(home_.driver(), options_.device, fd.get(), offer.bytes);
  } else {
    region = DeviceRegion::import_handle(home_.driver(), options_.device, kind, offer.handle, offer.bytes);
  }
  home_.adopt(import, region);
  return region;
}

/// Maps another rank's memory, reads its pattern there, and leaves a mark. Believes nothing.
PairVerdict Meeting::reach(size_t r, ShareKind kind, const Fd& fd, DevicePtr* at) {
  const Offer& offer = offers_[r];
  const bool by_pointer = same_process(r) && kind != ShareKind::kHost;  // an arena and its window are two
  const DeviceHome::Import import{offer.arena, by_pointer ? ShareKind::kPointer : kind, options_.device};
  // Not tried, so nothing hangs in it.
  if (const std::string why = home_.distrusted(import); !why.empty()) return {PairState::kRefused, why};
  std::shared_ptr<DeviceRegion> region;
  try {
    if (same_process(r)) {
      DeviceArena* const arena = home_.made(cards_[r].device);
      NVX_CHECK(arena && arena->id() == offer.arena, "it is not what this process has made for that GPU");
      const DeviceRegion& theirs = kind == ShareKind::kHost ? arena->window() : arena->region();
      if (kind != ShareKind::kHost) {
        demand_reach(*home_.driver(), options_.device, cards_[r].device);
        theirs.open_to(options_.device);
      }
      *at = theirs.base();
    } else {
      region = this->import(r, kind, fd);
      *at = region->base();
    }
  } catch (const Error& error) {
    return {PairState::kRefused, error.reason()};
  }
  const DevicePtr part = *at + offer.check;
  const PairCheck check{options_.device, part, offer.seed, part + (me() + 1) * kCheckBytes, mark(offers_[me()], r)};
  PairVerdict verdict = run_check(home_.driver(), check, soon());
  if (verdict.state == PairState::kHung && region) region->abandon();
  if (verdict.state == PairState::kHung || verdict.state == PairState::kCorrupt)
    home_.distrust(import, verdict.why + " (found by a group before)");
  if (region) share_.kept_.push_back(std::move(region));
  return verdict;
}

/// Whether what another rank has left arrived.
PairVerdict Meeting::look_for_mark(size_t r, const DeviceRegion& region) {
  const PairCheck check{options_.device, region.base() + check_.offset + (r + 1) * kCheckBytes, mark(offers_[r], me()),
                        0, 0};
  return run_check(home_.driver(), check, soon());
}

std::vector<PairVerdict> Meeting::tell_findings(const std::vector<PairVerdict>& mine) {
  std::vector<Finding> findings(ranks());
  for (size_t r = 0; r < ranks(); ++r) {
    findings[r].state = uint32_t(mine[r].state);
    put(findings[r].why, mine[r].why);
  }
  const auto told = read_cards<Finding>(exchange_.all_gather(std::as_bytes(std::span(findings))), ranks());
  std::vector<PairVerdict> all;
  for (const Finding& finding : told)
    all.push_back({PairState(std::min(finding.state, uint32_t(PairState::kCorrupt))), text_of(finding.why)});
  return all;
}

/// Of both directions, the first thing that was wrong.
PairVerdict Meeting::judge(size_t a, size_t b, const std::vector<PairVerdict>& reached,
                           const std::vector<PairVerdict>& marked) const {
  const auto say = [&](const std::vector<PairVerdict>& found, size_t from, size_t to, const char* what) {
    PairVerdict verdict = found[from * ranks() + to];
    if (!verdict.fine()) verdict.why = of_rank(int(from)) + " " + what + " " + of_rank(int(to)) + ": " + verdict.why;
    return verdict;
  };
  for (const auto& [from, to] : {std::pair(a, b), std::pair(b, a)}) {
    if (PairVerdict v = say(reached, from, to, "with the memory of"); !v.fine()) return v;
  }
  for (const auto& [from, to] : {std::pair(a, b), std::pair(b, a)}) {
    if (PairVerdict v = say(marked, from, to, "with what came from"); !v.fine()) return v;
  }
  return {};
}

/// Tries every pair in both directions; the same verdicts on all ranks, by pair.
std::vector<PairVerdict> Meeting::verify(const DeviceRegion& region, ShareKind kind, const std::vector<bool>& with,
                                         const std::vector<Fd>& fds, std::vector<DevicePtr>& at) {
  budget_ = Deadline::after(2 * options_.patience + std::chrono::milliseconds(1));
  std::vector<PairVerdict> mine(ranks());
  for (size_t r = 0; r < ranks(); ++r) {
    if (with[r]) mine[r] = reach(r, kind, fds[r], &at[r]);
  }
  const std::vector<PairVerdict> reached = tell_findings(mine);
  for (size_t r = 0; r < ranks(); ++r) {
    const bool left = with[r] && reached[r * ranks() + me()].fine();
    mine[r] = left ? look_for_mark(r, region) : PairVerdict{};
  }
  const std::vector<PairVerdict> marked = tell_findings(mine);
  std::vector<PairVerdict> pairs(ranks() * ranks());
  for (size_t a = 0; a < ranks(); ++a) {
    for (size_t b = 0; b < ranks(); ++b) {
      pairs[a * ranks() + b] = judge(std::min(a, b), std::max(a, b), reached, marked);
      hung_ = hung_ || (a == me() && pairs[a * ranks() + b].state == PairState::kHung);
    }
  }
  touched_ = false;
  return pairs;
}

void Meeting::share_arenas() {
  const ShareKind agreed = share_.agreement_.kind;
  const ShareKind kind = kind_to_make();
  std::vector<bool> over_socket(ranks()), with(ranks());
  for (size_t r = 0; r < ranks(); ++r) {
    with[r] = r != me() && (agreed != ShareKind::kHost || same_process(r));
    over_socket[r] = with[r] && !same_process(r) && kind == ShareKind::kFd;
  }
  const auto fill = [&](Offer& offer) {
    share_.arena_ = &home_.arena(options_.device, kind);
    check_ = share_.arena_->allocate((ranks() + 1) * kCheckBytes);
    offer = prepare(share_.arena_->region(), kind);
    if (agreed == ShareKind::kFd) hand_over(share_.arena_->region().export_fd().get(), over_socket);
  };
  const std::vector<Fd> fds = trade(Offer{}, fill, over_socket);
  std::vector<DevicePtr> at(ranks());
  pairs_ = verify(share_.arena_->region(), kind, with, fds, at);
  share_.peers_.resize(ranks());
  const DevicePtr mine = share_.arena_->region().base();
  const bool is_known = own().uuid != decltype(own().uuid){};
  for (size_t r = 0; r < ranks(); ++r) {
    const ShareKind how = same_process(r) ? ShareKind::kPointer : kind;
    share_.peers_[r] = {how, r == me() ? mine : at[r], mine, offers_[r].bytes, is_known && cards_[r].uuid == own().uuid,
                        ""};
    for (size_t b = 0; agreed == ShareKind::kHost && b < ranks(); ++b) {
      if (cards_[r].home != cards_[b].home)
        pairs_[r * ranks() + b] = {PairState::kRefused, share_.agreement_.why_not_better};
    }
  }
}

/// For the pairs that cannot reach each other's device memory. All ranks take part, as all must know how it ends.
void Meeting::share_windows() {
  const auto broken = [&](size_t a) {
    return std::any_of(pairs_.begin() + ptrdiff_t(a * ranks()), pairs_.begin() + ptrdiff_t((a + 1) * ranks()),
                       [](const PairVerdict& pair) { return !pair.fine(); });
  };
  bool any = false;
  for (size_t r = 0; r < ranks(); ++r) any = any || broken(r);
  if (!any) return;
  std::vector<bool> with(ranks()), over_socket(ranks());
  for (size_t r = 0; r < ranks(); ++r) {
    with[r] = !pairs_[me() * ranks() + r].fine() && same_host(r);
    over_socket[r] = with[r] && !same_process(r);
  }
  const bool wanted = broken(me());
  const auto fill = [&](Offer& offer) {
    if (!wanted) return;
    offer = prepare(share_.arena_->window(), ShareKind::kHost);
    hand_over(share_.arena_->window_fd(), over_socket);
  };
  const std::vector<Fd> fds = trade(offers_[me()], fill, over_socket);
  std::vector<DevicePtr> at(ranks());
  const DeviceRegion& own = wanted ? share_.arena_->window() : share_.arena_->region();
  const std::vector<PairVerdict> windows = verify(own, ShareKind::kHost, with, fds, at);
  for (size_t a = 0; a < ranks(); ++a) {
    for (size_t b = a + 1; b < ranks(); ++b) {
      const PairVerdict& arenas = pairs_[a * ranks() + b];
      if (arenas.fine() || (windows[a * ranks() + b].fine() && cards_[a].host == cards_[b].host)) continue;
      throw Error(
          Code::kSystem,
          "nvx: " + of_rank(int(a)) + " and " + of_rank(int(b)) + " share neither GPU memory (" + arenas.why +
              ") nor pinned host memory (" +
              (cards_[a].host == cards_[b].host ? windows[a * ranks() + b].why : "they are on different hosts") + ")");
    }
  }
  for (size_t r = 0; r < ranks(); ++r) {
    if (with[r])
      share_.peers_[r] = {ShareKind::kHost,
                          at[r],
                          own.base(),
                          offers_[r].bytes,
                          share_.peers_[r].same_gpu,
                          pairs_[me() * ranks() + r].why};
  }
}

DeviceShare::DeviceShare(DeviceHome& home, Exchange& exchange, const ShareOptions& options) {
  Meeting meeting(*this, home, exchange, options);
  meeting.introduce();
  meeting.share_arenas();
  meeting.share_windows();
  if (const std::string said = complaints(); !said.empty()) NVX_LOG(kWarn, "%s", said.c_str());
}

std::string DeviceShare::complaints() const {
  std::string lines;
  for (size_t r = 0; r < peers_.size(); ++r) {
    if (peers_[r].why_not_better.empty()) continue;
    lines += (lines.empty() ? "" : "\n") + std::string("rank ") + std::to_string(r) + " is reached through " +
             name(peers_[r].kind) + ", which is slower than GPU memory: " + peers_[r].why_not_better;
  }
  return lines;
}

}  // namespace nvx
