#include "group/setup/inter_host_setup.h"

#include <algorithm>
#include <cstdlib>

#include "base/contain.h"
#include "base/text.h"
#include "group/setup/host_setup.h"

namespace nvx {
namespace {

/// A rank of the same host may leave a note on how the lost one has ended.
constexpr std::chrono::milliseconds kNoteGrace{500};
constexpr int64_t kMostHosts = 128;  // that the first one connects to: each takes two sockets of it

/// Whether the group has other hosts, according to the launcher or, if its ranks are numbered in the job, to a
/// name of this host (`NVX_HOST_ID`). Otherwise the first rank to arrive connects only once a second host has arrived,
/// and its death before that goes unnoticed.
bool has_other_hosts(const GroupOptions& options) {
  const char* const here = std::getenv("LOCAL_WORLD_SIZE");
  const int ranks = here ? std::atoi(here) : 0;
  const bool named = !options.host.empty() || !config().host_id.empty();
  return (!options.global_ranks.empty() && named) || (ranks > 0 && ranks < options.size);
}

/// Whether this process knows the processes of all other ranks from groups that exist.
bool knows_all(const GroupOptions& options) {
  const auto messenger = messenger_of(options);
  for (int r = 0; r < options.size; ++r) {
    if (r == options.rank || earlier_process(options, r)) continue;
    if (!messenger || size_t(r) >= options.global_ranks.size()) return false;
    MutexLock lock(messenger->mutex());
    if (messenger->liveness().location(options.global_ranks[size_t(r)]).empty()) return false;
  }
  return true;
}

}  // namespace

void InterHostSetUp::enter(int64_t generation, const Hello& own, bool leads) {
  generation_ = generation;
  own_ = own;
  hosts_.clear();
  peers_.clear();
  lost_.clear();
  messenger_.reset();
  membership_ = std::make_shared<bool>(true);
  searches_ = leads && !knows_all(options_);
  if (!searches_) return;
  host_ = store_.add(key(kCount), 1);
  searches_ = host_ <= kMostHosts;
  if (host_ == kFirst && (has_other_hosts(options_) || messenger_of(options_))) open();
  next_ = {};
  proceed();
}

/// One store serves all ranks.
Clock::duration InterHostSetUp::pause() const {
  return std::max<Clock::duration>(std::chrono::milliseconds(50), options_.size * std::chrono::microseconds(200));
}

void InterHostSetUp::proceed() {
  if (!searches_ || Clock::now() < next_) return;
  next_ = Clock::now() + pause();
  const int64_t hosts = host_ == kFirst ? std::min(store_.add(key(kCount), 0), kMostHosts) : host_;
  if (hosts == 1) return;
  if (!messenger_) open();
  if (!messenger_) return;
  if (host_ == kFirst) {
    for (int64_t host = 2; host <= hosts; ++host) (void)connect_to(host);
  } else {
    searches_ = !connect_to(kFirst);
  }
}

bool InterHostSetUp::knows(int rank) const {
  return std::ranges::any_of(peers_, [&](const Peer& peer) { return peer.rank == rank; });
}

void InterHostSetUp::check(int earlier, bool at_once) {
  for (const auto& [rank, peer, place, pinged_from] : peers_) {
    MutexLock lock(messenger_->mutex());
    if (Clock::now() >= pinged_from || messenger_->liveness().has_received(peer))
      ping(*messenger_, peer, rank, place, at_once);
  }
  const auto messenger = messenger_of(options_);
  if (!messenger || size_t(earlier) >= options_.processes.size() || knows(earlier)) return;
  const auto& [id, place, local, remote] = options_.processes[size_t(earlier)];
  if (!remote) return;
  MutexLock lock(messenger->mutex());
  const auto [peer, is_first] = earlier_.try_emplace(earlier, *remote);
  if (is_first) peer->second = messenger->liveness().reconnect(*remote);
  ping(*messenger, peer->second, earlier, place, at_once);
}

void InterHostSetUp::ping(net::Messenger& messenger, net::PeerId peer, int rank, const std::string& place,
                          bool at_once) {
  messenger.mutex().held_by_caller();
  messenger.liveness().ping(peer, /*group=*/0, /*from=*/0, rank);
  messenger.progress();
  const std::string& lost = messenger.lost_because(peer);
  if (lost.empty() || messenger.liveness().has_declared_this_lost(peer)) return;  // the latter will connect anew
  const auto since = lost_.try_emplace(rank, Clock::now()).first->second;
  if (at_once || Clock::now() - since >= kNoteGrace) end_if_lost(options_, rank, "(" + place + ") is lost: " + lost);
}

std::string job_name(const GroupOptions& options, int rank) {
  const bool known = size_t(rank) < options.global_ranks.size();
  return known ? "global " + of_rank(int(options.global_ranks[size_t(rank)])) : of_rank(rank);
}

void end_if_lost(const GroupOptions& options, int rank, const std::string& how_lost) {
  if (how_lost.empty()) return;
  const std::string name = job_name(options, rank);
  throw Error(Failure{.code = Code::kPeerDied,
                      .cause = name + " " + how_lost + ", while group " + options.name + " was being created",
                      .advice = see_log_of(name),
                      .lost_rank = rank});
}

std::shared_ptr<net::Messenger> messenger_of(const GroupOptions& options) {
  return options.messenger ? options.messenger() : net::Messenger::opened();
}

/// Leaves errors to SetUp::open_port(), which throws them once all hosts are known.
void InterHostSetUp::open() {
  contain_and(
      [this] { messenger_ = options_.messenger ? options_.messenger() : net::Messenger::instance(store_.host()); },
      [this](const std::exception*) { searches_ = false; });
  if (!messenger_) return;
  std::vector<uint8_t> value = encode({&own_, 1});
  for (const std::byte byte : messenger_->address()) value.push_back(uint8_t(byte));
  store_.set(key(std::to_string(host_)), value);
}

/// Connects to the rank that leads that host, if it has written its address; returns whether it has. A rank of this
/// host is watched through its process.
bool InterHostSetUp::connect_to(int64_t host) {
  if (hosts_.contains(host)) return true;
  const auto value = store_.get(key(std::to_string(host)), std::chrono::milliseconds(0));
  if (!value) return false;
  hosts_.insert(host);
  const std::span<const uint8_t> bytes(*value);
  const Hello hello = decode_first(bytes);
  const bool elsewhere = hello.host != own_.host && hello.ranks == own_.ranks;
  if (!elsewhere || hello.rank < 0 || hello.rank >= options_.size) return true;
  messenger_->admit(sources_of(hello, own_));
  contain_and([&] { connect(hello, std::as_bytes(bytes.subspan(sizeof hello))); },
              [](const std::exception*) {});  // SetUp::open_port() throws it
  return true;
}

/// The other side drops packets from here, and warns, until it has read this rank's address too. The first host to
/// arrive reads new addresses often, so others ping it soon. It delays pings to hosts from which nothing has arrived.
void InterHostSetUp::connect(const Hello& hello, std::span<const std::byte> address) {
  const auto soon = 2 * pause(), later = std::max<Clock::duration>(std::chrono::seconds(1), 4 * soon);
  MutexLock lock(messenger_->mutex());
  const net::PeerId peer = messenger_->connect(address);
  if (size_t(hello.rank) < options_.global_ranks.size())
    messenger_->liveness().note_rank(options_.global_ranks[size_t(hello.rank)], peer, membership_,
                                     "(" + place_of(hello) + ")");
  peers_.push_back({hello.rank, peer, place_of(hello), Clock::now() + (host_ == kFirst ? later : soon)});
}

}  // namespace nvx
