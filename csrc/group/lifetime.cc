// How a group begins, and how its rank leaves it.

#include <cstring>

#include "base/config.h"
#include "base/log.h"
#include "group/group.h"
#include "group/hierarchy/hierarchical.h"
#include "group/meet/setup.h"
#include "group/p2p/mailbox.h"
#include "group/roster.h"

namespace nvx {
namespace {

/// Spinning takes the core from the very rank that is waited for, where ranks outnumber cores.
std::chrono::microseconds spin_of(const PlanFacts& facts) {
  constexpr std::chrono::microseconds kMost{200};
  if (config().spin_us >= 0) return std::chrono::microseconds(config().spin_us);
  return facts.ranks > facts.cores ? std::chrono::microseconds(0) : kMost;
}

}  // namespace

using kernel::Presence;

Group::Group(Store& store, const GroupOptions& options)
    : options_(options),
      fork_generation_(nvx::fork_generation()),
      lane_(std::make_shared<Lane>()),
      device_(*this, members_, options.first_epoch),
      timeout_ms_((config().timeout.count() > 0 ? config().timeout : options.timeout).count()) {
  SetUp set_up(store, options_);
  SetUp::Made made = set_up.meet();
  members_ = std::move(made.members);
  port_ = std::move(made.port);
  standing_ = std::move(made.standing);
  try {
    if (const auto spin = spin_of(plan_facts()); spin.count() > 0) patience_ = std::make_unique<Patience>(spin);
    channel_ = std::make_unique<kernel::Channel>(local_rank(), members_.memory, options.first_epoch);
    if (port_) hierarchical_ = std::make_unique<Hierarchical>(*this, *port_);
    mailbox_ = std::make_unique<Mailbox>(*this);
    if (port_) {
      MutexLock lock(port_->mutex());
      port_->on_failure([this](const net::GroupPort::Told& told) { pass_on(told); });
    }
    describe_itself();
    neighbours().leases().join(this);
    Roster::here().join(*this);  // last: who joins is a whole group
  } catch (const std::exception& error) {
    unmake();
    set_up.give_up({std::move(members_), std::move(port_), std::move(standing_)}, failure_of(error));
    throw;
  }
}

/// Nobody calls what is half made any more.
void Group::unmake() {
  if (port_) {
    MutexLock lock(port_->mutex());
    port_->on_mail([] {});
    port_->on_failure([](const net::GroupPort::Told&) {});
  }
  neighbours().leases().leave(this);
  mailbox_.reset();
  hierarchical_.reset();
}

void Group::describe_itself() const {
  if (rank() != 0) return;
  NVX_LOG(kInfo, "group %s: %s; %zu cores, L3 %zu KiB; copy and reduce loops: %s", name().c_str(),
          topology().describe().c_str(), topology().cores, topology().l3_bytes >> 10, kernel::level().name);
  NVX_LOG(kInfo, "group %s: %s", name().c_str(),
          explain(kernel::Collective::kAllReduce, 1 << 20, plan_facts()).c_str());
}

Group::~Group() {
  if (forked()) {
    // All of this belongs to the parent: its memory is not mapped here, and its threads, which do not exist here, may
    // hold its locks. It is left as it is.
    new auto(std::move(lane_));
    mailbox_.release();
    hierarchical_.release();
    port_.release();
    new auto(std::move(members_));
    device_.leave_to_parent();
    return;
  }
  Roster::here().leave(*this);
  leave();
  if (parts_later_) part();  // no operation has ended since
  device_.close();
  mailbox_.reset();
  hierarchical_.reset();
  port_.reset();
  neighbours().leases().leave(this);
  {
    MutexLock lock(lease_mutex_);
    if (lease_) neighbours().leases().bury(lease_, everybody_gone());
    lease_ = {};
  }
  neighbours().arena().bury(members_.pad_span, everybody_gone());
}

/// Peers use their memory again once this rank has left, so it must have stopped looking at it by then: what is in
/// flight ends first, within a watch interval.
void Group::leave() {
  if (forked() || left_.exchange(true)) return;
  if (lane_->held_here()) {
    parts_later_ = true;
    return;
  }
  lane_->await_idle(std::chrono::seconds(10));
  part();
}

void Group::part() {
  parts_later_ = false;
  warn_of_differing_calls();
  mailbox_->close();
  if (port_) {
    MutexLock lock(port_->mutex());
    port_->leave();
  }
  if (!device_.part()) {
    fail_as_left(rank());
    return;
  }
  MutexLock lock(failure_mutex_);
  own_pad().header().presence.store(Presence::kLeft);
  standing_.reset();
}

/// Ranks that gave different roots to a collective may not have met in it, and learn of it from what they call next.
/// Where nothing has come next, this is the last occasion to say so: for the ranks of this host, as far as both have
/// come, without waiting for anybody.
void Group::warn_of_differing_calls() const {
  if (failed()) return;
  const auto last_of = [this](int local_rank) {
    return uint32_t(pad(local_rank).done().value.load(std::memory_order_acquire) >> 32);
  };
  const uint32_t own = last_of(local_rank());
  for (int s = 0; s < local_ranks(); ++s) {
    if (s == local_rank() || pad(s).header().group != id()) continue;
    const uint32_t theirs = last_of(s), both = int32_t(theirs - own) < 0 ? theirs : own;
    if (both == options_.first_epoch) continue;
    const uint32_t parted = where_they_parted(s, both);
    const kernel::Fingerprint mine = own_pad().recent(parted), other = pad(s).recent(parted);
    if (std::memcmp(&mine, &other, sizeof mine) == 0) continue;
    if (last_of(s) - parted >= kernel::kRecent - 1) continue;  // it writes there again by now
    NVX_LOG(kWarn, "collective mismatch in group %s, noticed when it was left: %s. Next: %s", name().c_str(),
            contrast({topology().describe(rank()), mine}, {describe_local_rank(s), other}).c_str(), kCallAlike);
    return;
  }
}

}  // namespace nvx
