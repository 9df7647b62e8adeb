#include "group/p2p/mailbox.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

#include "base/config.h"

namespace nvx {
namespace {

constexpr std::chrono::milliseconds kEndOfCopies{500};  // copies end by themselves, unless the device hangs
constexpr uint64_t kMostKept = 4 << 20;                 // unexpected bytes of a peer; 64 more envelopes may arrive

/// Takes the first one with this tag that fits, if any.
template <class T>
std::optional<T> take(std::map<int64_t, std::deque<T>>& by_tag, int64_t tag,
                      const std::predicate<const T&> auto& fits) {
  const auto queue = by_tag.find(tag);
  if (queue == by_tag.end()) return std::nullopt;
  const auto found = std::ranges::find_if(queue->second, fits);
  if (found == queue->second.end()) return std::nullopt;
  std::optional<T> taken = std::move(*found);
  queue->second.erase(found);
  if (queue->second.empty()) by_tag.erase(queue);
  return taken;
}

}  // namespace

Mailbox::Mailbox(Core& core)
    : core_(core), members_(core.members), failures_(core.failures), peers_(size_t(members_.size())) {
  for (int rank = 0; rank < members_.size(); ++rank) {
    if (is_remote(rank)) {
      peers_[size_t(rank)] = std::make_unique<InterHostPeer>(*this, core, rank);
    } else {
      peers_[size_t(rank)] = std::make_unique<IntraHostPeer>(*this, core, rank);
    }
  }
  core_.shm().leases().join(this);
  if (!core_.port) return;
  MutexLock lock(core_.port->mutex());
  core_.port->p2p().on_change([this] { wake(); });
}

Mailbox::~Mailbox() {
  close();
  core_.shm().leases().leave(this);
  MutexLock lock(mutex_);
  while (progress_threads_ != 0) lock.wait_for(waiters_gone_, std::chrono::milliseconds(10));
}

void Mailbox::close() {
  if (failures_.forked()) return;
  MutexLock lock(mutex_);
  // The program may reuse a tensor once its send has ended, so a peer that is still reading it has to fail.
  for (const auto& peer : peers_) {
    if (peer->lends()) (void)failures_.fail_as_left(members_.rank);
  }
  if (!open_.empty())
    fail_all(Status(Code::kAborted, "nvx: group " + members_.name + " was destroyed with messages in flight"));
  Progress progress{Role::kNeither, Runner::kPool};
  deliver(progress);
}

void wake(const Members& members, int rank) {
  Flag& bell = members.pad(members.local_rank_of(rank)).header().message_bell.flag;
  bell.core.store(this_core(), std::memory_order_relaxed);
  bell.value.fetch_add(1, std::memory_order_seq_cst);  // several writers, so it only counts reasons to check
  if (bell.sleepers.load(std::memory_order_seq_cst) != 0) ring(bell);
}

void Mailbox::send(const std::shared_ptr<Message>& message, Runner runner) {
  if (failures_.forked()) return message->refuse(failures_.check_alive());
  MutexLock lock(mutex_);
  enter(message);
  start_progress(runner);
}

void Mailbox::receive(const std::shared_ptr<Message>& message, Runner runner) {
  message->receives_ = true;
  send(message, runner);
}

void Mailbox::post(const std::shared_ptr<Message>& message) {
  if (failures_.forked()) return message->refuse(failures_.check_alive());
  MutexLock lock(mutex_);
  enter(message);
}

void Mailbox::expect(const std::shared_ptr<Message>& message) {
  message->receives_ = true;
  if (failures_.forked()) return message->refuse(failures_.check_alive());
  MutexLock lock(mutex_);
  enter(message);
  if (!open_.empty()) ensure_progress_thread();
}

void Mailbox::receive_empty(int peer, int64_t tag) {
  MutexLock lock(mutex_);
  if (failures_.failed() || failures_.closed()) return;  // the wait has already ended
  arrive({peer, 0, tag, DType::kBytes, 0, /*carried=*/true, {}});
}

void Mailbox::forget(int64_t tag) {
  MutexLock lock(mutex_);
  const auto dropped = unexpected_.extract(tag);
  if (dropped.empty()) return;
  for (const Unexpected& unexpected : dropped.mapped()) peer(unexpected.peer).release_kept(unexpected);
}

std::string Message::describe() const {
  std::string whom = receives_ ? "from " : "to ";
  whom += peer == kAnySource ? "any rank" : "rank " + std::to_string(peer);
  if (call_name) return std::string(call_name) + "(" + whom + ")";
  if (tag != 0) whom += ", tag " + std::to_string(tag);
  return std::string(receives_ ? "recv(" : "send(") + name(dtype) + ", " +
         std::to_string((noted_bytes ? noted_bytes : bytes) / size_of(dtype)) + " elements, " + whom + ")";
}

void Mailbox::push(Runner runner) {
  if (failures_.forked()) return;
  MutexLock lock(mutex_);
  start_progress(runner);
}

void Mailbox::enter(const std::shared_ptr<Message>& message) {
  if (const auto ahead = std::move(message->ahead)) {
    ahead->timeout = message->timeout;
    enter(ahead);
  }
  const bool timed = !message->is_standing && !message->timed_from_wait;
  message->deadline_ = timed ? Deadline::after(core_.waits.span_of(message->timeout)) : Deadline();
  message->timed_since_ = message->deadline_.start;
  open_.insert(message);
  if (failures_.failed()) {
    finish(message, failures_.check_alive(message->describe().c_str()));
  } else if (const Status refused = failures_.check_alive(); !refused.ok()) {
    finish(message, refused);
  } else if (failures_.check_reports(Clock::duration::zero())) {
    finish(message, failures_.failed_before(message->describe()));
  } else if (!message->receives_) {
    peer(message->peer).send(message);
  } else if (!match_unexpected(message)) {
    receives_[message->tag].push_back(message);
  }
}

void Mailbox::begin_timeout_of(Message& message) {
  if (!std::exchange(message.timed_from_wait, false)) return;
  const Deadline now = Deadline::after(core_.waits.span_of(message.timeout));
  message.deadline_.end = now.end;
  message.timed_since_ = now.start;
}

void Mailbox::begin_timeout(Message* message) {
  if (failures_.forked()) return;
  MutexLock lock(mutex_);
  if (message) return begin_timeout_of(*message);
  for (const auto& open : open_) begin_timeout_of(*open);
}

void Mailbox::start_progress(Runner runner) {
  Progress progress{Role::kNeither, runner};
  move(progress.next_check);
  if (runner == Runner::kPool && !open_.empty()) ensure_progress_thread();
  deliver(progress);
}

/// Moves as much as possible until `until`, since peers may send without end. True if there may be more. Without memory
/// for what arrives, the group fails.
bool Mailbox::move(Clock::time_point until) {
  try {
    while (advance()) {
      if (Clock::now() >= until) return true;
    }
  } catch (const std::bad_alloc&) {
    (void)failures_.fail(core_.diagnosis.no_memory("received messages"));
  }
  return false;
}

/// Accesses no memory of a peer once the group has failed.
bool Mailbox::advance() {
  if (open_.empty()) return false;
  bool moved = false;
  if (core_.port && !failures_.failed()) moved |= read_port();
  for (const auto& peer : peers_) {
    if (failures_.failed()) return false;
    moved |= peer->move();
  }
  return moved;
}

bool Mailbox::read_port() {
  bool moved = false;
  for (;;) {
    std::optional<net::PointToPoint::Control> control;
    net::PointToPoint::Owner done;
    {
      MutexLock lock(core_.port->mutex());
      control = core_.port->p2p().next_control();
      done = core_.port->p2p().next_done();
    }
    if (!control && !done) return moved;
    moved = true;
    if (control && is_remote(control->from)) static_cast<InterHostPeer&>(peer(control->from)).read(std::move(*control));
    if (done) finish(std::static_pointer_cast<Message>(done), {});
  }
}

void Mailbox::arrive(Unexpected&& unexpected) {
  const auto receive = take(receives_, unexpected.tag, [&](const std::shared_ptr<Message>& m) {
    return m->peer == unexpected.peer || m->peer == kAnySource;
  });
  if (receive) {
    accept(*receive, std::move(unexpected));
  } else {
    peer(unexpected.peer).keep(unexpected);
    unexpected_[unexpected.tag].push_back(std::move(unexpected));
  }
}

void MessagePeer::keep(const Unexpected& unexpected) {
  kept_ += unexpected.memory();
  if (!full_ && kept_ > kMostKept) send_full(full_ = true);
}

void MessagePeer::release_kept(const Unexpected& unexpected) {
  kept_ -= unexpected.memory();
  if (full_ && kept_ < kMostKept / 2) send_full(full_ = false);
}

void MessagePeer::clear(Clock::time_point /*until*/) {
  unannounced_.clear();
  to_grant_.clear();
}

void MessagePeer::finish(const std::shared_ptr<Message>& message, Status status) {
  box_.mutex_.held_by_caller();
  box_.finish(message, std::move(status));
}

void MessagePeer::arrive(Unexpected&& unexpected) {
  box_.mutex_.held_by_caller();
  box_.arrive(std::move(unexpected));
}

bool Mailbox::match_unexpected(const std::shared_ptr<Message>& receive) {
  auto unexpected = take(unexpected_, receive->tag, [&](const Unexpected& one) {
    return receive->peer == one.peer || receive->peer == kAnySource;
  });
  if (!unexpected) return false;
  peer(unexpected->peer).release_kept(*unexpected);
  accept(receive, std::move(*unexpected));
  return true;
}

void Mailbox::accept(const std::shared_ptr<Message>& receive, Unexpected&& unexpected) {
  receive->peer = unexpected.peer;
  if (unexpected.bytes != receive->bytes || unexpected.dtype != receive->dtype) {
    const bool may_be_note = !config().delegate.empty();
    const auto side = [may_be_note](const char* verb, DType dtype, size_t bytes) {
      const bool is_note = may_be_note && bytes == kNoteBytes;
      const std::string elements = std::to_string(bytes / size_of(dtype)) + " elements of ";
      return std::string(verb) + " " + (is_note ? "by NVX_DELEGATE, elements of " : elements) + name(dtype);
    };
    const bool one_delegates = may_be_note && (unexpected.bytes == kNoteBytes) != (receive->noted_bytes != 0);
    finish(
        receive,
        failures_.fail(
            {.code = Code::kMismatch,
             .cause =
                 "send/recv mismatch in group " + members_.name + ": " + members_.topology.describe(unexpected.peer) +
                 side(" sends", unexpected.dtype, unexpected.bytes) + ", " + members_.topology.describe(members_.rank) +
                 side(" receives", receive->dtype, receive->bytes) + " (tag " + std::to_string(unexpected.tag) + ")",
             .context = core_.diagnosis.me(),
             .advice = one_delegates
                           ? "NVX_DELEGATE's send_recv gives NCCL a message of CUDA tensors by its size: make both "
                             "ends CUDA tensors of the same size, or take send_recv out of NVX_DELEGATE"
                           : "give both tensors the same number of elements and the same type"}));
    return;
  }
  if (unexpected.carried) {
    if (receive->bytes) std::memcpy(receive->data, unexpected.data.data(), receive->bytes);
    finish(receive, {});
  } else {
    const DeviceCopies* const copies = core_.copies_open.load(std::memory_order_acquire);
    receive->by_copies = copies && receive->at && unexpected.on_device;
    receive->in_place_ =
        receive->by_copies && unexpected.place != 0 &&
        copies->in_pool(members_.local_rank_of(unexpected.peer), unexpected.place - 1, unexpected.bytes) != 0;
    peer(unexpected.peer).receive(receive, unexpected.number);
  }
}

DevicePtr Mailbox::reach(const void* at, size_t bytes, int device, int peer) const {
  const DeviceCopies* const copies = core_.copies_open.load(std::memory_order_acquire);
  if (!copies || copies->device() != device || bytes <= kernel::kEnvelopePayload || is_remote(peer) ||
      peer == members_.rank)
    return 0;
  return reinterpret_cast<DevicePtr>(at);
}

Span Mailbox::release_idle() {
  if (failures_.forked() || !mutex_.try_lock()) return {};  // the lock's holder may wait for the pool
  const MutexLock lock(mutex_, std::adopt_lock);
  Span span;
  for (size_t r = 0; r < peers_.size() && !span && !failures_.failed() && !failures_.closed(); ++r)
    span = peers_[r]->release_idle();
  return span;
}

void Mailbox::finish(const std::shared_ptr<Message>& message, Status status) {
  message->status_ = std::move(status);
  message->done_.store(true, std::memory_order_release);
  open_.erase(message);
  if (message->status_.ok() && message->tag < kOwnTags)
    core_.status->message_ended(message->receives_, message->peer, message->tag, message->dtype,
                                message->noted_bytes ? message->noted_bytes : message->bytes, message->deadline_.start);
  if (open_.empty()) core_.status->no_messages();
  if (message->is_standing) ++peer(message->peer).undelivered;
  finished_.push_back(message);
}

void Mailbox::fail_all(const Status& status) {
  receives_.clear();
  unexpected_.clear();
  const auto until = Clock::now() + kEndOfCopies;
  for (const auto& peer : peers_) peer->clear(until);
  if (core_.port) {
    MutexLock lock(core_.port->mutex());
    core_.port->p2p().drop();
  }
  while (!open_.empty()) finish(std::shared_ptr<Message>(*open_.begin()), status);
}

}  // namespace nvx
