#include "group/setup/host_setup.h"

#include <algorithm>
#include <cstring>

#include "base/failure_note.h"
#include "base/log.h"
#include "base/text.h"

namespace nvx {
namespace {

/// The leader of a host, in the store. Fixed layout; comes from peers.
struct Leader {
  PeerInfo info;
  char name[48] = {};  // of its relay
};

template <class T>
std::vector<uint8_t> bytes_of(const T& value) {
  const auto* begin = reinterpret_cast<const uint8_t*>(&value);
  return {begin, begin + sizeof value};
}

}  // namespace

void HostSetUp::enter(int64_t generation, const Hello& own) {
  leave();
  generation_ = generation;
  reads_itself_ = leader_was_there_ = false;
  const PeerInfo info =
      PeerInfo::of(options_.rank, described(rank_name(options_.rank, options_.global_ranks), place_of(own)));
  auto relay = std::make_unique<HostRelay>(info);
  Leader leader{info};
  put(leader.name, relay->name());
  const Value mine = bytes_of(leader);
  // The size too: worlds of several sizes may be made one after another over one store.
  const std::string place =
      std::to_string(own.host) + "/" + std::to_string(own.machine) + "/" + std::to_string(options_.size);
  const Value first = store_.claim(key_in(generation, "host/" + place), mine);
  if (first == mine) {
    relay_ = std::move(relay);
  } else if (first.size() == sizeof leader) {
    std::memcpy(&leader, first.data(), sizeof leader);
    leader.name[sizeof leader.name - 1] = leader.info.description[sizeof leader.info.description - 1] = '\0';
    leader_ = leader.info;
    relay_client_ = std::make_unique<RelayClient>(leader.name, info);
  }
}

void HostSetUp::leave() {
  relay_.reset();
  relay_client_.reset();
}

void HostSetUp::publish(const Value& value) {
  if (!relay_ || reads_itself_) return;
  try {
    relay_->publish(value);
  } catch (const Error&) {
    reads_itself_ = true;  // the others do so too: they get no further value
  }
}

void HostSetUp::give_up(const Failure& why) {
  if (!relay_) return;
  const FailureNote note = FailureNote::of(why);
  const auto* begin = reinterpret_cast<const uint8_t*>(note.used().data());
  try {
    relay_->give_up({begin, note.used().size()});
  } catch (const Error&) {  // no descriptor, perhaps: this host's ranks then read the note in the store
  }
}

bool HostSetUp::proceed() {
  if (relay_) relay_->serve();
  const bool there = follows();
  const bool left = relay_ ? relay_->has_lost_clients() : leader_was_there_ && !there;
  leader_was_there_ = there;
  return left;
}

std::optional<Failure> HostSetUp::reason() const {
  if (!relay_client_ || !relay_client_->reason()) return std::nullopt;
  return FailureNote::read(std::as_bytes(std::span(*relay_client_->reason())), options_.size)
      .value_or(unreadable_note("a rank"));
}

void HostSetUp::check() {
  if (relay_) {
    for (const LocalPeer& client : relay_->peers()) check_process(client.process, client.info);
  }
  if (!relay_client_) return;
  check_process(relay_client_->process(), leader_);
  if (!relay_client_->open() && !relay_client_->introduced()) check_leader();
}

void HostSetUp::check_process(const ProcessWatch& process, const PeerInfo& info) {
  if (process.ended()) throw_died(info, process.exit_status());
  if (process_of(info.rank)) return;  // watched by check_for_deaths()
  if (const std::string change = process.state_change(); !change.empty())
    NVX_LOG(kWarn, "%s %s; this rank waits for it to create group %s", printable(info.description).c_str(),
            change.c_str(), options_.name.c_str());
}

/// The leader was gone before this rank could connect to it. It has ended, or has begun another set-up, or was an
/// earlier process of this rank, or the set-up is complete, without this process.
void HostSetUp::check_leader() {
  if (leader_.rank == options_.rank || store_.add(generation_of(leader_.rank), 0) > generation_) return;
  if (!store_.get(key_in(generation_, kHellos), std::chrono::milliseconds(0))) throw_died(leader_, {});
}

void HostSetUp::throw_died(const PeerInfo& info, const ExitStatus& status) {
  const int rank = info.rank >= 0 && info.rank < options_.size ? info.rank : kNoRank;
  throw Error(Failure{.code = Code::kPeerDied,
                      .cause = printable(info.description) + " has ended" + text_of(status, " (", ")") +
                               " while group " + options_.name + " was being created",
                      .advice = see_log_of(rank == kNoRank ? "that rank" : rank_name(rank, options_.global_ranks)),
                      .lost_rank = rank,
                      .exit_status = status});
}

std::shared_ptr<PeerProcess> earlier_process(const GroupOptions& options, int rank) {
  const size_t r = size_t(rank);  // none, -1, exceeds all sizes
  if (r < options.processes.size() && options.processes[r].local) return options.processes[r].local;
  const std::shared_ptr<ShmRegistry> shm = ShmRegistry::opened();
  return shm && r < options.global_ranks.size() ? shm->process_of_rank(options.global_ranks[r]) : nullptr;
}

bool HostSetUp::has_ended(int rank) const {
  if (const auto process = process_of(rank); process && process->dead()) return true;
  if (relay_client_ && leader_.rank == rank) return relay_client_->process().ended();
  return relay_ && std::ranges::any_of(relay_->peers(), [&](const LocalPeer& client) {
           return client.info.rank == rank && client.process.ended();
         });
}

}  // namespace nvx
