#include "group/mailbox.h"

#include <algorithm>
#include <cstring>

#include "group/group.h"
#include "kernel/direct.h"
#include "kernel/level.h"

namespace nvx {
namespace {

using kernel::kEnvelopes;

constexpr size_t kStreamDepth = 4;
constexpr size_t kMostStream = 2 << 20;
constexpr std::chrono::milliseconds kGlance{1};  // how late an attendant that lingers finds new messages
constexpr std::chrono::milliseconds kLinger{50};
constexpr uint64_t kMostGranted = kEnvelopes;  // the ring of grants
constexpr uint64_t kFarEnvelopes = 64;         // announcements to another host that it has not read

uint64_t load(const kernel::FlagLine& line) { return line.flag.value.load(std::memory_order_acquire); }

/// The poke that follows wakes the peer, so this need not.
void publish(kernel::FlagLine& line, uint64_t value) { line.flag.value.store(value, std::memory_order_release); }

}  // namespace

Mailbox::Mailbox(Group& group) : group_(group), peers_(size_t(group.size())), to_grant_(size_t(group.size())) {
  if (!group.port()) return;
  MutexLock lock(group.port()->mutex());
  group.port()->on_mail([this] { poke(group_.rank()); });
}

Mailbox::~Mailbox() {
  close();
  MutexLock lock(mutex_);
  while (attended_) lock.wait_for(waiters_gone_, std::chrono::milliseconds(10));
  for (Peer& peer : peers_) {
    if (peer.lease) group_.neighbours().leases().bury(peer.lease, group_.everybody_gone());
  }
}

void Mailbox::close() {
  MutexLock lock(mutex_);
  if (!open_.empty())
    fail_all(Status(Code::kPeerLeft, "nvx: group " + group_.name() + " was destroyed with messages in flight"));
  deliver();
}

void Mailbox::poke(int peer) {
  Flag& bell = group_.pad(group_.seat_of(peer)).header().mail_bell.flag;
  bell.value.fetch_add(1, std::memory_order_seq_cst);  // several writers: only a counter of reasons to look
  if (bell.sleepers.load(std::memory_order_seq_cst) != 0) ring(bell);
}

void Mailbox::send(const std::shared_ptr<Message>& message, Carrier carrier) { begin(message, carrier); }

void Mailbox::receive(const std::shared_ptr<Message>& message, Carrier carrier) {
  message->receives_ = true;
  begin(message, carrier);
}

void Mailbox::begin(const std::shared_ptr<Message>& message, Carrier carrier) {
  MutexLock lock(mutex_);
  message->deadline_ = group_.rules(message->timeout, carrier).deadline;
  open_.insert(message);
  if (group_.failed()) {
    finish(message, group_.failure());
  } else if (group_.closed()) {
    finish(message, Status(Code::kInvalid, "nvx: group " + group_.name() + " has been destroyed"));
  } else if (!message->receives_) {
    peers_[size_t(message->peer)].unannounced.push_back(message);
  } else if (!match_early(message)) {
    receives_.push_back(message);
  }
  while (advance()) {
  }
  if (carrier == Carrier::kPool && !open_.empty()) find_attendant();
  deliver();
}

bool Mailbox::advance() {
  if (open_.empty()) return false;
  bool moved = false;
  if (group_.port()) moved |= read_port();
  for (int peer = 0; peer < int(peers_.size()); ++peer) {
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

bool Mailbox::announce(int rank) {
  Peer& peer = peers_[size_t(rank)];
  if (peer.unannounced.empty()) return false;
  kernel::Outbox& box = group_.own_pad().outbox(group_.seat_of(rank));
  const uint64_t taken = load(group_.pad(group_.seat_of(rank)).inbox(group_.seat()).taken);
  bool moved = false;
  while (!peer.unannounced.empty() && peer.announced - taken < kEnvelopes) {
    const std::shared_ptr<Message> message = peer.unannounced.front();
    peer.unannounced.pop_front();
    kernel::Envelope& envelope = box.envelopes[peer.announced % kEnvelopes];
    envelope.message = ++peer.announced;
    envelope.tag = message->tag;
    envelope.bytes = message->bytes;
    envelope.dtype = message->dtype;
    envelope.carries_data = message->bytes <= kernel::kEnvelopePayload;
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
  kernel::Outbox& box = group_.pad(group_.seat_of(rank)).outbox(group_.seat());
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
  publish(group_.own_pad().inbox(group_.seat_of(rank)).taken, peer.taken);
  poke(rank);
  return true;
}

/// A message, to the first receive that it fits.
void Mailbox::come(Early&& early) {
  const auto fits = [&](const std::shared_ptr<Message>& m) {
    return (m->peer == early.peer || m->peer == kAnySource) && m->tag == early.tag;
  };
  const auto found = std::find_if(receives_.begin(), receives_.end(), fits);
  if (found == receives_.end()) {
    early_.push_back(std::move(early));
    return;
  }
  const std::shared_ptr<Message> receive = *found;
  receives_.erase(found);
  accept(receive, std::move(early));
}

bool Mailbox::match_early(const std::shared_ptr<Message>& receive) {
  const auto found = std::find_if(early_.begin(), early_.end(), [&](const Early& early) {
    return (receive->peer == early.peer || receive->peer == kAnySource) && receive->tag == early.tag;
  });
  if (found == early_.end()) return false;
  Early early = std::move(*found);
  early_.erase(found);
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
        group_.fail(Code::kMismatch,
                    "send/recv mismatch in group " + group_.name() + ": " + group_.topology().describe(early.peer) +
                        words(" sends", early.dtype, early.bytes) + ", " + group_.topology().describe(group_.rank()) +
                        words(" receives", receive->dtype, receive->bytes) + " (tag " + std::to_string(early.tag) + ")",
                    "this is rank " + std::to_string(group_.rank())));
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
  kernel::Inbox& box = group_.own_pad().inbox(group_.seat_of(rank));
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
  const kernel::Inbox& box = group_.pad(group_.seat_of(rank)).inbox(group_.seat());
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
    // Only between messages: the receiver reads where it is when it reads the next chunk.
    if (load(group_.pad(group_.seat_of(rank)).inbox(group_.seat()).consumed) != peer.streamed) return false;
    group_.neighbours().leases().release(std::exchange(peer.lease, Span{}));
  }
  peer.lease_wanted = wanted;
  peer.lease = group_.neighbours().leases().acquire(wanted, nullptr);
  kernel::Outbox& box = group_.own_pad().outbox(group_.seat_of(rank));
  box.lease_offset = peer.lease.offset;
  box.lease_bytes = peer.lease.bytes;
  return true;
}

bool Mailbox::stream(int rank) {
  Peer& peer = peers_[size_t(rank)];
  bool moved = false;
  while (!peer.streaming.empty()) {
    const std::shared_ptr<Message> message = peer.streaming.front();
    try {
      if (message->moved_ == 0 && !lease(peer, rank, message->bytes)) break;
    } catch (const Error& error) {
      finish(message, group_.fail(error.code(), error.what() + 5, "in send"));
      peer.streaming.pop_front();
      continue;
    }
    if (peer.streamed - load(group_.pad(group_.seat_of(rank)).inbox(group_.seat()).consumed) >= kStreamDepth) break;
    const size_t slot = peer.lease.bytes / kStreamDepth;
    const size_t bytes = std::min(slot, message->bytes - message->moved_);
    std::byte* chunk = group_.neighbours().arena().at(peer.lease.offset) + peer.streamed % kStreamDepth * slot;
    kernel::level().copy(chunk, message->data + message->moved_, bytes);
    message->moved_ += bytes;
    publish(group_.own_pad().outbox(group_.seat_of(rank)).streamed, ++peer.streamed);
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
  const kernel::Outbox& box = group_.pad(group_.seat_of(rank)).outbox(group_.seat());
  bool moved = false;
  while (!peer.arriving.empty() && load(box.streamed) != peer.consumed) {
    const std::shared_ptr<Message> message = peer.arriving.front();
    const uint64_t lease_offset = box.lease_offset, lease_bytes = box.lease_bytes;
    const size_t slot = size_t(lease_bytes) / kStreamDepth;
    const kernel::PeerMemory& memory = group_.memory(group_.seat_of(rank));
    if (slot == 0 || lease_offset > memory.arena_bytes || lease_bytes > memory.arena_bytes - lease_offset) {
      finish(message, group_.fail(Code::kMismatch,
                                  group_.topology().describe(rank) + " describes staging memory that it cannot have",
                                  "in recv"));
      peer.arriving.pop_front();
      return true;
    }
    const size_t bytes = std::min(slot, message->bytes - message->moved_);
    const std::byte* chunk = memory.arena + lease_offset + peer.consumed % kStreamDepth * slot;
    kernel::level().copy(message->data + message->moved_, chunk, bytes);
    message->moved_ += bytes;
    publish(group_.own_pad().inbox(group_.seat_of(rank)).consumed, ++peer.consumed);
    poke(rank);
    moved = true;
    if (message->moved_ == message->bytes) {
      peer.arriving.pop_front();
      finish(message, {});
    }
  }
  return moved;
}

bool Mailbox::announce_far(int rank) {
  Peer& peer = peers_[size_t(rank)];
  if (peer.unannounced.empty()) return false;
  MutexLock lock(group_.port()->mutex());
  bool moved = false;
  while (!peer.unannounced.empty() && peer.announced - peer.taken_there < kFarEnvelopes) {
    const std::shared_ptr<Message> message = peer.unannounced.front();
    peer.unannounced.pop_front();
    net::MailHead head{};
    head.tag = message->tag;
    head.bytes = message->bytes;
    head.number = ++peer.announced;
    head.dtype = uint8_t(message->dtype);
    head.carries_data = message->bytes <= kernel::kEnvelopePayload;
    group_.port()->announce(rank, head, {message->data, head.carries_data ? message->bytes : 0});
    if (head.carries_data) {
      finish(message, {});
    } else {
      peer.ungranted[peer.announced] = message;
    }
    moved = true;
  }
  return moved;
}

bool Mailbox::grant_far(int rank) {
  auto& waiting = to_grant_[size_t(rank)];
  if (waiting.empty()) return false;
  MutexLock lock(group_.port()->mutex());
  for (const auto& [message, number] : waiting) {
    peers_[size_t(rank)].parcels_in[number] = message;
    group_.port()->grant(rank, number, message->data, message->bytes);
  }
  waiting.clear();
  return true;
}

bool Mailbox::read_port() {
  bool moved = false;
  for (;;) {
    std::optional<net::Port::Letter> letter;
    std::optional<std::pair<int, uint64_t>> sent, received;
    {
      MutexLock lock(group_.port()->mutex());
      letter = group_.port()->next_letter();
      sent = group_.port()->next_sent();
      received = group_.port()->next_received();
    }
    if (!letter && !sent && !received) return moved;
    moved = true;
    if (letter) read_letter(std::move(*letter));
    if (sent) {
      if (const auto found = peers_[size_t(sent->first)].parcels_out.extract(sent->second)) finish(found.mapped(), {});
    }
    if (received) {
      const auto found = peers_[size_t(received->first)].parcels_in.extract(received->second);
      if (found) finish(found.mapped(), {});
    }
  }
}

/// In the order in which they were sent, each once, whatever the link does.
void Mailbox::read_mail(net::Port::Letter&& letter) {
  Peer& peer = peers_[size_t(letter.from)];
  const net::MailHead& head = letter.head;
  if (head.number <= peer.taken || head.number > peer.taken + kFarEnvelopes) return;
  const DType dtype = head.dtype < kernel::kDTypeCount ? DType(head.dtype) : DType::kBytes;
  peer.ahead.try_emplace(head.number, Early{letter.from, head.number, head.tag, dtype, size_t(head.bytes),
                                            head.carries_data != 0, std::move(letter.body)});
  while (!peer.ahead.empty() && peer.ahead.begin()->first == peer.taken + 1) {
    ++peer.taken;
    ++peer.untold;
    come(std::move(peer.ahead.extract(peer.ahead.begin()).mapped()));
  }
  if (peer.untold < kFarEnvelopes / 2) return;
  MutexLock lock(group_.port()->mutex());
  group_.port()->tell_taken(letter.from, std::exchange(peer.untold, 0));
}

void Mailbox::read_letter(net::Port::Letter&& letter) {
  if (!far(letter.from)) return;
  Peer& peer = peers_[size_t(letter.from)];
  switch (letter.kind) {
    case net::Kind::kMail: return read_mail(std::move(letter));
    case net::Kind::kTaken: peer.taken_there += letter.value; return;
    case net::Kind::kGrant: {
      const auto found = peer.ungranted.extract(letter.value);
      if (!found) return;
      const std::shared_ptr<Message> message = found.mapped();
      peer.parcels_out[letter.value] = message;
      MutexLock lock(group_.port()->mutex());
      group_.port()->send_parcel(letter.from, letter.value, message->data, message->bytes);
      return;
    }
    default: return;
  }
}

/// What has become of the rank of another host that a message is with; it is asked for a sign of life.
std::optional<net::Port::Failure> Mailbox::fate(const Message& message) {
  if (!group_.port()) return std::nullopt;
  MutexLock lock(group_.port()->mutex());
  for (int rank = 0; rank < group_.size(); ++rank) {
    if (!far(rank) || (message.peer >= 0 && message.peer != rank)) continue;
    group_.port()->ask(rank);
    const auto fate = group_.port()->fate(rank);
    if (fate && (message.peer == rank || !fate->left)) return fate;
  }
  return std::nullopt;
}

void Mailbox::finish(const std::shared_ptr<Message>& message, Status status) {
  message->status_ = std::move(status);
  open_.erase(message);
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
    peer.parcels_out.clear();
    peer.parcels_in.clear();
  }
  if (group_.port()) {
    MutexLock lock(group_.port()->mutex());
    group_.port()->drop_mail();
  }
  while (!open_.empty()) finish(std::shared_ptr<Message>(*open_.begin()), status);
}

void Mailbox::deliver() {
  if (finished_.empty()) return;
  Finished finished = std::move(finished_);
  finished_.clear();
  mutex_.unlock();
  for (const std::shared_ptr<Message>& message : finished) {
    if (const auto finished = std::move(message->finished)) finished(*message);  // and let go of what it holds
    message->done_.store(true, std::memory_order_release);
  }
  finished.clear();
  if (group_.own_pad().header().mail_bell.flag.sleepers.load(std::memory_order_seq_cst) != 0) {
    poke(group_.rank());  // other threads of this rank may wait for one of these
  }
  mutex_.lock();
}

/// Ends what has become pointless or too late. Called when a sleeper looks around; the watch may run hooks, so no lock.
void Mailbox::check_times() {
  std::vector<std::shared_ptr<Message>> open;
  {
    MutexLock lock(mutex_);
    open.assign(open_.begin(), open_.end());
  }
  for (const std::shared_ptr<Message>& message : open) {
    const bool late = message->deadline_.passed(Clock::now());
    const int seat = message->peer >= 0 ? group_.seat_of(message->peer) : -1;
    const std::optional<net::Port::Failure> gone = fate(*message);
    if (!late && !gone && !(seat >= 0 || !far(message->peer) ? group_.alarmed(seat) : group_.alarmed(group_.seat())))
      continue;
    MutexLock lock(mutex_);
    while (advance()) {
    }
    if (!open_.contains(message)) continue;  // it came while we looked
    if (gone) (void)group_.fail_by_fate(*gone);
    if (!late) group_.alarm(seat);
    const Waited how = late && !group_.failed() ? Waited::kTimedOut : Waited::kAlarmed;
    fail_all(group_.explain_wait(how, message->peer, message->receives_ ? "recv" : "send", "", message->deadline_));
    return;
  }
}

/// One round of a driver: move what can be moved, then sleep until a peer pokes. True when the message is done, or with
/// none, when nothing is left to do.
bool Mailbox::turn(Message* message, Carrier carrier) {
  Flag& bell = group_.own_pad().header().mail_bell.flag;
  const Stamp seen = bell.value.load(std::memory_order_seq_cst);
  {
    MutexLock lock(mutex_);
    while (advance()) {
    }
    deliver();
    if (message ? message->done() : open_.empty()) return true;
  }
  WaitRules rules = group_.rules({}, carrier);
  rules.watch = nullptr;
  rules.deadline.end = std::min(rules.deadline.end, Clock::now() + kWatchInterval);
  const auto stirred = [&] {
    return bell.value.load(std::memory_order_seq_cst) != seen || (message && message->done());
  };
  const bool from_afar = group_.port() && (!message || message->peer < 0 || far(message->peer));
  const Waited how = from_afar ? group_.port()->wire().wait(
                                     stirred, [] {}, -1, rules)
                               : nvx::wait(bell, stirred, -1, rules);
  if (how == Waited::kReached) return message && message->done();
  check_times();
  MutexLock lock(mutex_);
  deliver();
  return message ? message->done() : open_.empty();
}

Status Mailbox::wait(Message& message) {
  if (message.done()) return message.status();
  {
    MutexLock lock(mutex_);
    ++waiters_;
  }
  poke(group_.rank());  // an attendant that sleeps makes room
  while (!turn(&message, Carrier::kCaller)) {
  }
  MutexLock lock(mutex_);
  if (--waiters_ == 0 && !open_.empty()) waiters_gone_.notify_all();
  return message.status();
}

void Mailbox::settle(std::chrono::milliseconds span) {
  const auto end = Clock::now() + span;
  const auto empty = [this] {
    MutexLock lock(mutex_);
    return open_.empty();
  };
  while (!empty() && Clock::now() < end && !group_.failed()) turn(nullptr, Carrier::kPool);
}

void Mailbox::find_attendant() {
  if (attended_) return;
  attended_ = true;
  // The group stays while its attendant is there, even if a callback lets go of the last reference.
  Engine::here().start([this, group = group_.weak_from_this().lock()] { attend(); });
}

/// Lingers a little when there is nothing to do, so that a stream of messages does not wake a thread for each.
void Mailbox::attend() {
  Clock::time_point idle_since = Clock::now();
  for (;;) {
    {
      MutexLock lock(mutex_);
      if (open_.empty() || waiters_ != 0) {
        if (open_.empty() && Clock::now() - idle_since > kLinger) {
          attended_ = false;
          waiters_gone_.notify_all();
          return;
        }
        if (!open_.empty()) idle_since = Clock::now();
        lock.wait_for(waiters_gone_, open_.empty() ? kGlance : kWatchInterval);
        continue;
      }
    }
    turn(nullptr, Carrier::kPool);
    idle_since = Clock::now();
  }
}

}  // namespace nvx
