#include "net/group_port.h"

#include <algorithm>
#include <utility>

#include "base/text.h"
#include "net/executor.h"

namespace nvx::net {

GroupPort::GroupPort(std::shared_ptr<Messenger> messenger, uint64_t group, int rank, int size)
    : messenger_(std::move(messenger)),
      group_(group),
      rank_(rank),
      ranks_(size_t(size)),
      calls_(size),
      flow_(*this, size),
      p2p_(*this, size) {
  MutexLock lock(messenger_->mutex());
  messenger_->add_port(group, rank, *this);
}

GroupPort::~GroupPort() {
  MutexLock lock(messenger_->mutex());
  p2p_.drop();
  leave();
}

void GroupPort::connect(int rank, std::span<const std::byte> address) {
  ranks_[size_t(rank)].peer = messenger_->connect(address);
}

void GroupPort::leave() {
  left_ = true;
  flow_.clear();
  messenger_->remove_port(group_, rank_, *this);
}

// --- runs

void GroupPort::open(ScheduleRun& run) {
  runs_.push_back(&run);
  flow_.compare(run);
}

bool GroupPort::is_oldest(const ScheduleRun& run) const {
  return *std::ranges::find_if(runs_, [&](const ScheduleRun* one) { return one == &run || !one->done(); }) == &run;
}

void GroupPort::end_operation(uint32_t op) {
  const uint32_t first = calls_.ended(), last = op - 1;
  calls_.end_before(op);
  if (first == op) return;
  if (first <= last) return flow_.drop(first, last);
  flow_.drop(first, UINT32_MAX);  // the numbers have wrapped
  flow_.drop(0, last);
}

void GroupPort::send(int rank, MessageHeader header, std::span<const std::byte> behind, std::span<const std::byte> body,
                     Sender* sender, uint64_t cookie) {
  Rank& there = ranks_[size_t(rank)];
  if (!there.peer) {  // a message may claim any rank as its sender
    if (sender) sender->sent(cookie, Status(Code::kPeerDied, "nvx: its address is unknown"));
    return;
  }
  there.contacted = true;
  header.group = group_;
  header.from = uint32_t(rank_);
  header.to = uint32_t(rank);
  messenger_->send(*there.peer, header, behind, body, sender, cookie);
}

void GroupPort::ping(int rank) {
  if (const auto peer = process_of(rank))
    messenger_->liveness().ping(*peer, group_, rank_, rank, &ranks_[size_t(rank)].pinged);
}

void GroupPort::disconnect(int rank, const char* why) {
  if (const auto peer = process_of(rank)) messenger_->disconnect(*peer, why, /*may_live=*/true);
}

// --- incoming messages

void GroupPort::arrived(const MessageHeader& header, std::span<const std::byte> whole,
                        std::span<const std::byte> body) {
  if (header.from >= ranks_.size() || int(header.from) == rank_ || left_) return;
  Rank& from = ranks_[header.from];
  from.contacted = true;
  switch (header.kind) {
    case Kind::kFirst:
    case Kind::kNext: return take_segment(header, whole, body);
    case Kind::kCredit: return flow_.credit(header.from, header.value);
    case Kind::kReady:
      calls_.note(header.from, header.op);
      return calls_.has_ended(header.op) ? void() : flow_.note_ready(header);
    case Kind::kPoison:
      return fail({int(header.from),
                   FailureNote::read(body, int(ranks_.size())).value_or(unreadable_note(of_rank(int(header.from))))});
    case Kind::kOtherFailure: return take_other_failure(from, header, body);
    case Kind::kSegment: return p2p_.take_segment(header, body);
    case Kind::kFingerprint: return take_fingerprint(header, whole);
    case Kind::kMonitorIn: from.monitored = std::max(from.monitored, header.value); return;
    case Kind::kMonitorOut: monitored_out_ = std::max(monitored_out_, header.value); return;
    case Kind::kEnvelope:
    case Kind::kTaken:
    case Kind::kGrant: return p2p_.take_control(header, whole, body);
    default: return;
  }
}

void GroupPort::take_other_failure(Rank& from, const MessageHeader& header, std::span<const std::byte> body) {
  constexpr uint64_t kMost = 1'000'000;
  const auto note = FailureNote::read(body, int(ranks_.size()));
  if (!note || !from.other_failure.text.empty()) return;
  from.other_failure.text = note->cause;
  if (note->code == Code::kTimeout && std::ranges::find(note->awaited, rank_) != note->awaited.end())
    from.other_failure.gave_up_at = Clock::now() - std::chrono::milliseconds(std::min(header.value, kMost));
}

void GroupPort::take_segment(const MessageHeader& header, std::span<const std::byte> whole,
                             std::span<const std::byte> body) {
  std::optional<First> first;
  if (header.kind == Kind::kFirst) first = read_behind_header<First>(whole);
  calls_.note(header.from, header.op);
  if (calls_.has_ended(header.op)) {
    if (first) calls_.note_late({int(header.from), header.op, first->fingerprint});
    return flow_.acknowledge(int(header.from), body.size());
  }
  for (ScheduleRun* run : runs_) {
    if (!run->owns(header)) continue;
    if (run->take(header, first, body) != ScheduleRun::Outcome::kLater)
      return flow_.acknowledge(int(header.from), body.size());
    break;
  }
  flow_.keep(header, first, body);
}

std::byte* GroupPort::place(const MessageHeader& header, size_t bytes) {
  if (left_ || header.from >= ranks_.size()) return nullptr;
  if (header.kind == Kind::kSegment) return p2p_.place(header, bytes);
  if (header.kind != Kind::kFirst && header.kind != Kind::kNext) return nullptr;
  for (ScheduleRun* run : runs_) {
    if (run->owns(header)) return run->place(header, bytes);
  }
  return nullptr;
}

void GroupPort::dropped(const MessageHeader& header, const std::byte* where) {
  if (p2p_.dropped(where)) return;
  for (ScheduleRun* run : runs_) {
    if (run->owns(header)) run->dropped(header);
  }
}

void GroupPort::send_fingerprint(int rank, uint32_t op, Reply reply) {
  const auto fingerprint = calls_.own(op);
  if (!fingerprint) return;
  MessageHeader header(Kind::kFingerprint, reply == Reply::kRequested);
  header.op = op;
  send(rank, header, std::as_bytes(std::span(&*fingerprint, 1)));
}

/// Compares a fingerprint with this rank's of the same operation, if it has begun. A sender with a different one may
/// wait for data that never comes, so this rank sends it its own.
void GroupPort::take_fingerprint(const MessageHeader& header, std::span<const std::byte> whole) {
  const auto fingerprint = read_behind_header<FingerprintBytes>(whole);
  if (!fingerprint) return;
  calls_.note(header.from, header.op);
  const auto own = calls_.own(header.op);
  if (!own) return;
  if (*own != *fingerprint) {
    if (calls_.note_clash({int(header.from), header.op, *fingerprint})) send_fingerprint(int(header.from), header.op);
  } else if (header.value != 0) {
    send_fingerprint(int(header.from), header.op, Reply::kNone);
  }
}

// --- failure

void GroupPort::fail(ReportedFailure reported) {
  if (failed_.load(std::memory_order_relaxed) || left_) return;
  reported_ = std::move(reported);
  failed_.store(true, std::memory_order_release);
  if (on_failure_) on_failure_(*reported_);
  p2p_.notify();
}

void GroupPort::on_failure(std::function<void(const ReportedFailure&)> handler) {
  on_failure_ = std::move(handler);
  if (reported_) on_failure_(*reported_);
}

std::optional<GroupPort::Departure> GroupPort::departure(int rank) {
  const Rank& there = ranks_[size_t(rank)];
  if (!there.peer) return std::nullopt;
  if (there.departure) return there.departure;
  const std::string& lost = messenger_->lost_because(*there.peer);
  if (lost.empty()) return std::nullopt;
  return Departure{rank,
                   messenger_->liveness().has_declared_this_lost(*there.peer) ? Departure::Cause::kDeclaredThisLost
                                                                              : Departure::Cause::kLost,
                   lost};
}

Clock::duration GroupPort::silence(int rank) const {
  const auto peer = process_of(rank);
  return peer ? messenger_->liveness().silence_of(*peer) : Clock::duration(0);
}

std::string GroupPort::obstacle(int rank) {
  const auto peer = process_of(rank);
  return peer ? messenger_->obstacle(*peer) : "";
}

void GroupPort::poison(const Failure& why, const std::vector<int>& ranks) {
  const FailureNote note = FailureNote::of(why);
  for (const int rank : ranks) {
    if (process_of(rank)) send(rank, {Kind::kPoison}, {}, note.used());
  }
}

void GroupPort::report_other_failure(const Failure& what) {
  static_assert(sizeof(FailureNote) <= Messenger::kMostCopied);
  if (left_ || other_failure_) return;
  other_failure_ = FailureNote::of(what);
  other_failed_at_ = Clock::now();
  for (const int rank : contacts()) send_other_failure(rank);
}

void GroupPort::send_other_failure(int rank) {
  Rank& there = ranks_[size_t(rank)];
  if (!other_failure_ || !there.peer || std::exchange(there.sent_other_failure, true)) return;
  const auto age = std::chrono::duration_cast<std::chrono::milliseconds>(Clock::now() - other_failed_at_);
  send(rank, {Kind::kOtherFailure, uint64_t(age.count())}, {}, other_failure_->used());
}

/// A rank that pings this one waits for it, so it must receive the report of the other failure.
void GroupPort::pinged_by(uint32_t rank, PeerId peer) {
  if (process_of(int(rank)) != peer) return;
  ranks_[rank].contacted = true;
  send_other_failure(int(rank));
}

void GroupPort::note_departure(Departure departure) {
  if (size_t(departure.rank) >= ranks_.size()) return;
  std::optional<Departure>& noted = ranks_[size_t(departure.rank)].departure;
  if (!noted) noted = std::move(departure);
}

std::vector<int> GroupPort::contacts() const {
  std::vector<int> ranks;
  for (size_t r = 0; r < ranks_.size(); ++r) {
    if (ranks_[r].contacted && ranks_[r].peer) ranks.push_back(int(r));
  }
  return ranks;
}

}  // namespace nvx::net
