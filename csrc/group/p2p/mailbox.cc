#include "group/p2p/mailbox.h"

#include <algorithm>
#include <cstring>

#include "kernel/cpu/direct.h"
#include "kernel/cpu/own_time.h"
#include "kernel/reduce/level.h"

namespace nvx {
namespace {

using kernel::kEnvelopes;

constexpr size_t kStreamDepth = 4;
constexpr size_t kMostStream = 2 << 20;
constexpr uint64_t kMostGranted = kEnvelopes;  // the size of the ring of grants
constexpr uint64_t kMostKept = 4 << 20;        // unexpected bytes of a peer; a few more envelopes may arrive

uint64_t load(const kernel::FlagLine& line) { return line.flag.value.load(std::memory_order_acquire); }

/// Release: a rank that reads the value also sees this rank's earlier writes. The poke that follows wakes the peer.
void publish(kernel::FlagLine& line, uint64_t value) { line.flag.value.store(value, std::memory_order_release); }

}  // namespace

Mailbox::Mailbox(Core& core)
    : core_(core),
      members_(core.members),
      failures_(core.failures),
      peers_(size_t(members_.size())),
      to_grant_(size_t(members_.size())) {
  core_.neighbours().leases().join(this);
  if (!core_.port) return;
  MutexLock lock(core_.port->mutex());
  core_.port->mail().on_news([this] { poke(members_.rank); });
}

Mailbox::~Mailbox() {
  close();
  core_.neighbours().leases().leave(this);
  MutexLock lock(mutex_);
  while (attendants_ != 0) lock.wait_for(waiters_gone_, std::chrono::milliseconds(10));
  for (Peer& peer : peers_) {
    if (peer.lease) core_.neighbours().leases().free_when(peer.lease, members_.everybody_gone());
  }
}

void Mailbox::close() {
  if (failures_.forked()) return;
  MutexLock lock(mutex_);
  if (!open_.empty())
    fail_all(Status(Code::kAborted, "nvx: group " + members_.name + " was destroyed with messages in flight"));
  Shift shift{Role::kPasserBy, Carrier::kPool};
  deliver(shift);
}

void Mailbox::poke(int peer) {
  Flag& bell = members_.pad(members_.local_rank_of(peer)).header().mail_bell.flag;
  bell.core.store(this_core(), std::memory_order_relaxed);
  bell.value.fetch_add(1, std::memory_order_seq_cst);  // several writers, so it only counts reasons to look
  if (bell.sleepers.load(std::memory_order_seq_cst) != 0) ring(bell);
}

void Mailbox::send(const std::shared_ptr<Message>& message, Carrier carrier) { begin(message, carrier); }

void Mailbox::receive(const std::shared_ptr<Message>& message, Carrier carrier) {
  message->receives_ = true;
  begin(message, carrier);
}

void Mailbox::begin(const std::shared_ptr<Message>& message, Carrier carrier) {
  if (failures_.forked()) return refuse(*message);
  MutexLock lock(mutex_);
  enter(message);
  set_going(carrier);
}

void Mailbox::post(const std::shared_ptr<Message>& message) {
  if (failures_.forked()) return refuse(*message);
  MutexLock lock(mutex_);
  enter(message);
}

void Mailbox::expect(const std::shared_ptr<Message>& message) {
  message->receives_ = true;
  if (failures_.forked()) return refuse(*message);
  MutexLock lock(mutex_);
  enter(message);
  if (!open_.empty()) find_attendant();
}

void Mailbox::tell_of(int peer, int64_t tag) {
  MutexLock lock(mutex_);
  if (failures_.failed() || failures_.closed()) return;  // the wait has already ended
  come({peer, 0, tag, DType::kBytes, 0, /*carried=*/true, {}});
}

void Mailbox::forget(int64_t tag) {
  MutexLock lock(mutex_);
  for (auto early = early_.begin(); early != early_.end();) {
    const auto next = std::next(early);
    if (early->tag == tag) {
      let_go(*early);
      early_.erase(early);
    }
    early = next;
  }
}

std::string Message::describe() const {
  std::string whom = receives_ ? "from " : "to ";
  whom += peer == kAnySource ? "any rank" : "rank " + std::to_string(peer);
  if (called) return std::string(called) + "(" + whom + ")";
  if (tag != 0) whom += ", tag " + std::to_string(tag);
  return std::string(receives_ ? "recv(" : "send(") + name(dtype) + ", " + std::to_string(bytes / size_of(dtype)) +
         " elements, " + whom + ")";
}

void Mailbox::push(Carrier carrier) {
  if (failures_.forked()) return;
  MutexLock lock(mutex_);
  set_going(carrier);
}

void Mailbox::enter(const std::shared_ptr<Message>& message) {
  if (const auto ahead = std::move(message->ahead)) {
    ahead->timeout = message->timeout;
    enter(ahead);
  }
  message->deadline_ = message->stands ? Deadline() : Deadline::after(core_.waits.span_of(message->timeout));
  open_.insert(message);
  if (const Status refused = failures_.check_alive(); !refused.ok()) {
    finish(message, refused);
  } else if (failures_.told(Clock::duration::zero())) {
    finish(message, failures_.came_late(message->describe()));
  } else if (!message->receives_) {
    peers_[size_t(message->peer)].unannounced.push_back(message);
  } else if (!match_early(message)) {
    receives_.push_back(message);
  }
}

void Mailbox::set_going(Carrier carrier) {
  Shift shift{Role::kPasserBy, carrier};
  move(shift.next_look);
  if (carrier == Carrier::kPool && !open_.empty()) find_attendant();
  deliver(shift);
}

/// For a forked child, in which a thread of the parent may hold the lock, and never release it.
void Mailbox::refuse(Message& message) {
  message.status_ = failures_.check_alive();
  message.done_.store(true, std::memory_order_release);
  call(message);
}

/// Moves as much as possible until `until`, since peers may send without end. True if there may be more.
bool Mailbox::move(Clock::time_point until) {
  while (advance()) {
    if (Clock::now() >= until) return true;
  }
  return false;
}

/// Accesses no memory of a peer once the group has failed.
bool Mailbox::advance() {
  if (open_.empty()) return false;
  bool moved = false;
  if (core_.port && !failures_.failed()) moved |= read_port();
  for (int peer = 0; peer < int(peers_.size()); ++peer) {
    if (failures_.failed()) return false;
    if (far(peer)) {
      moved |= announce_far(peer);
      moved |= grant_far(peer);
      continue;
    }
    moved |= announce(peer);
    moved |= take(peer);
    moved |= grant(peer);
    moved |= read_grants(peer);
    moved |= stream(peer);
    moved |= consume(peer);
  }
  return moved;
}

/// An empty message has no data that could follow later.
bool Mailbox::carries(size_t bytes, size_t most, bool full) { return bytes == 0 || (bytes <= most && !full); }

bool Mailbox::announce(int rank) {
  Peer& peer = peers_[size_t(rank)];
  if (peer.unannounced.empty()) return false;
  kernel::Outbox& box = members_.own_pad().outbox(members_.local_rank_of(rank));
  const kernel::Inbox& there = members_.pad(members_.local_rank_of(rank)).inbox(members_.local_rank());
  const uint64_t taken = load(there.taken);
  bool moved = false;
  while (!peer.unannounced.empty() && peer.announced - taken < kEnvelopes) {
    const std::shared_ptr<Message> message = peer.unannounced.front();
    peer.unannounced.pop_front();
    kernel::Envelope& envelope = box.envelopes[peer.announced % kEnvelopes];
    envelope.message = ++peer.announced;
    envelope.tag = message->tag;
    envelope.bytes = message->bytes;
    envelope.dtype = message->dtype;
    envelope.carries_data = carries(message->bytes, kernel::kEnvelopePayload, load(there.full) != 0);
    if (envelope.carries_data) {
      if (message->bytes) std::memcpy(envelope.payload, message->data, message->bytes);
      finish(message, {});
    } else {
      peer.ungranted[peer.announced] = message;
    }
    publish(box.posted, peer.announced);
    moved = true;
  }
  if (moved) poke(rank);
  return moved;
}

bool Mailbox::take(int rank) {
  Peer& peer = peers_[size_t(rank)];
  kernel::Outbox& box = members_.pad(members_.local_rank_of(rank)).outbox(members_.local_rank());
  const uint64_t posted = load(box.posted);
  if (posted == peer.taken || posted - peer.taken > kEnvelopes) return false;
  while (peer.taken != posted) {
    const kernel::Envelope& envelope = box.envelopes[peer.taken++ % kEnvelopes];
    const bool carried = envelope.carries_data != 0;
    const DType dtype = size_t(envelope.dtype) < kernel::kDTypeCount ? envelope.dtype : DType::kBytes;
    Early early{rank, envelope.message, envelope.tag, dtype, size_t(envelope.bytes), carried, {}};
    if (carried) {
      const size_t bytes = std::min<size_t>(envelope.bytes, kernel::kEnvelopePayload);
      early.data.assign(envelope.payload, envelope.payload + bytes);
      early.bytes = bytes;
    }
    come(std::move(early));
  }
  publish(members_.own_pad().inbox(members_.local_rank_of(rank)).taken, peer.taken);
  poke(rank);
  return true;
}

/// Gives an arrived message to the first matching receive.
void Mailbox::come(Early&& early) {
  const auto fits = [&](const std::shared_ptr<Message>& m) {
    return (m->peer == early.peer || m->peer == kAnySource) && m->tag == early.tag;
  };
  const auto found = std::find_if(receives_.begin(), receives_.end(), fits);
  if (found == receives_.end()) {
    keep(std::move(early));
    return;
  }
  const std::shared_ptr<Message> receive = *found;
  receives_.erase(found);
  accept(receive, std::move(early));
}

void Mailbox::keep(Early&& early) {
  Peer& peer = peers_[size_t(early.peer)];
  peer.kept += early.data.size();
  if (!peer.full && peer.kept > kMostKept) tell_full(early.peer, true);
  early_.push_back(std::move(early));
}

void Mailbox::let_go(const Early& early) {
  Peer& peer = peers_[size_t(early.peer)];
  peer.kept -= early.data.size();
  if (peer.full && peer.kept < kMostKept / 2) tell_full(early.peer, false);
}

/// Bounds unexpected data: from here on the sender keeps the data until there is a receive.
void Mailbox::tell_full(int rank, bool full) {
  peers_[size_t(rank)].full = full;
  if (!far(rank)) return publish(members_.own_pad().inbox(members_.local_rank_of(rank)).full, full);
  ++peers_[size_t(rank)].told.turns;
  tell_taken(rank);
}

bool Mailbox::match_early(const std::shared_ptr<Message>& receive) {
  const auto found = std::find_if(early_.begin(), early_.end(), [&](const Early& early) {
    return (receive->peer == early.peer || receive->peer == kAnySource) && receive->tag == early.tag;
  });
  if (found == early_.end()) return false;
  Early early = std::move(*found);
  early_.erase(found);
  let_go(early);
  return accept(receive, std::move(early));
}

bool Mailbox::accept(const std::shared_ptr<Message>& receive, Early&& early) {
  receive->peer = early.peer;
  if (early.bytes != receive->bytes || early.dtype != receive->dtype) {
    const auto words = [](const char* verb, DType dtype, size_t bytes) {
      return std::string(verb) + " " + std::to_string(bytes / size_of(dtype)) + " elements of " + name(dtype);
    };
    finish(
        receive,
        failures_.fail(
            {.code = Code::kMismatch,
             .cause = "send/recv mismatch in group " + members_.name + ": " + members_.topology.describe(early.peer) +
                      words(" sends", early.dtype, early.bytes) + ", " + members_.topology.describe(members_.rank) +
                      words(" receives", receive->dtype, receive->bytes) + " (tag " + std::to_string(early.tag) + ")",
             .context = core_.diagnosis.me(),
             .advice = "give both tensors the same number of elements and the same type"}));
    return true;
  }
  if (early.carried) {
    if (receive->bytes) std::memcpy(receive->data, early.data.data(), receive->bytes);
    finish(receive, {});
  } else {
    to_grant_[size_t(early.peer)].emplace_back(receive, early.number);
  }
  return true;
}

bool Mailbox::grant(int rank) {
  auto& waiting = to_grant_[size_t(rank)];
  Peer& peer = peers_[size_t(rank)];
  if (waiting.empty() || peer.arriving.size() >= kMostGranted) return false;
  kernel::Inbox& box = members_.own_pad().inbox(members_.local_rank_of(rank));
  while (!waiting.empty() && peer.arriving.size() < kMostGranted) {
    box.grants[peer.granted++ % kEnvelopes] = waiting.front().second;
    peer.arriving.push_back(waiting.front().first);
    waiting.pop_front();
  }
  publish(box.granted, peer.granted);
  poke(rank);
  return true;
}

bool Mailbox::read_grants(int rank) {
  Peer& peer = peers_[size_t(rank)];
  if (peer.ungranted.empty()) return false;
  const kernel::Inbox& box = members_.pad(members_.local_rank_of(rank)).inbox(members_.local_rank());
  const uint64_t granted = load(box.granted);
  if (granted == peer.grants_seen || granted - peer.grants_seen > kEnvelopes) return false;
  while (peer.grants_seen != granted) {
    const auto found = peer.ungranted.find(box.grants[peer.grants_seen++ % kEnvelopes]);
    if (found == peer.ungranted.end()) continue;
    peer.streaming.push_back(found->second);
    peer.ungranted.erase(found);
  }
  return true;
}

bool Mailbox::lease(Peer& peer, int rank, size_t bytes) {
  const size_t wanted = std::clamp(std::bit_ceil(bytes), LeasePool::kSmallest, kMostStream);
  if (peer.lease && peer.lease_wanted >= wanted) return true;
  if (peer.lease) {
    // Only between messages: the receiver reads the lease's location with its next chunk.
    if (load(members_.pad(members_.local_rank_of(rank)).inbox(members_.local_rank()).consumed) != peer.streamed)
      return false;
    core_.neighbours().leases().release(std::exchange(peer.lease, Span{}));
  }
  peer.lease_wanted = wanted;
  peer.lease = core_.neighbours().leases().acquire(wanted, this);
  kernel::Outbox& box = members_.own_pad().outbox(members_.local_rank_of(rank));
  box.lease_offset = peer.lease.offset;
  box.lease_bytes = peer.lease.bytes;
  return true;
}

Span Mailbox::yield() {
  if (failures_.forked() || !mutex_.try_lock()) return {};  // the lock's holder may wait for the pool
  Span span;
  for (int rank = 0; rank < int(peers_.size()) && !span && !failures_.failed() && !failures_.closed(); ++rank) {
    Peer& peer = peers_[size_t(rank)];
    if (!peer.lease || !peer.streaming.empty()) continue;
    if (load(members_.pad(members_.local_rank_of(rank)).inbox(members_.local_rank()).consumed) != peer.streamed)
      continue;
    span = std::exchange(peer.lease, Span{});
  }
  mutex_.unlock();
  return span;
}

bool Mailbox::stream(int rank) {
  Peer& peer = peers_[size_t(rank)];
  bool moved = false;
  while (!peer.streaming.empty()) {
    const std::shared_ptr<Message> message = peer.streaming.front();
    try {
      if (message->moved_ == 0 && !lease(peer, rank, message->bytes)) break;
    } catch (const Error& error) {
      finish(message, failures_.fail(met_in(error.failure(), "in send")));
      peer.streaming.pop_front();
      return true;
    }
    if (peer.streamed - load(members_.pad(members_.local_rank_of(rank)).inbox(members_.local_rank()).consumed) >=
        kStreamDepth)
      break;
    const size_t slot = peer.lease.bytes / kStreamDepth;
    const size_t bytes = std::min(slot, message->bytes - message->moved_);
    std::byte* chunk = core_.neighbours().arena().at(peer.lease.offset) + peer.streamed % kStreamDepth * slot;
    if (!peer.policies) peer.policies = std::make_unique<kernel::CachePolicyRecords>();
    kernel::CachePolicyRecord& policy = peer.policies->of(message->bytes);
    if (message->moved_ == 0) policy.now(policy.next());
    const kernel::OwnTime time(bytes);
    kernel::level().copy_by(policy.now())(chunk, message->data + message->moved_, bytes);
    const auto spent = time.spent();
    if (spent && bytes == std::min(slot, message->bytes)) policy.learn_of_writing(spent->count() / double(bytes));
    message->moved_ += bytes;
    publish(members_.own_pad().outbox(members_.local_rank_of(rank)).streamed, ++peer.streamed);
    poke(rank);
    moved = true;
    if (message->moved_ == message->bytes) {
      peer.streaming.pop_front();
      finish(message, {});
    }
  }
  return moved;
}

bool Mailbox::consume(int rank) {
  Peer& peer = peers_[size_t(rank)];
  if (peer.arriving.empty()) return false;
  const kernel::Outbox& box = members_.pad(members_.local_rank_of(rank)).outbox(members_.local_rank());
  bool moved = false;
  while (!peer.arriving.empty() && load(box.streamed) != peer.consumed) {
    const std::shared_ptr<Message> message = peer.arriving.front();
    const uint64_t lease_offset = box.lease_offset, lease_bytes = box.lease_bytes;
    const size_t slot = size_t(lease_bytes) / kStreamDepth;
    const kernel::PeerMemory& memory = members_.memory[size_t(members_.local_rank_of(rank))];
    if (slot == 0 || lease_offset > memory.arena_bytes || lease_bytes > memory.arena_bytes - lease_offset) {
      finish(message, failures_.fail(core_.diagnosis.bad_lease(members_.topology.describe(rank), "in recv")));
      peer.arriving.pop_front();
      return true;
    }
    const size_t bytes = std::min(slot, message->bytes - message->moved_);
    const std::byte* chunk = memory.arena + lease_offset + peer.consumed % kStreamDepth * slot;
    kernel::level().copy_by(policy_to_keep(message->bytes, members_.facts))(message->data + message->moved_, chunk,
                                                                            bytes);
    message->moved_ += bytes;
    publish(members_.own_pad().inbox(members_.local_rank_of(rank)).consumed, ++peer.consumed);
    poke(rank);
    moved = true;
    if (message->moved_ == message->bytes) {
      peer.arriving.pop_front();
      finish(message, {});
    }
  }
  return moved;
}

void Mailbox::finish(const std::shared_ptr<Message>& message, Status status) {
  message->status_ = std::move(status);
  message->done_.store(true, std::memory_order_release);
  open_.erase(message);
  if (message->stands) ++peers_[size_t(message->peer)].untold;
  finished_.push_back(message);
}

void Mailbox::fail_all(const Status& status) {
  receives_.clear();
  early_.clear();
  for (auto& waiting : to_grant_) waiting.clear();
  for (Peer& peer : peers_) {
    peer.unannounced.clear();
    peer.ungranted.clear();
    peer.streaming.clear();
    peer.arriving.clear();
    peer.transfers_out.clear();
    peer.transfers_in.clear();
  }
  if (core_.port) {
    MutexLock lock(core_.port->mutex());
    core_.port->mail().drop();
  }
  while (!open_.empty()) finish(std::shared_ptr<Message>(*open_.begin()), status);
}

}  // namespace nvx
