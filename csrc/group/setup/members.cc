#include "group/setup/members.h"

#include <algorithm>
#include <atomic>

#include "base/config.h"
#include "base/log.h"
#include "base/text.h"
#include "group/plan/operation.h"
#include "group/setup/store_setup.h"
#include "net/group_port.h"

namespace nvx {

using kernel::Presence;

std::string Members::key(const std::string& what) const { return key_in(generation, what); }

/// A rank announces its next collective only after this rank has caught up, so the last arrival in the pad is complete.
std::string Members::describe_progress(int local_rank) const {
  const kernel::Pad there = pad(local_rank);
  const auto announced = [&](uint32_t e) { return there.arrival(e).flag.value.load(std::memory_order_acquire); };
  uint32_t last = first_epoch;
  for (uint32_t e = 0; e < kernel::kEpochs; ++e) {
    if (!reached(announced(last), announced(e))) last = e;
  }
  std::string state = peers[size_t(local_rank)] ? peers[size_t(local_rank)]->process().state() : "";
  if (!state.empty()) state = ", " + state;
  if (there.header().group == id) {  // otherwise the pad belongs to another group by now
    const kernel::Fingerprint called = there.arrival(last).fingerprint;
    const bool nothing = called.collective == kernel::Collective::kNone;
    const bool finished = reached(there.done().value.load(std::memory_order_acquire), announced(last));
    state += nothing    ? ", no collective in this group yet"
             : finished ? ", last finished: " + describe(called)
                        : ", still in " + describe(called);
  }
  return topology.describe(ranks_of_host()[size_t(local_rank)], state);
}

void Members::warn_if_stopped(int local_rank) const {
  const std::shared_ptr<PeerProcess>& peer = peers[size_t(local_rank)];
  const std::string change = peer ? peer->process().state_change() : "";
  if (!change.empty())
    NVX_LOG(kWarn, "%s %s; %s waits for it in group %s", describe_local_rank(local_rank).c_str(), change.c_str(),
            rank_name(rank).c_str(), name.c_str());
}

std::string Members::how_to_resume(int other) const {
  const int local_rank = other < 0 ? -1 : local_rank_of(other);
  const std::shared_ptr<PeerProcess> peer = local_rank >= 0 ? peers[size_t(local_rank)] : nullptr;
  const std::string state = peer ? peer->process().state() : "";
  if (state.starts_with("stopped by a signal")) return "kill -CONT " + std::to_string(peer->pid());
  return state.starts_with("stopped by the freezer") ? "thaw its cgroup, as docker unpause does" : "";
}

bool Members::died(int local_rank) const {
  return dead(local_rank) && pad(local_rank).header().presence.load() == Presence::kHere;
}

bool Members::gone(int local_rank) const {
  if (dead(local_rank)) return true;
  const kernel::PadHeader& header = pad(local_rank).header();
  return header.group != id || header.presence.load() == Presence::kLeft;
}

std::vector<int> Members::ranks_of(const Members& other, const std::vector<int>& ranks) const {
  const std::vector<uint64_t>&mine = topology.global_ranks, &theirs = other.topology.global_ranks;
  std::vector<int> found;
  for (const int r : ranks) {
    const auto at = size_t(r) < theirs.size() ? std::ranges::find(mine, theirs[size_t(r)]) : mine.end();
    if (at != mine.end()) found.push_back(int(at - mine.begin()));
  }
  return found;
}

std::function<bool()> Members::all_peers_gone() const {
  return [peers = peers, memory = memory, id = id, own = local_rank()] {
    for (size_t r = 0; r < peers.size(); ++r) {
      if (int(r) == own || (peers[r] && peers[r]->torn_down())) continue;
      const kernel::PadHeader& header = kernel::Pad(memory[r].pad, memory.size()).header();
      const uint64_t group = header.group;
      const bool of_this_group = group == id || group == 0;  // 0: the rank does not know the others yet
      if (of_this_group && header.presence.load() == Presence::kHere) return false;
    }
    return true;
  };
}

std::function<bool()> Members::all_peers_gone_keeping_pads() const {
  return [gone = all_peers_gone(), shm = shm] { return gone(); };
}

Overrides tuning_of(const std::string& option) {
  constexpr size_t kMost = 1 << 20;
  const Overrides::Read read = [](const std::string& path) {
    std::optional<std::string> content = content_of(path, kMost + 1);
    return content && content->size() > kMost ? std::nullopt : content;
  };
  Overrides overrides;
  overrides.add(config().tune, SetBy::kVariable, "NVX_TUNE", read);
  overrides.add(option, SetBy::kOption, "nvx.Options(tune=...)", read);
  return overrides;
}

PlanFacts facts_of(const Topology& topology, int rank, const Overrides& overrides) {
  PlanFacts facts;
  facts.ranks = topology.hosts[size_t(topology.host_of[size_t(rank)])].size();
  facts.hosts = topology.hosts.size();
  facts.rails = topology.rails();
  facts.world = topology.ranks.size();
  facts.cores = topology.cores[size_t(topology.host_of[size_t(rank)])];
  if (topology.l2_bytes) facts.l2_bytes = topology.l2_bytes;
  if (topology.l3_bytes) facts.l3_bytes = topology.l3_bytes;
  size_t most = 0;  // not this host's: all hosts choose alike between hosts
  for (const std::vector<int>& host : topology.hosts) most = std::max(most, host.size());
  facts.tuning = overrides.of(most);
  static std::atomic<bool> logged{false};
  if (most > 1 && overrides.misses(most) && !logged.exchange(true))
    NVX_LOG(kWarn, "no file of NVX_TUNE is for %zu ranks on a host: groups of so many use the defaults", most);
  if (config().algorithm == "pipelined") facts.force = PlanFacts::Force::kPipelined;
  if (config().algorithm == "one_shot") facts.force = PlanFacts::Force::kOneShot;
  return facts;
}

void notify_other_hosts(net::GroupPort& port, const Topology& topology, const Failure& failure) {
  MutexLock lock(port.mutex());
  std::vector<int> ranks = port.contacts();
  if (failure.reported_code() != Code::kPeerFailed) {
    // One rank of every host notifies its host. On the host of `failure.lost_rank` two ranks do, since one of them may
    // be stopped together with that rank.
    for (const std::vector<int>& host : topology.hosts) {
      int left = std::find(host.begin(), host.end(), failure.lost_rank) == host.end() ? 1 : 2;
      for (auto rank = host.begin(); rank != host.end() && left > 0; ++rank) {
        if (*rank != failure.lost_rank) ranks.push_back(*rank), --left;
      }
    }
  }
  std::sort(ranks.begin(), ranks.end());
  ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
  port.poison(failure, ranks);
}

}  // namespace nvx
