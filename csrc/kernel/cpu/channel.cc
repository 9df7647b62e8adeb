#include "kernel/cpu/channel.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/hash.h"

namespace nvx::kernel {
namespace {

constexpr uint32_t kRefresh = 1 << 24;

bool epoch_reached(uint32_t epoch, uint32_t want) { return int32_t(epoch - want) >= 0; }

uint64_t next_history(const Fingerprint& f) {
  uint64_t words[4];
  std::memcpy(words, &f, sizeof words);
  return Hash().add(words[0]).add(words[1]).add(words[2]).add(words[3]).value();
}

}  // namespace

Channel::Channel(int rank, std::span<const PeerMemory> peers, uint32_t first_epoch, bool rotates)
    : rank_(rank),
      epoch_(first_epoch),
      memory_(peers.begin(), peers.end()),
      done_(peers.size(), first_epoch),
      staging_(peers.size()),
      lent_(peers.size()),
      sources_(peers.size()),
      factors_(peers.size(), 1.0),
      rotates_(rotates),
      leased_epoch_(first_epoch) {
  for (const PeerMemory& peer : memory_) pads_.emplace_back(peer.pad, peers.size());
  for (int i = 1; i < size(); ++i) others_.push_back((rank + i) % size());
}

bool Channel::wait_done(CpuExec& ex, uint32_t epoch) {
  for (const int peer : others()) {
    if (epoch_reached(done_[size_t(peer)], epoch)) continue;
    if (!ex.wait(pad(peer).done(), stamp(epoch, 0), peer)) return false;
    done_[size_t(peer)] = epoch;
    if (!compare(ex, peer, epoch)) return false;
  }
  return true;
}

/// For a peer that is done with this epoch and has not been met since: compares its call in this epoch, and the history
/// before it, with this rank's. Its fingerprint is still there, because kRecent of them are kept: the peer is less than
/// kEpochs ahead of this rank, which is at most kEpochs ahead of the epoch.
bool Channel::compare(CpuExec& ex, int peer, uint32_t epoch) {
  if (std::memcmp(&pad(peer).recent(epoch), &mine().recent(epoch), sizeof(Fingerprint)) == 0) return true;
  return ex.fail(Verdict::mismatch(peer, stamp(epoch, 0), 0));
}

bool Channel::enter(CpuExec& ex) {
  ++epoch_;
  if (!wait_done(ex, epoch_ - kEpochs)) return false;
  if (epoch_ % kRefresh == 0) refresh(ex);
  next_slot();
  return true;
}

/// The slots of the last epochs, which peers may still read, lie before the next one.
void Channel::next_slot() {
  slot_at_ += round_up(std::exchange(slot_bytes_, 0), kCacheLine);
  if (!rotates_) slot_at_ = epoch_ % kEpochs * kSlotBytes;
  if (slot_at_ > kSlotsBytes - kSlotBytes) slot_at_ = 0;
}

/// Stamps are compared modularly, so none may become older than half the range of epochs. This updates the flags that
/// only some operations move, long before that.
void Channel::refresh(CpuExec& ex) {
  const Stamp now = stamp(epoch_, 0);
  for (Flag* flag : {&mine().staged(), &mine().reduced(), &mine().fetched()}) ex.signal(*flag, now);
  const uint32_t done_by_all = epoch_ - kEpochs;
  if (!epoch_reached(leased_epoch(), done_by_all)) leased_epoch_.store(done_by_all, std::memory_order_release);
}

void Channel::arrive(CpuExec& ex, const Call& call, Staging staging) {
  Arrival& here = mine().arrival(epoch_);
  here.fingerprint = call.fingerprint;
  here.fingerprint.history = history_;
  here.lease_offset = staging == Staging::kLeased ? lease_offset_ : slot_at_;
  here.lease_bytes = staging == Staging::kLeased ? lease_bytes_ : 0;
  here.in_place = staging == Staging::kLeased && in_place_;
  if (std::exchange(reads_lent_, false)) std::ranges::fill(lent_, nullptr);
  here.factor = call.factor;
  here.next_policy = uint32_t(next_policy_);
  mine().recent(epoch_) = here.fingerprint;
  history_ = next_history(here.fingerprint);
  ex.signal(here.flag, stamp(epoch_, 0));
}

void Channel::remember(const Fingerprint& call) {
  Fingerprint next = call;
  next.history = history_;
  history_ = next_history(next);
}

bool Channel::meet(CpuExec& ex, int peer) {
  Arrival& there = pad(peer).arrival(epoch_);
  if (!ex.wait(there.flag, stamp(epoch_, 0), peer)) return false;
  // A rank that has arrived at e is done with e - 1.
  if (!epoch_reached(done_[size_t(peer)], epoch_ - 1)) done_[size_t(peer)] = epoch_ - 1;
  if (peer == 0) {  // the value comes from a peer, so it can be anything
    const bool past = there.next_policy == uint32_t(CachePolicy::kPast);
    next_policy_ = past ? CachePolicy::kPast : CachePolicy::kCached;
  }
  if (std::memcmp(&there.fingerprint, &mine().arrival(epoch_).fingerprint, sizeof(Fingerprint)) == 0) return true;
  return ex.fail(Verdict::mismatch(peer, stamp(epoch_, 0), 0));
}

bool Channel::meet_all(CpuExec& ex) {
  return std::ranges::all_of(others(), [&](int peer) { return meet(ex, peer); });
}

bool Channel::own_staging(CpuExec& ex, std::span<std::byte>* out) {
  if (in_place_) {
    *out = {static_cast<std::byte*>(nullptr), size_t(lease_bytes_)};
    return true;
  }
  if (!wait_done(ex, leased_epoch())) return false;
  leased_epoch_.store(epoch_, std::memory_order_release);
  staging_[size_t(rank_)] = memory_[size_t(rank_)].arena + lease_offset_;
  *out = {staging_[size_t(rank_)], size_t(lease_bytes_)};
  return true;
}

bool Channel::staging(CpuExec& ex, int rank, size_t data, std::span<std::byte>* out) {
  const Arrival& there = pad(rank).arrival(epoch_);
  const uint64_t offset = there.lease_offset;
  const uint64_t bytes = there.lease_bytes;
  const PeerMemory& memory = memory_[size_t(rank)];
  lent_[size_t(rank)] = nullptr;
  if (there.in_place != 0) {
    const std::span<std::byte> tensors = memory.tensors ? memory.tensors() : std::span<std::byte>();
    if (bytes == 0 || offset >= tensors.size() || data > tensors.size() - offset) {
      return ex.fail(Verdict::bad_lease(rank));
    }
    lent_[size_t(rank)] = tensors.data() + offset;
    reads_lent_ = true;
    *out = {static_cast<std::byte*>(nullptr), size_t(bytes)};
    return true;
  }
  if (bytes == 0 || offset > memory.arena_bytes || bytes > memory.arena_bytes - offset) {
    return ex.fail(Verdict::bad_lease(rank));
  }
  staging_[size_t(rank)] = memory.arena + offset;
  *out = {memory.arena + offset, size_t(bytes)};
  return true;
}

bool Channel::leave_lenders(CpuExec& ex) {
  if (reads_lent_) {
    ex.signal(mine().fetched(), stamp(epoch_, UINT32_MAX));  // orders later accesses behind all that this rank has read
    for (const int peer : others()) {                        // a rank that staged may have ended and left
      if (!lent(peer)) continue;
      const PadHeader& header = pad(peer).header();
      const bool is_present = header.presence.load() != Presence::kLeft && !header.failure.readable();
      if (!is_present) return ex.alarm(peer);
    }
  }
  leave(ex);
  return !in_place_ || wait_done(ex, epoch_);
}

}  // namespace nvx::kernel
