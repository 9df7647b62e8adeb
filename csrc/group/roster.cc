// What befalls one group of a process, and the others of it: a process that one of them has lost is lost to all, and
// who waits in another one for a rank that has failed here is to name the cause, and not that rank.

#include "group/roster.h"

#include <algorithm>
#include <chrono>
#include <thread>

#include "base/contain.h"
#include "base/per_process.h"
#include "group/group.h"

namespace nvx {
namespace {

thread_local bool telling = false;

}  // namespace

Roster& Roster::here() { return of_this_process<Roster>(); }

void Roster::join(Group& group) {
  MutexLock lock(mutex_);
  groups_.push_back(&group);
}

void Roster::leave(Group& group) {
  MutexLock lock(mutex_);
  std::erase(groups_, &group);
}

bool Roster::is_telling() { return telling; }

void Roster::tell_others(const Group& of, const std::function<void(Group&)>& tell) {
  if (telling) return;
  MutexLock lock(mutex_);
  telling = true;
  for (Group* const group : groups_) {
    if (group != &of) contain("telling another group of a failure", [&] { tell(*group); });
  }
  telling = false;
}

/// What a rank has said it failed of before it was lost, or left: then it is not to blame.
void Group::tell_other_groups(const Failure& failure) {
  const Code met = failure.met_as();
  if (met == Code::kAborted || closed()) return;
  // What has come from group to group: where it began is what counts.
  const std::string own = "group " + name() + " of " + topology().describe(rank()) + " had failed: " + failure.cause;
  const Failure trouble{failure.code, failure.before.empty() ? own : failure.before};
  const bool by_loss = met == Code::kPeerDied || met == Code::kPeerFailed;
  const std::vector<Lost> lost = by_loss ? lost_ranks() : std::vector<Lost>();
  Roster::here().tell_others(*this, [&](Group& other) {
    if (!port_ || !other.port_ || &port_->messenger() == &other.port_->messenger()) other.hear_of(lost, trouble);
  });
}

std::vector<Group::Lost> Group::lost_ranks() {
  std::vector<Lost> lost;
  for (int s = 0; s < local_ranks(); ++s) {
    if (s != local_rank() && dead(s) && pad(s).header().presence.load() == kernel::Presence::kHere)
      lost.push_back({.near = members_.peers[size_t(s)].get()});
  }
  if (!port_) return lost;
  MutexLock lock(port_->mutex());
  for (int r = 0; r < size(); ++r) {
    if (local_rank_of(r) >= 0) continue;
    const auto fate = port_->fate(r);
    const auto process = port_->process_of(r);
    if (fate && !fate->left() && process) lost.push_back({.messenger = &port_->messenger(), .far = *process});
  }
  return lost;
}

void Group::hear_of(const std::vector<Lost>& lost, const Failure& trouble) {
  if (forked() || failed() || closed()) return;
  if (std::any_of(lost.begin(), lost.end(), [this](const Lost& l) { return fail_as_lost(l); })) return;
  {
    MutexLock lock(failure_mutex_);
    if (own_pad().header().presence.load(std::memory_order_relaxed) == kernel::Presence::kLeft) return;
    write_note(own_pad().header().trouble, trouble);
  }
  if (!port_) return;
  MutexLock lock(port_->mutex());
  port_->tell_trouble(trouble);
}

bool Group::fail_as_lost(const Lost& lost) {
  for (int s = 0; lost.near && s < local_ranks(); ++s) {
    if (s == local_rank() || members_.peers[size_t(s)].get() != lost.near ||
        pad(s).header().presence.load() != kernel::Presence::kHere)
      continue;
    fail_as_gone(s);
    return true;
  }
  for (int r = 0; lost.messenger && port_ && &port_->messenger() == lost.messenger && r < size(); ++r) {
    MutexLock lock(port_->mutex());
    if (local_rank_of(r) >= 0 || port_->process_of(r) != lost.far) continue;
    const auto fate = port_->fate(r);
    lock.unlock();
    if (!fate || fate->left()) continue;
    (void)fail_by_fate(*fate);
    return true;
  }
  return false;
}

/// The local_rank of a rank that ranks of other hosts have lost, as one of them says, and that has ended on this one,
/// where it is known how; else -1. Its connections end a little before the process does.
int Group::seen_to_end(const Failure& told, Clock::duration clarity) const {
  if (told.code != Code::kPeerDied || told.ending.known() || told.who == kNobody) return -1;
  const int s = local_rank_of(told.who);
  if (s < 0 || s == local_rank()) return -1;
  const auto here_still = [&] { return pad(s).header().presence.load() == kernel::Presence::kHere; };
  for (const auto end = Clock::now() + clarity; !dead(s) && here_still() && Clock::now() < end;)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  return dead(s) && here_still() ? s : -1;
}

/// Of what another group of that rank's process has failed, in words; empty where it has said nothing.
std::string Group::trouble_of(int rank) {
  if (const int s = local_rank_of(rank); s >= 0) {
    const kernel::PadHeader& header = pad(s).header();
    if (header.group != id() || !header.trouble.readable()) return "";
    const std::optional<Failure> note = read_note(header.trouble, size());
    return note ? note->cause : "";
  }
  if (!port_) return "";
  MutexLock lock(port_->mutex());
  return port_->trouble(rank);
}

}  // namespace nvx
