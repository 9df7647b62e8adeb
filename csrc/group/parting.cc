// How a rank leaves its group.

#include <cstring>

#include "base/log.h"
#include "group/group.h"
#include "group/mailbox.h"

namespace nvx {

using kernel::Presence;

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
  if (!part_from_kernels()) {
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
  const auto last_of = [this](int seat) {
    return uint32_t(pad(seat).done().value.load(std::memory_order_acquire) >> 32);
  };
  const uint32_t own = last_of(seat());
  for (int s = 0; s < seats(); ++s) {
    if (s == seat() || pad(s).header().group != id()) continue;
    const uint32_t theirs = last_of(s), both = int32_t(theirs - own) < 0 ? theirs : own;
    if (both == options_.first_epoch) continue;
    const uint32_t parted = where_they_parted(s, both);
    const kernel::Fingerprint mine = own_pad().recent(parted), other = pad(s).recent(parted);
    if (std::memcmp(&mine, &other, sizeof mine) == 0) continue;
    if (last_of(s) - parted >= kernel::kRecent - 1) continue;  // it writes there again by now
    NVX_LOG(kWarn, "collective mismatch in group %s, noticed when it was left: %s. %s", name().c_str(),
            contrast({topology().describe(rank()), mine}, {describe_seat(s), other}).c_str(), kCallAlike);
    return;
  }
}

}  // namespace nvx
