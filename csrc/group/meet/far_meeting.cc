#include "group/meet/far_meeting.h"

#include <algorithm>
#include <cstdlib>

#include "base/contain.h"
#include "base/words.h"

namespace nvx {
namespace {

constexpr int64_t kMostHosts = 128;  // that rank 0 meets: each takes two sockets of it

/// Whether the group has other hosts, according to the launcher or, if it is the whole job, to the name that was given
/// to this host. Otherwise the first rank to come learns of them only when they come, and nobody notices if it has
/// ended by then.
bool has_other_hosts(const GroupOptions& options) {
  const char* const here = std::getenv("LOCAL_WORLD_SIZE");
  const int ranks = here ? std::atoi(here) : 0;
  const bool named = !options.host.empty() || !config().host_id.empty();
  return (options.whole_job && named) || (ranks > 0 && ranks < options.size);
}

}  // namespace

void FarMeeting::enter(int64_t generation, const Hello& own, bool leads) {
  generation_ = generation;
  own_ = own;
  known_.clear();
  met_.clear();
  messenger_.reset();
  standing_ = std::make_shared<bool>(true);
  const bool have_met = !options_.whole_job && !options_.global_ranks.empty();  // in the group of the whole job
  looks_ = !have_met && (leads || options_.rank == 0);
  if (!looks_) return;
  const int64_t hosts = leads ? store_.add(key(kCount), 1) : 0;
  looks_ = options_.rank == 0 || hosts <= kMostHosts;
  if (!looks_) return;
  own_place_ = options_.rank == 0 ? kRank0 : std::to_string(hosts);
  if (leads && hosts == 1 && has_other_hosts(options_)) open();
  next_ = {};
  proceed();
}

/// One store serves all ranks.
Clock::duration FarMeeting::pause() const {
  return std::max<Clock::duration>(std::chrono::milliseconds(200), options_.size * std::chrono::microseconds(200));
}

void FarMeeting::proceed() {
  if (!looks_ || Clock::now() < next_) return;
  next_ = Clock::now() + pause();
  looks_ = !known_.contains(kRank0);
  const int64_t hosts = store_.add(key(kCount), 0);
  if (hosts < 2) return;
  if (!messenger_) open();
  if (!messenger_) return;
  if (options_.rank != 0) meet(kRank0);
  for (int64_t host = 1; options_.rank == 0 && host <= std::min(hosts, kMostHosts); ++host) meet(std::to_string(host));
}

bool FarMeeting::has_met(int rank) const {
  return std::ranges::any_of(met_, [&](const Met& met) { return met.rank == rank; });
}

void FarMeeting::look(int known) {
  const auto their_turn = std::max<Clock::duration>(std::chrono::seconds(1), 2 * pause());
  for (const auto& [rank, peer, place, since] : met_) {
    MutexLock lock(messenger_->mutex());
    // Until the other side has met this one too, it drops packets from here, and warns.
    if (Clock::now() - since < their_turn && !messenger_->liveness().has_heard(peer)) continue;
    ask(*messenger_, peer, rank, place);
  }
  const auto messenger = messenger_of(options_);
  if (!messenger || size_t(known) >= options_.processes.size() || has_met(known)) return;
  const auto& [id, place, near, far] = options_.processes[size_t(known)];
  if (!far) return;
  MutexLock lock(messenger->mutex());
  const auto [peer, is_first] = asked_.try_emplace(known, *far);
  if (is_first) peer->second = messenger->liveness().reconnect(*far);
  ask(*messenger, peer->second, known, place);
}

void FarMeeting::ask(net::Messenger& messenger, net::PeerId peer, int rank, const std::string& place) {
  messenger.mutex().held_by_caller();
  messenger.liveness().ask(peer, /*group=*/0, /*from=*/0, rank);
  messenger.progress();
  const std::string& lost = messenger.lost_because(peer);
  if (lost.empty() || messenger.liveness().has_given_up_this(peer)) return;  // the latter will connect anew
  end_if_lost(options_, rank, "(" + place + ") is lost: " + lost);
}

std::string job_name(const GroupOptions& options, int rank) {
  const bool known = size_t(rank) < options.global_ranks.size();
  return known ? "global " + of_rank(int(options.global_ranks[size_t(rank)])) : of_rank(rank);
}

void end_if_lost(const GroupOptions& options, int rank, const std::string& fate) {
  if (fate.empty()) return;
  const std::string name = job_name(options, rank);
  throw Error(Failure{.code = Code::kPeerDied,
                      .cause = name + " " + fate + ", while group " + options.name + " was being created",
                      .advice = see_log_of(name),
                      .who = rank});
}

std::shared_ptr<net::Messenger> messenger_of(const GroupOptions& options) {
  return options.messenger ? options.messenger() : net::Messenger::opened();
}

/// Leaves errors to SetUp::open_port(), which throws them once all hosts are known.
void FarMeeting::open() {
  contain_and([this] { messenger_ = options_.messenger ? options_.messenger() : net::Messenger::here(store_.host()); },
              [this](const std::exception*) { looks_ = false; });
  if (!messenger_) return;
  std::vector<uint8_t> value = encode({&own_, 1});
  for (const std::byte byte : messenger_->address()) value.push_back(uint8_t(byte));
  store_.set(key(own_place_), value);
}

/// Meets the rank that has written this. A rank of this host is known through its process.
void FarMeeting::meet(const std::string& what) {
  if (known_.contains(what)) return;
  const auto value = store_.get(key(what), std::chrono::milliseconds(0));
  if (!value) return;
  known_.insert(what);
  const std::span<const uint8_t> said(*value);
  const Hello hello = decode_first(said);
  if (hello.host == own_.host || hello.ranks != own_.ranks || hello.rank < 0 || hello.rank >= options_.size) return;
  messenger_->admit(sources_of(hello, own_));
  contain_and([&] { know(hello, std::as_bytes(said.subspan(sizeof hello))); },
              [](const std::exception*) {});  // SetUp::open_port() throws it
}

void FarMeeting::know(const Hello& hello, std::span<const std::byte> address) {
  MutexLock lock(messenger_->mutex());
  const net::PeerId peer = messenger_->connect(address);
  if (size_t(hello.rank) < options_.global_ranks.size())
    messenger_->liveness().meet(options_.global_ranks[size_t(hello.rank)], peer, standing_,
                                "(" + place_of(hello) + ")");
  met_.push_back({hello.rank, peer, place_of(hello), Clock::now()});
}

}  // namespace nvx
