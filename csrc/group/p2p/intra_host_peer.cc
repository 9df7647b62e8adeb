// Messages with ranks of this host, in shared memory.

#include <algorithm>
#include <cstring>
#include <thread>

#include "base/round_up.h"
#include "group/p2p/mailbox.h"
#include "kernel/cpu/own_time.h"
#include "kernel/reduce/level.h"

namespace nvx {
namespace {

using kernel::ChunkPlace;
using kernel::kByCopies;
using kernel::kEnvelopes;
using kernel::kInPlace;

constexpr size_t kStreamDepth = 4;
constexpr uint64_t kMostGranted = kEnvelopes;  // the size of the ring of grants

uint64_t load(const kernel::FlagLine& line) { return line.flag.value.load(std::memory_order_acquire); }

/// Release: a rank that reads the value also sees this rank's earlier writes. The `wake()` that follows wakes the peer.
void publish(kernel::FlagLine& line, uint64_t value) { line.flag.value.store(value, std::memory_order_release); }

}  // namespace

IntraHostPeer::IntraHostPeer(Mailbox& box, Core& core, int rank)
    : MessagePeer(box, core, rank),
      out_(core.members.own_pad().outbox(core.members.local_rank_of(rank))),
      in_(core.members.own_pad().inbox(core.members.local_rank_of(rank))),
      their_out_(core.members.pad(core.members.local_rank_of(rank)).outbox(core.members.local_rank())),
      their_in_(core.members.pad(core.members.local_rank_of(rank)).inbox(core.members.local_rank())) {}

IntraHostPeer::~IntraHostPeer() {
  if (lease_) core_.shm().leases().free_when(lease_, core_.members.all_peers_gone());
  release_slots();
}

/// They are free when the peer has read them, though no message may be open then that would poll.
void IntraHostPeer::release_slots() {
  if (!slots_) return;
  const auto released = [gone = core_.members.all_peers_gone_keeping_pads(), copy = sending_,
                         &consumed = their_in_.consumed, streamed = streamed_] {
    return (!copy || !copy->may_run()) && (gone() || load(consumed) == streamed);
  };
  core_.copies->release_when(std::exchange(slots_, Span{}), released);
}

void IntraHostPeer::clear(Clock::time_point until) {
  MessagePeer::clear(until);
  ungranted_.clear();
  streaming_.clear();
  arriving_.clear();
  for (const auto& copy : {sending_, fetching_}) {
    if (copy) copy->give_up();
  }
  // The user may write to the tensor once the receive has ended.
  while (fetching_ && !fetching_->over() && Clock::now() < until)
    std::this_thread::sleep_for(std::chrono::microseconds(50));
}

bool IntraHostPeer::arriving() const {
  return fetching_ || (!arriving_.empty() && load(their_out_.streamed) != consumed_);
}

bool IntraHostPeer::lends() const {
  return !streaming_.empty() && streaming_.front()->in_place_ && streaming_.front()->moved_ != 0 && !is_read();
}

/// Accesses no memory of a peer once the group has failed.
bool IntraHostPeer::move() {
  bool moved = announce();
  moved |= take();
  moved |= grant();
  moved |= read_grants();
  moved |= stream();
  moved |= consume();
  if (streaming_.empty()) release_slots();
  return moved;
}

bool IntraHostPeer::is_read() const { return load(their_in_.consumed) == streamed_; }

bool IntraHostPeer::announce() {
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
    envelope.on_device = message->at != 0;
    envelope.place = message->place_ = message->at ? core_.copies->place_of(message->at, message->bytes) : 0;
    envelope.carries_data =
        !message->at && carries(message->bytes, kernel::kEnvelopePayload, load(their_in_.full) != 0);
    if (envelope.carries_data) {
      if (message->bytes) std::memcpy(envelope.payload, message->data, message->bytes);
      finish(message, {});
    } else {
      ungranted_[announced_] = message;
    }
    publish(out_.posted, announced_);
    moved = true;
  }
  if (moved) wake();
  return moved;
}

bool IntraHostPeer::take() {
  const uint64_t posted = load(their_out_.posted);
  if (posted == taken_ || posted - taken_ > kEnvelopes) return false;
  while (taken_ != posted) {
    const kernel::Envelope& envelope = their_out_.envelopes[taken_++ % kEnvelopes];
    const bool carried = envelope.carries_data != 0;
    const DType dtype = size_t(envelope.dtype) < kernel::kDTypeCount ? envelope.dtype : DType::kBytes;
    Unexpected unexpected{rank_, envelope.message,        envelope.tag,  dtype, size_t(envelope.bytes), carried,
                          {},    envelope.on_device != 0, envelope.place};
    if (carried) {
      const size_t bytes = std::min<size_t>(envelope.bytes, kernel::kEnvelopePayload);
      unexpected.data.assign(envelope.payload, envelope.payload + bytes);
      unexpected.bytes = bytes;
    }
    arrive(std::move(unexpected));
  }
  publish(in_.taken, taken_);
  wake();
  return true;
}

void IntraHostPeer::send_full(bool full) { publish(in_.full, full); }

/// A receive whose device has not reached it keeps no other one from being granted.
bool IntraHostPeer::grant() {
  bool moved = false;
  for (auto next = to_grant_.begin(); next != to_grant_.end() && arriving_.size() < kMostGranted;) {
    const auto& [message, number] = *next;
    if (message->by_copies && !message->reached.load(std::memory_order_acquire)) {
      ++next;
      continue;
    }
    in_.grants[granted_++ % kEnvelopes] =
        number | (message->by_copies ? kByCopies : 0) | (message->in_place_ ? kInPlace : 0);
    arriving_.push_back(message);
    next = to_grant_.erase(next);
    moved = true;
  }
  if (!moved) return false;
  publish(in_.granted, granted_);
  wake();
  return true;
}

bool IntraHostPeer::read_grants() {
  if (ungranted_.empty()) return false;
  const uint64_t granted = load(their_in_.granted);
  if (granted == grants_seen_ || granted - grants_seen_ > kEnvelopes) return false;
  while (grants_seen_ != granted) {
    const uint64_t grant = their_in_.grants[grants_seen_++ % kEnvelopes];
    const auto found = ungranted_.extract(grant & ~(kByCopies | kInPlace));
    if (!found) continue;
    Message& message = *found.mapped();
    message.by_copies = message.at && (grant & kByCopies) != 0;
    message.in_place_ = message.by_copies && message.place_ && (grant & kInPlace) != 0;
    streaming_.push_back(std::move(found.mapped()));
  }
  return true;
}

/// Chooses where the chunks of a message go. Changes that only between messages, because the receiver reads it with its
/// next chunk. False: the receiver has not read all of the last message.
bool IntraHostPeer::lease(Message& message) {
  const bool is_read = this->is_read();
  if (message.in_place_) {
    if (is_read) show_lease(ChunkPlace::kPool, {message.place_ - 1, message.bytes});
    return is_read;
  }
  if (message.by_copies) {
    if (lease_slots(message.bytes, is_read)) return true;
    if (!is_read) return false;
    message.by_copies = false;  // no room
  }
  return lease_on_host(message.bytes, is_read);
}

bool IntraHostPeer::lease_slots(size_t bytes, bool is_read) {
  if (slots_ && slots_wanted_ >= bytes && out_.lease_place == ChunkPlace::kSlots) return true;
  if (!is_read) return false;
  if (slots_ && slots_wanted_ < bytes) core_.copies->release(std::exchange(slots_, Span{}));
  if (!slots_) slots_ = core_.copies->lease(slots_wanted_ = bytes);
  if (slots_) show_lease(ChunkPlace::kSlots, slots_);
  return bool(slots_);
}

/// The next part of the lease, in rotation (`group/plan/plan.h`), if the receiver has read all of the last one.
/// Otherwise the last part again, if it is large enough.
bool IntraHostPeer::lease_on_host(size_t bytes, bool is_read) {
  const PlanFacts& facts = core_.members.facts;
  const size_t wanted = std::clamp(std::bit_ceil(bytes), LeasePool::kSmallest, facts.tuned(Tune::kMessageLease));
  const size_t held = std::max(lease_wanted_, lease_.bytes);
  if (!is_read)
    return out_.lease_place == ChunkPlace::kHost && held >= wanted && part_.bytes >= std::min(wanted, lease_.bytes);
  const size_t rotated = std::max(wanted, rotation(facts) / std::max<size_t>(facts.ranks - 1, 1));
  if (!lease_ || held < wanted) {
    if (lease_) core_.shm().leases().release(std::exchange(lease_, Span{}));
    lease_wanted_ = wanted;
    lease_ = core_.shm().leases().acquire(rotated, wanted, &box_);
    lease_at_ = 0;
  }
  const size_t part = std::min(wanted, lease_.bytes);
  if (lease_at_ + part > std::min(rotated, lease_.bytes)) lease_at_ = 0;
  part_ = {lease_.offset + lease_at_, part};
  show_lease(ChunkPlace::kHost, part_);
  lease_at_ += round_up(std::min(bytes, part), 4096);
  return true;
}

void IntraHostPeer::show_lease(ChunkPlace place, const Span& span) {
  out_.lease_place = place;
  out_.lease_offset = span.offset;
  out_.lease_bytes = span.bytes;
}

Span IntraHostPeer::release_idle() {
  if (!lease_ || !streaming_.empty() || load(their_in_.consumed) != streamed_) return {};
  return std::exchange(lease_, Span{});
}

bool IntraHostPeer::stream() {
  bool moved = false;
  while (!streaming_.empty()) {
    const std::shared_ptr<Message> message = streaming_.front();
    Status status;
    size_t written = 0;
    try {
      if (message->moved_ == 0 && !lease(*message)) break;
    } catch (const Error& error) {
      status = Status(with_context(error.failure(), "in send"));
    }
    if (status.ok() && message->by_copies) {
      written = copy_to_slots(message, &status);
    } else if (status.ok() && (!message->at || stage(message, &status))) {
      written = write_chunk(*message);
    }
    if (written) publish(out_.streamed, streamed_ += written), wake();
    moved |= written != 0;
    const bool whole = message->moved_ == message->bytes && !sending_ && (!message->in_place_ || is_read());
    if (status.ok() && !whole && written == 0) break;
    if (status.ok() && !whole) continue;
    streaming_.pop_front();
    finish(message, status.ok() ? status : core_.failures.fail(status.failure()));
    moved = true;
    if (!status.ok()) break;
  }
  return moved;
}

size_t IntraHostPeer::write_chunk(Message& message) {
  if (streamed_ - load(their_in_.consumed) >= kStreamDepth) return 0;
  const size_t slot = part_.bytes / kStreamDepth;
  const size_t bytes = std::min(slot, message.bytes - message.moved_);
  std::byte* chunk = core_.shm().arena().at(part_.offset) + streamed_ % kStreamDepth * slot;
  if (!policies_) policies_ = std::make_unique<kernel::CachePolicyRecords>();
  kernel::CachePolicyRecord& policy = policies_->of(message.bytes);
  if (message.moved_ == 0) policy.now(policy.next());
  const kernel::OwnTime time(bytes);
  kernel::level().copy_by(policy.now())(chunk, message.data + message.moved_, bytes);
  const auto spent = time.spent();
  if (spent && bytes == std::min(slot, message.bytes)) policy.add_write(spent->count() / double(bytes));
  message.moved_ += bytes;
  return 1;
}

/// Begins to fill half of the slots, while the peer reads the other half. Returns the number of chunks that are there.
size_t IntraHostPeer::copy_to_slots(const std::shared_ptr<Message>& message, Status* status) {
  if (sending_) {
    if (!sending_->over()) return 0;
    *status = sending_->status();
    return status->ok() ? std::exchange(sending_, nullptr)->pieces.size() : 0;
  }
  if (message->in_place_) return std::exchange(message->moved_, message->bytes) == 0;
  const uint64_t free = kStreamDepth - (streamed_ - load(their_in_.consumed));
  const size_t slot = slots_.bytes / kStreamDepth;
  std::vector<DeviceCopy::Piece> pieces;
  for (uint64_t n = streamed_; n < streamed_ + std::min(free, kStreamDepth / 2); ++n) {
    const size_t bytes = std::min(slot, message->bytes - message->moved_);
    if (bytes == 0) break;
    const DevicePtr to = core_.copies->for_peer(core_.members.local_rank_of(rank_), slots_) + n % kStreamDepth * slot;
    pieces.push_back({to, message->at + message->moved_, bytes});
    message->moved_ += bytes;
  }
  if (!pieces.empty()) sending_ = begin(std::move(pieces), *message);
  return 0;
}

/// Copies the data of a device to the stand-in, for a receiver in host memory. True if it is there.
bool IntraHostPeer::stage(const std::shared_ptr<Message>& message, Status* status) {
  if (message->staged_) return true;
  if (!sending_) sending_ = begin({{DevicePtr(message->data), message->at, message->bytes}}, *message);
  if (!sending_->over()) return false;
  *status = sending_->status();
  if (status->ok()) sending_.reset();
  return message->staged_ = status->ok();
}

std::shared_ptr<DeviceCopy> IntraHostPeer::begin(std::vector<DeviceCopy::Piece> pieces, const Message& message) {
  auto copy = std::make_shared<DeviceCopy>();
  copy->pieces = std::move(pieces);
  copy->memory = message.memory;
  copy->on_end = [owner = core_.owner(), &members = core_.members] {
    if (const auto group = owner.lock()) nvx::wake(members, members.rank);
  };
  core_.copies->begin(copy);
  return copy;
}

bool IntraHostPeer::consume() {
  bool moved = false;
  for (uint64_t chunks; !arriving_.empty() && (chunks = load(their_out_.streamed) - consumed_) != 0;) {
    const std::shared_ptr<Message> message = arriving_.front();
    const ChunkPlace place = their_out_.lease_place;
    Status status;
    const size_t read =
        place == ChunkPlace::kHost ? read_chunk(*message, &status) : fetch(message, place, chunks, &status);
    if (status.ok() && read == 0) break;
    // A peer that has failed may have written to its tensor while it was read.
    if (place == ChunkPlace::kPool && status.ok() && core_.failures.check_reports(Clock::duration::zero())) return true;
    if (status.ok()) publish(in_.consumed, consumed_ += read), wake();
    moved = true;
    if (status.ok() && message->moved_ != message->bytes) continue;
    arriving_.pop_front();
    finish(message, status.ok() ? status : core_.failures.fail(status.failure()));
    if (!status.ok()) break;
  }
  return moved;
}

size_t IntraHostPeer::read_chunk(Message& message, Status* status) {
  const uint64_t lease_offset = their_out_.lease_offset, lease_bytes = their_out_.lease_bytes;
  const size_t slot = size_t(lease_bytes) / kStreamDepth;
  const kernel::PeerMemory& memory = core_.members.memory[size_t(core_.members.local_rank_of(rank_))];
  if (slot == 0 || lease_offset > memory.arena_bytes || lease_bytes > memory.arena_bytes - lease_offset) {
    *status = Status(core_.diagnosis.bad_lease(core_.members.topology.describe(rank_), "in recv"));
    return 0;
  }
  message.by_copies = false;
  const size_t bytes = std::min(slot, message.bytes - message.moved_);
  const std::byte* chunk = memory.arena + lease_offset + consumed_ % kStreamDepth * slot;
  const kernel::CachePolicy policy = policy_to_keep(message.bytes, core_.members.facts);
  kernel::level().copy_by(policy)(message.data + message.moved_, chunk, bytes);
  message.moved_ += bytes;
  return 1;
}

/// Begins to copy the chunks that are there to the tensor. Returns the number of chunks that have arrived in it.
size_t IntraHostPeer::fetch(const std::shared_ptr<Message>& message, ChunkPlace place, uint64_t chunks,
                            Status* status) {
  if (fetching_) {
    if (!fetching_->over()) return 0;
    const std::shared_ptr<DeviceCopy> copy = std::exchange(fetching_, nullptr);
    *status = copy->status();
    for (const DeviceCopy::Piece& piece : copy->pieces) message->moved_ += piece.bytes;
    return copy->pieces.size();
  }
  const bool in_slots = place == ChunkPlace::kSlots;
  const uint64_t offset = their_out_.lease_offset, lease_bytes = their_out_.lease_bytes;
  const int local_rank = core_.members.local_rank_of(rank_);
  const size_t slot = in_slots ? size_t(lease_bytes) / kStreamDepth : message->bytes;
  const DevicePtr from = !message->by_copies ? 0
                         : in_slots          ? core_.copies->in_arena(local_rank, offset, lease_bytes)
                                             : core_.copies->in_pool(local_rank, offset, message->bytes);
  if (from == 0 || slot == 0) {
    *status = Status(core_.diagnosis.bad_lease(core_.members.topology.describe(rank_), "in recv"));
    return 0;
  }
  std::vector<DeviceCopy::Piece> pieces;
  size_t done = message->moved_;
  for (uint64_t n = consumed_; n < consumed_ + std::min<uint64_t>(chunks, kStreamDepth) && done < message->bytes; ++n) {
    const size_t bytes = std::min(slot, message->bytes - done);
    pieces.push_back({message->at + done, from + (in_slots ? n % kStreamDepth * slot : 0), bytes});
    done += bytes;
  }
  fetching_ = begin(std::move(pieces), *message);
  return 0;
}

}  // namespace nvx
