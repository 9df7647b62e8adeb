// Chooses the thread that progresses the messages; calls `finished()`; ends messages that do not arrive.

#include <algorithm>
#include <map>
#include <utility>

#include "base/contain.h"
#include "base/text.h"
#include "group/p2p/mailbox.h"

namespace nvx {
namespace {

constexpr std::chrono::milliseconds kIdleCheck{1};  // interval at which an idle progress thread checks for new messages
constexpr std::chrono::milliseconds kLinger{50};

bool has_left(const Core& core, int rank) {
  if (const int s = core.members.local_rank_of(rank); s >= 0) return core.members.gone(s);
  MutexLock lock(core.port->mutex());
  const auto departure = core.port->departure(rank);
  return departure && departure->left();
}

/// The ranks that may send to a receive from any source. The first few are described, those that cannot send before
/// others.
std::string describe_senders(const Core& core) {
  constexpr size_t kMostDescribed = 4;
  const Members& members = core.members;
  std::vector<std::string> unable, names;
  for (int rank = 0; rank < members.size(); ++rank) {
    if (rank == members.rank) continue;
    const bool left = has_left(core, rank);
    (left || !members.how_to_resume(rank).empty() ? unable : names)
        .push_back(members.describe_awaited(rank) + (left ? ", which has left" : ""));
  }
  names.insert(names.begin(), unable.begin(), unable.end());
  const size_t more = names.size() - std::min(names.size(), kMostDescribed);
  names.resize(names.size() - more);
  return "any rank" + (names.empty() ? "" : ": " + joined(names)) +
         (more == 0 ? "" : " and " + std::to_string(more) + " more");
}

}  // namespace

bool Message::over() const {
  return delivered_.load(std::memory_order_acquire) ||
         (done() && deliverer_.load(std::memory_order_relaxed) == std::this_thread::get_id());
}

/// One message at a time: a `finished()` that waits for another done message must find that one not yet delivered.
void Mailbox::deliver(Progress& progress) {
  if (finished_.empty()) return;
  const Role role = progress.role;
  while (!finished_.empty()) {
    const std::shared_ptr<Message> message = std::move(finished_.front());
    finished_.pop_front();
    mutex_.unlock();
    deliver_one(*message, progress);
    mutex_.lock();
    if (message->is_standing) --peer(message->peer).undelivered;
  }
  if (role == Role::kWaiter && progress.role != role) {
    ++waiters_;
    progress.role = role;
  }
}

void Mailbox::deliver_one(Message& message, Progress& progress) {
  bool blocks = message.finished != nullptr;
  contain("a message's may_block", [&] { blocks = blocks && (!message.may_block || message.may_block()); });
  if (blocks) release_role(progress);
  message.call_finished();
  if (members_.own_pad().header().message_bell.flag.sleepers.load(std::memory_order_seq_cst) != 0) {
    wake();  // other threads of this rank may wait for this message
  }
}

void Message::call_finished() {
  deliverer_.store(std::this_thread::get_id(), std::memory_order_relaxed);
  if (const auto call = std::move(finished)) {  // moved, to release its captures
    contain("a message's finished", [&] { call(*this); });
  }
  may_block = nullptr;
  memory.reset();
  delivered_.store(true, std::memory_order_seq_cst);
}

void Message::refuse(const Status& why) {
  status_ = why;
  done_.store(true, std::memory_order_release);
  call_finished();
}

/// This thread is about to run code that may take long, or wait for other messages. Another thread must progress them
/// meanwhile.
void Mailbox::release_role(Progress& progress) {
  MutexLock lock(mutex_);
  if (progress.role == Role::kWaiter) --waiters_;
  if (progress.role == Role::kProgressThread) has_progress_thread_ = false;
  // If nothing is open, a message that is posted meanwhile finds a thread itself.
  if (open_.empty() || ensure_progress_thread() || progress.role != Role::kProgressThread) {
    progress.role = Role::kNeither;
  } else {
    has_progress_thread_ = true;  // the pool has no thread for another one
  }
  if (waiters_ == 0) waiters_gone_.notify_all();
}

/// The departure of a rank of another host, or of any (-1). Requests a sign of life from these ranks.
std::optional<net::GroupPort::Departure> Mailbox::departure(int peer) {
  if (!core_.port) return std::nullopt;
  MutexLock lock(core_.port->mutex());
  std::optional<net::GroupPort::Departure> left;
  bool alive = false;
  for (int s = 0; s < members_.local_ranks(); ++s) alive |= s != members_.local_rank() && !members_.gone(s);
  for (int rank = 0; rank < members_.size(); ++rank) {
    if (!is_remote(rank) || (peer >= 0 && peer != rank)) continue;
    core_.port->ping(rank);
    const auto departure = core_.port->departure(rank);
    if (departure && (peer == rank || !departure->left())) return departure;
    if (departure) left = departure;
    alive |= !departure;
  }
  return alive ? std::nullopt : left;
}

/// The peer for which a message waits, and an unexpected message that arrived from there instead.
std::string Mailbox::describe_wait(const Message& message) {
  const bool from_any = message.peer < 0;
  std::string text = from_any ? describe_senders(core_) : members_.describe_awaited(message.peer);
  if (message.peer == members_.rank) text += ", which is this rank itself";
  if (!message.receives_ || message.call_name) return text;
  const Unexpected* other = nullptr;
  for (auto queue = unexpected_.begin(); !other && queue != unexpected_.lower_bound(kOwnTags); ++queue) {
    const auto fits = [&](const Unexpected& one) { return from_any || one.peer == message.peer; };
    const auto found = std::ranges::find_if(queue->second, fits);
    if (found != queue->second.end()) other = &*found;
  }
  if (!other) return text;
  return text + "; " + (from_any ? members_.topology.describe(other->peer) + " has" : "it has") + " sent " +
         std::to_string(other->bytes / size_of(other->dtype)) + " elements of " + name(other->dtype) + " with tag " +
         std::to_string(other->tag) + ", for which there is no recv here";
}

bool Mailbox::has_waiters() {
  MutexLock lock(mutex_);
  return waiters_ != 0;
}

/// Ends messages that can no longer complete or are late. The progressing thread calls it once per watch interval,
/// however much arrives meanwhile. The watch may run hooks, so no lock is held.
void Mailbox::check_times() {
  struct PeerCheck {
    std::optional<net::GroupPort::Departure> gone;
    bool alarmed = false;
  };
  struct Open {
    std::shared_ptr<Message> message;
    int peer;
    Clock::time_point called;
    Deadline deadline;
  };
  std::vector<Open> open;
  std::map<int, PeerCheck> checks;  // by peer
  bool is_clear = false;
  {
    MutexLock lock(mutex_);
    for (const auto& message : open_) {
      if (!message->is_standing || failures_.failed())
        open.push_back(
            {message, message->peer, message->deadline_.start, {message->timed_since_, message->deadline_.end}});
    }
    const auto oldest = std::ranges::min_element(open, {}, [](const Open& one) { return one.called; });
    if (oldest != open.end()) core_.status->messages(open.size(), oldest->message->describe(), oldest->called);
  }
  for (const auto& [message, peer, called, deadline] : open) {
    const bool late = deadline.passed(Clock::now());
    const int local_rank = peer >= 0 ? members_.local_rank_of(peer) : -1;
    const auto [check, fresh] = checks.try_emplace(peer);
    if (fresh)
      check->second = {departure(peer), failures_.should_abort(is_remote(peer) ? members_.local_rank() : local_rank)};
    const auto& [gone, alarmed] = check->second;
    if (!late && !gone && !alarmed) continue;
    if (!late && !std::exchange(is_clear, true)) failures_.await_exact_report();
    MutexLock lock(mutex_);
    move(Clock::now() + kWatchInterval);
    if (!open_.contains(message)) continue;  // done during the check
    if (!late && !failures_.failed() && peer >= 0) {
      if (this->peer(peer).undelivered != 0) return;  // it may be this one
      // The sender may have left after it had sent all.
      const bool has_left = local_rank >= 0 && members_.gone(local_rank);
      if (has_left && this->peer(peer).arriving() && !failures_.check_reports(Clock::duration::zero())) continue;
    }
    if (gone) (void)failures_.fail_by_departure(*gone);
    if (!late) failures_.record_abort(local_rank, Clock::duration::zero());
    const Waited how = late && !failures_.failed() ? Waited::kTimedOut : Waited::kAlarmed;
    Awaited whom;
    if (message->peer >= 0) whom.ranks = {message->peer};
    if (how == Waited::kTimedOut) whom.names = describe_wait(*message);
    fail_all(failures_.explain_wait(how, whom, message->describe(), deadline));
    return;
  }
}

/// One round: checks for failures and timeouts if no thread has done so for a while; moves as much as possible;
/// delivers done messages. If there was nothing to do, sleeps until a peer pokes or the next check is due.
void Mailbox::progress_once(Message* message, Progress& progress) {
  Flag& bell = members_.own_pad().header().message_bell.flag;
  const Stamp seen = bell.value.load(std::memory_order_seq_cst);
  const auto now = Clock::now();
  if (failures_.failed() || now >= progress.next_check || now >= next_check_.load(std::memory_order_relaxed)) {
    progress.next_check = now + kWatchInterval;
    next_check_.store(progress.next_check, std::memory_order_relaxed);
    check_times();
  }
  bool may_be_remote = false;
  int peer = kAnySource;
  {
    MutexLock lock(mutex_);
    const bool more = move(progress.next_check);
    const Role role = progress.role;
    deliver(progress);
    if (more || progress.role != role || (message ? message->over() : open_.empty())) return;
    if (message) peer = message->peer;
    may_be_remote = core_.port && (peer < 0 || is_remote(peer));
  }
  const auto is_due = [&] {
    if (message && message->done()) {  // another thread delivers it, or this one must
      return message->over() || message->deliverer_.load(std::memory_order_relaxed) == std::thread::id() ||
             bell.value.load(std::memory_order_seq_cst) != seen;
    }
    return bell.value.load(std::memory_order_seq_cst) != seen || failures_.failed();
  };
  if (peer >= 0) core_.status->sleeps_for_message(peer, members_.pid_of(peer), message->receives_, progress.began);
  WaitRules rules = core_.waits.rules({}, progress.runner);
  rules.watch = nullptr;
  rules.deadline.end = std::min(rules.deadline.end, progress.next_check);
  if (may_be_remote) {
    (void)core_.port->messenger().wait(
        is_due, [] {}, -1, rules);
  } else {
    (void)nvx::wait(bell, is_due, -1, rules);
  }
}

Status Mailbox::wait(Message& message) {
  if (message.over()) return message.status();
  if (failures_.forked()) return failures_.check_alive();
  Progress progress{Role::kWaiter, Runner::kCaller};
  {
    MutexLock lock(mutex_);
    begin_timeout_of(message);
    ++waiters_;
  }
  const auto leave = [this] {
    MutexLock lock(mutex_);
    if (--waiters_ == 0 && !open_.empty()) waiters_gone_.notify_all();
  };
  try {
    wake();  // a sleeping progress thread leaves the messages to this one
    while (!message.over()) progress_once(&message, progress);
  } catch (...) {
    if (progress.role == Role::kWaiter) leave();  // the progress thread does nothing while there are waiters
    throw;
  }
  core_.status->slept_for_message();
  leave();
  return message.status();
}

void Mailbox::settle(std::chrono::milliseconds span) {
  if (failures_.forked()) return;
  const auto end = Clock::now() + span;
  const auto empty = [this] {
    MutexLock lock(mutex_);
    return std::all_of(open_.begin(), open_.end(), [](const auto& message) { return message->is_standing; });
  };
  Progress progress{Role::kNeither, Runner::kPool};
  while (!empty() && Clock::now() < end && !failures_.failed()) progress_once(nullptr, progress);
}

bool Mailbox::ensure_progress_thread() {
  if (has_progress_thread_) return true;
  // The thread keeps the group alive, even if a callback releases the last other reference.
  has_progress_thread_ = ThreadPool::instance().start([this, group = core_.owner().lock()] { run_progress_thread(); });
  if (has_progress_thread_) ++progress_threads_;
  return has_progress_thread_;
}

/// Lingers for a while when there is nothing to do, so a stream of messages does not wake a thread for each one.
void Mailbox::run_progress_thread() {
  Progress progress{Role::kProgressThread, Runner::kPool};
  Clock::time_point idle_since = Clock::now();
  while (progress.role == Role::kProgressThread) {
    {
      MutexLock lock(mutex_);
      if (open_.empty() || waiters_ != 0) {
        if (open_.empty() && Clock::now() - idle_since > kLinger) {
          has_progress_thread_ = false;
          break;
        }
        if (!open_.empty()) idle_since = Clock::now();
        lock.wait_for(waiters_gone_, open_.empty() ? kIdleCheck : kWatchInterval);
        continue;
      }
    }
    try {
      progress_once(nullptr, progress);
    } catch (const std::bad_alloc&) {
      (void)failures_.fail(core_.diagnosis.no_memory("received messages"));
    }
    idle_since = Clock::now();
  }
  MutexLock lock(mutex_);
  --progress_threads_;
  waiters_gone_.notify_all();
}

}  // namespace nvx
