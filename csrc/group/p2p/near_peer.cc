// Mail with ranks of this host, in shared memory.

#include <algorithm>
#include <cstring>

#include "group/p2p/mailbox.h"
#include "kernel/cpu/own_time.h"
#include "kernel/reduce/level.h"

namespace nvx {
namespace {

using kernel::kEnvelopes;

constexpr size_t kStreamDepth = 4;
constexpr uint64_t kMostGranted = kEnvelopes;  // the size of the ring of grants

uint64_t load(const kernel::FlagLine& line) { return line.flag.value.load(std::memory_order_acquire); }

/// Release: a rank that reads the value also sees this rank's earlier writes. The poke that follows wakes the peer.
void publish(kernel::FlagLine& line, uint64_t value) { line.flag.value.store(value, std::memory_order_release); }

}  // namespace

NearPeer::NearPeer(Mailbox& box, Core& core, int rank)
    : MailPeer(box, core, rank),
      out_(core.members.own_pad().outbox(core.members.local_rank_of(rank))),
      in_(core.members.own_pad().inbox(core.members.local_rank_of(rank))),
      their_out_(core.members.pad(core.members.local_rank_of(rank)).outbox(core.members.local_rank())),
      their_in_(core.members.pad(core.members.local_rank_of(rank)).inbox(core.members.local_rank())) {}

NearPeer::~NearPeer() {
  if (lease_) core_.neighbours().leases().free_when(lease_, core_.members.everybody_gone());
}

void NearPeer::clear() {
  MailPeer::clear();
  streaming_.clear();
  arriving_.clear();
}

/// Accesses no memory of a peer once the group has failed.
bool NearPeer::move() {
  bool moved = announce();
  moved |= take();
  moved |= grant();
  moved |= read_grants();
  moved |= stream();
  moved |= consume();
  return moved;
}

bool NearPeer::announce() {
  if (unannounced_.empty()) return false;
  const uint64_t taken = load(their_in_.taken);
  bool moved = false;
  while (!unannounced_.empty() && announced_ - taken < kEnvelopes) {
    const std::shared_ptr<Message> message = unannounced_.front();
    unannounced_.pop_front();
    kernel::Envelope& envelope = out_.envelopes[announced_ % kEnvelopes];
    envelope.message = ++announced_;
    envelope.tag = message->tag;
    envelope.bytes = message->bytes;
    envelope.dtype = message->dtype;
    envelope.carries_data = carries(message->bytes, kernel::kEnvelopePayload, load(their_in_.full) != 0);
    if (envelope.carries_data) {
      if (message->bytes) std::memcpy(envelope.payload, message->data, message->bytes);
      finish(message, {});
    } else {
      ungranted_[announced_] = message;
    }
    publish(out_.posted, announced_);
    moved = true;
  }
  if (moved) poke();
  return moved;
}

bool NearPeer::take() {
  const uint64_t posted = load(their_out_.posted);
  if (posted == taken_ || posted - taken_ > kEnvelopes) return false;
  while (taken_ != posted) {
    const kernel::Envelope& envelope = their_out_.envelopes[taken_++ % kEnvelopes];
    const bool carried = envelope.carries_data != 0;
    const DType dtype = size_t(envelope.dtype) < kernel::kDTypeCount ? envelope.dtype : DType::kBytes;
    Early early{rank_, envelope.message, envelope.tag, dtype, size_t(envelope.bytes), carried, {}};
    if (carried) {
      const size_t bytes = std::min<size_t>(envelope.bytes, kernel::kEnvelopePayload);
      early.data.assign(envelope.payload, envelope.payload + bytes);
      early.bytes = bytes;
    }
    come(std::move(early));
  }
  publish(in_.taken, taken_);
  poke();
  return true;
}

void NearPeer::tell_full(bool full) { publish(in_.full, full); }

bool NearPeer::grant() {
  if (to_grant_.empty() || arriving_.size() >= kMostGranted) return false;
  while (!to_grant_.empty() && arriving_.size() < kMostGranted) {
    in_.grants[granted_++ % kEnvelopes] = to_grant_.front().second;
    arriving_.push_back(to_grant_.front().first);
    to_grant_.pop_front();
  }
  publish(in_.granted, granted_);
  poke();
  return true;
}

bool NearPeer::read_grants() {
  if (ungranted_.empty()) return false;
  const uint64_t granted = load(their_in_.granted);
  if (granted == grants_seen_ || granted - grants_seen_ > kEnvelopes) return false;
  while (grants_seen_ != granted) {
    if (auto found = ungranted_.extract(their_in_.grants[grants_seen_++ % kEnvelopes]))
      streaming_.push_back(std::move(found.mapped()));
  }
  return true;
}

bool NearPeer::lease(size_t bytes) {
  const size_t wanted =
      std::clamp(std::bit_ceil(bytes), LeasePool::kSmallest, core_.members.facts.tuned(Tune::kMessageLease));
  if (lease_ && lease_wanted_ >= wanted) return true;
  if (lease_) {
    // Only between messages: the receiver reads the lease's location with its next chunk.
    if (load(their_in_.consumed) != streamed_) return false;
    core_.neighbours().leases().release(std::exchange(lease_, Span{}));
  }
  lease_wanted_ = wanted;
  lease_ = core_.neighbours().leases().acquire(wanted, &box_);
  out_.lease_offset = lease_.offset;
  out_.lease_bytes = lease_.bytes;
  return true;
}

Span NearPeer::yield() {
  if (!lease_ || !streaming_.empty() || load(their_in_.consumed) != streamed_) return {};
  return std::exchange(lease_, Span{});
}

bool NearPeer::stream() {
  bool moved = false;
  while (!streaming_.empty()) {
    const std::shared_ptr<Message> message = streaming_.front();
    try {
      if (message->moved_ == 0 && !lease(message->bytes)) break;
    } catch (const Error& error) {
      finish(message, core_.failures.fail(met_in(error.failure(), "in send")));
      streaming_.pop_front();
      return true;
    }
    if (streamed_ - load(their_in_.consumed) >= kStreamDepth) break;
    const size_t slot = lease_.bytes / kStreamDepth;
    const size_t bytes = std::min(slot, message->bytes - message->moved_);
    std::byte* chunk = core_.neighbours().arena().at(lease_.offset) + streamed_ % kStreamDepth * slot;
    if (!policies_) policies_ = std::make_unique<kernel::CachePolicyRecords>();
    kernel::CachePolicyRecord& policy = policies_->of(message->bytes);
    if (message->moved_ == 0) policy.now(policy.next());
    const kernel::OwnTime time(bytes);
    kernel::level().copy_by(policy.now())(chunk, message->data + message->moved_, bytes);
    const auto spent = time.spent();
    if (spent && bytes == std::min(slot, message->bytes)) policy.learn_of_writing(spent->count() / double(bytes));
    message->moved_ += bytes;
    publish(out_.streamed, ++streamed_);
    poke();
    moved = true;
    if (message->moved_ == message->bytes) {
      streaming_.pop_front();
      finish(message, {});
    }
  }
  return moved;
}

bool NearPeer::consume() {
  bool moved = false;
  while (!arriving_.empty() && load(their_out_.streamed) != consumed_) {
    const std::shared_ptr<Message> message = arriving_.front();
    const uint64_t lease_offset = their_out_.lease_offset, lease_bytes = their_out_.lease_bytes;
    const size_t slot = size_t(lease_bytes) / kStreamDepth;
    const kernel::PeerMemory& memory = core_.members.memory[size_t(core_.members.local_rank_of(rank_))];
    if (slot == 0 || lease_offset > memory.arena_bytes || lease_bytes > memory.arena_bytes - lease_offset) {
      const std::string peer = core_.members.topology.describe(rank_);
      finish(message, core_.failures.fail(core_.diagnosis.bad_lease(peer, "in recv")));
      arriving_.pop_front();
      return true;
    }
    const size_t bytes = std::min(slot, message->bytes - message->moved_);
    const std::byte* chunk = memory.arena + lease_offset + consumed_ % kStreamDepth * slot;
    const kernel::CachePolicy policy = policy_to_keep(message->bytes, core_.members.facts);
    kernel::level().copy_by(policy)(message->data + message->moved_, chunk, bytes);
    message->moved_ += bytes;
    publish(in_.consumed, ++consumed_);
    poke();
    moved = true;
    if (message->moved_ == message->bytes) {
      arriving_.pop_front();
      finish(message, {});
    }
  }
  return moved;
}

}  // namespace nvx
