#include "net/group_port.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/words.h"
#include "net/executor.h"

namespace nvx::net {
namespace {

constexpr uint64_t kCredit = 4 << 20;          ///< cost that may be unacknowledged by a rank
constexpr uint64_t kCreditStep = kCredit / 4;  ///< a receiver acknowledges once this much has accumulated
constexpr uint64_t kSegmentCost = 1 << 10;     ///< of a segment beside its body; it bounds the number of segments too
constexpr size_t kMostMailBytes = 1 << 10;
/// The largest cost of a rank's unread mail, and the cost of an announcement, which holds memory. Other mail messages
/// are a few words and cost 1.
constexpr uint64_t kMostMail = 1 << 18, kMailCost = 16;

/// Modular: the numbers may wrap.
bool before(uint32_t a, uint32_t b) { return int32_t(a - b) < 0; }

uint64_t cost_of(const GroupPort::MailMessage& message) { return message.kind == Kind::kMail ? kMailCost : 1; }

}  // namespace

GroupPort::GroupPort(std::shared_ptr<Messenger> messenger, uint64_t group, int rank, int size)
    : messenger_(std::move(messenger)), group_(group), rank_(rank), ranks_(size_t(size)) {
  MutexLock lock(messenger_->mutex());
  messenger_->add_port(group, rank, *this);
}

GroupPort::~GroupPort() {
  MutexLock lock(messenger_->mutex());
  drop_mail();
  leave();
}

void GroupPort::connect(int rank, std::span<const std::byte> address) {
  Rank& there = ranks_[size_t(rank)];
  there.peer = messenger_->connect(address);
  there.known = true;
}

void GroupPort::leave() {
  left_ = true;
  early_.clear();
  messenger_->remove_port(group_, rank_, *this);
}

// --- runs

void GroupPort::open(ScheduleRun& run) {
  runs_.push_back(&run);
  for (auto it = early_.lower_bound({run.op(), run.number(), 0, 0}); it != early_.end(); ++it) {
    if (it->first.op != run.op() || it->first.run != run.number()) break;
    for (const Early& early : it->second) {
      if (early.first) run.compare(early.header.from, *early.first);
    }
  }
}

void GroupPort::close(ScheduleRun& run) { std::erase(runs_, &run); }

void GroupPort::end_operation(uint32_t op) {
  const uint32_t first = std::exchange(ended_, op), last = op - 1;
  if (first == op) return;
  if (first <= last) return drop_early(first, last);
  drop_early(first, UINT32_MAX);  // the numbers have wrapped
  drop_early(0, last);
}

/// Drops the segments for these operations, which have ended.
void GroupPort::drop_early(uint32_t first_op, uint32_t last_op) {
  auto it = early_.lower_bound({first_op, 0, 0, 0});
  while (it != early_.end() && it->first.op <= last_op) {
    for (const Early& early : it->second) {
      if (early.first && !late_label_) late_label_ = {int(early.header.from), early.header.op, early.first->label};
      forget_early(early);
    }
    it = early_.erase(it);
  }
}

std::optional<GroupPort::LateLabel> GroupPort::late_label() { return std::exchange(late_label_, std::nullopt); }

bool GroupPort::take_credit(int rank, size_t bytes) {
  Rank& there = ranks_[size_t(rank)];
  const uint64_t cost = bytes + kSegmentCost;
  // The receiver does not acknowledge less than a step, so less than a step must not block the sender.
  if (there.unacknowledged >= kCreditStep && there.unacknowledged + cost > kCredit) return false;
  there.unacknowledged += cost;
  return true;
}

void GroupPort::acknowledge(int rank, size_t bytes) {
  Rank& there = ranks_[size_t(rank)];
  there.to_acknowledge += bytes + kSegmentCost;
  if (there.to_acknowledge < kCreditStep) return;
  MessageHeader header;
  header.kind = Kind::kCredit;
  header.value = std::exchange(there.to_acknowledge, 0);
  send(rank, header, {}, {}, nullptr, 0);
}

void GroupPort::send(int rank, MessageHeader header, std::span<const std::byte> behind, std::span<const std::byte> body,
                     Sender* sender, uint64_t cookie) {
  Rank& there = ranks_[size_t(rank)];
  if (!there.known) {  // a message may claim any rank as its sender
    if (sender) sender->sent(cookie, Status(Code::kPeerDied, "nvx: its address is unknown"));
    return;
  }
  there.contacted = true;
  header.group = group_;
  header.from = uint32_t(rank_);
  header.to = uint32_t(rank);
  messenger_->send(there.peer, header, behind, body, sender, cookie);
}

void GroupPort::ask(int rank) {
  Rank& there = ranks_[size_t(rank)];
  if (there.known) messenger_->ask(there.peer, group_, rank_, rank);
}

void GroupPort::disconnect(int rank) {
  if (ranks_[size_t(rank)].known)
    messenger_->disconnect(ranks_[size_t(rank)].peer, "a failed operation still had messages to it in flight");
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
    case Kind::kCredit: from.unacknowledged -= std::min(from.unacknowledged, header.value); return;
    case Kind::kPoison:
      return fail({int(header.from),
                   FailureNote::read(body, int(ranks_.size())).value_or(unreadable_note(of_rank(int(header.from))))});
    case Kind::kTrouble:
      if (const auto told = FailureNote::read(body, int(ranks_.size())); told && from.trouble.empty())
        from.trouble = told->cause;
      return;
    case Kind::kSegment: return rendezvous_.take(header, body);
    case Kind::kLabel: return take_label(header, whole);
    case Kind::kMonitorIn: from.monitored = std::max(from.monitored, header.value); return;
    case Kind::kMonitorOut: monitored_out_ = std::max(monitored_out_, header.value); return;
    case Kind::kMail:
    case Kind::kTaken:
    case Kind::kGrant: break;
    default: return;
  }
  MailMessage message{header.kind, int(header.from), header.value, {}, {}};
  if (header.kind == Kind::kMail) {
    const auto head = read_behind_header<MailHead>(whole);
    if (!head || body.size() > kMostMailBytes || (head->carries_data && body.size() != head->bytes)) return;
    message.head = *head;
    message.body.assign(body.begin(), body.end());
  }
  if ((from.mail_cost += cost_of(message)) > kMostMail) {
    if (from.known) messenger_->disconnect(from.peer, "it sends more than its credit allows");
    return;
  }
  mail_.push_back(std::move(message));
  notify_();
}

void GroupPort::take_segment(const MessageHeader& header, std::span<const std::byte> whole,
                             std::span<const std::byte> body) {
  std::optional<First> first;
  if (header.kind == Kind::kFirst) first = read_behind_header<First>(whole);
  note_called(header);
  if (before(header.op, ended_)) {
    if (first && !late_label_) late_label_ = {int(header.from), header.op, first->label};
    return acknowledge(int(header.from), body.size());
  }
  for (ScheduleRun* run : runs_) {
    if (!run->owns(header)) continue;
    if (run->take(header, first, body) != ScheduleRun::Outcome::kLater)
      return acknowledge(int(header.from), body.size());
    break;
  }
  if (!keep(int(header.from), body.size())) return;
  early_[{header.op, header.run, header.from, header.message}].push_back({header, first, {body.begin(), body.end()}});
}

/// Whether an early segment may be kept. A sender within its credit is never refused.
bool GroupPort::keep(int rank, size_t bytes) {
  Rank& there = ranks_[size_t(rank)];
  if (there.kept + bytes > kCredit + kCreditStep + messenger_->segment_bytes()) {
    if (there.known) messenger_->disconnect(there.peer, "it sends more than its credit allows");
    return false;
  }
  there.kept += bytes + kSegmentCost;
  return true;
}

void GroupPort::forget_early(const Early& early) {
  ranks_[early.header.from].kept -= early.body.size() + kSegmentCost;
  acknowledge(int(early.header.from), early.body.size());
}

void GroupPort::offer_early(ScheduleRun& run, int from, uint16_t message) {
  if (early_.empty()) return;
  const auto it = early_.find({run.op(), run.number(), uint32_t(from), message});
  if (it == early_.end()) return;
  std::erase_if(it->second, [&](const Early& early) {
    messenger_->mutex().held_by_caller();
    if (run.take(early.header, early.first, early.body) == ScheduleRun::Outcome::kLater) return false;
    forget_early(early);
    return true;
  });
  if (it->second.empty()) early_.erase(it);
}

std::byte* GroupPort::place(const MessageHeader& header, size_t bytes) {
  if (left_ || header.from >= ranks_.size()) return nullptr;
  if (header.kind == Kind::kSegment) return rendezvous_.place(header, bytes);
  for (ScheduleRun* run : runs_) {
    if (run->owns(header)) return run->place(header, bytes);
  }
  return nullptr;
}

void GroupPort::dropped(const MessageHeader& header, const std::byte* where) {
  if (rendezvous_.dropped(where)) return;
  for (ScheduleRun* run : runs_) {
    if (run->owns(header)) run->dropped(header);
  }
}

void GroupPort::note_called(const MessageHeader& header) {
  uint32_t& called = ranks_[header.from].called;
  if (before(called, header.op)) called = header.op;
}

void GroupPort::begin_operation(uint32_t op, const Label& label) { called_[op % called_.size()] = {op, label}; }

void GroupPort::show_label(int rank, uint32_t op, Asks asks) {
  const Called& called = called_[op % called_.size()];
  if (called.op != op) return;
  MessageHeader header;
  header.kind = Kind::kLabel;
  header.op = op;
  header.value = asks == Asks::kYes;
  send(rank, header, std::as_bytes(std::span(&called.label, 1)), {}, nullptr, 0);
}

/// Compares a label with this rank's label of the same operation, if it has begun. A sender with a different label may
/// wait for data that never comes, so this rank shows it its own label.
void GroupPort::take_label(const MessageHeader& header, std::span<const std::byte> whole) {
  const auto label = read_behind_header<Label>(whole);
  const Called& called = called_[header.op % called_.size()];
  if (!label) return;
  note_called(header);
  if (called.op != header.op) return;
  if (called.label == *label) {
    if (header.value != 0) show_label(int(header.from), header.op, Asks::kNo);
    return;
  }
  const bool news = !clash_ || clash_->second.op != header.op;
  if (news) clash_ = {int(header.from), {header.op, *label}};
  if (news && before(header.op, ended_) && !late_label_) late_label_ = {int(header.from), header.op, *label};
  if (news) show_label(int(header.from), header.op);
}

std::optional<std::pair<int, Label>> GroupPort::clash(uint32_t op) const {
  if (!clash_ || clash_->second.op != op) return std::nullopt;
  return std::pair(clash_->first, clash_->second.label);
}

std::optional<Label> GroupPort::called_here(uint32_t op) const {
  const Called& called = called_[op % called_.size()];
  return called.op == op ? std::optional(called.label) : std::nullopt;
}

// --- failure

void GroupPort::fail(Told told) {
  if (failed_.load(std::memory_order_relaxed) || left_) return;
  told_ = std::move(told);
  failed_.store(true, std::memory_order_release);
  if (hear_) hear_(*told_);
  notify_();
}

void GroupPort::on_failure(std::function<void(const Told&)> hear) {
  hear_ = std::move(hear);
  if (told_) hear_(*told_);
}

std::optional<GroupPort::Fate> GroupPort::fate(int rank) {
  const Rank& there = ranks_[size_t(rank)];
  if (!there.known) return std::nullopt;
  if (there.left) return Fate{rank, Fate::What::kLeft};
  const std::string& lost = messenger_->lost_because(there.peer);
  if (lost.empty()) return std::nullopt;
  return Fate{rank, messenger_->has_given_up_this(there.peer) ? Fate::What::kGaveThisUp : Fate::What::kLost, lost};
}

Clock::duration GroupPort::silence(int rank) const {
  const Rank& there = ranks_[size_t(rank)];
  return there.known ? messenger_->silence_of(there.peer) : Clock::duration(0);
}

std::string GroupPort::unheard(int rank) {
  const Rank& there = ranks_[size_t(rank)];
  return there.known ? messenger_->unheard(there.peer) : "";
}

void GroupPort::poison(const Failure& why, const std::vector<int>& ranks) {
  MessageHeader header;
  header.kind = Kind::kPoison;
  const FailureNote note = FailureNote::of(why);
  for (const int rank : ranks) {
    if (ranks_[size_t(rank)].known) send(rank, header, {}, note.used(), nullptr, 0);
  }
}

void GroupPort::tell_trouble(const Failure& what) {
  static_assert(sizeof(FailureNote) <= Messenger::kMostCopied);
  if (left_ || trouble_) return;
  trouble_ = FailureNote::of(what);
  for (const int rank : contacts()) pass_trouble(rank);
}

void GroupPort::pass_trouble(int rank) {
  Rank& there = ranks_[size_t(rank)];
  if (!trouble_ || !there.known || std::exchange(there.told_trouble, true)) return;
  MessageHeader header;
  header.kind = Kind::kTrouble;
  send(rank, header, {}, trouble_->used(), nullptr, 0);
}

/// A rank that pings this one waits for it, so it must be told of trouble.
void GroupPort::pinged_by(uint32_t rank, PeerId peer) {
  if (rank >= ranks_.size() || !ranks_[rank].known || ranks_[rank].peer != peer) return;
  ranks_[rank].contacted = true;
  pass_trouble(int(rank));
}

void GroupPort::note_left(uint32_t rank) {
  if (rank < ranks_.size()) ranks_[rank].left = true;
}

std::vector<int> GroupPort::contacts() const {
  std::vector<int> ranks;
  for (size_t r = 0; r < ranks_.size(); ++r) {
    if (ranks_[r].contacted && ranks_[r].known) ranks.push_back(int(r));
  }
  return ranks;
}

// --- monitored barrier

void GroupPort::monitor_in(int rank, uint64_t turn) {
  MessageHeader header;
  header.kind = Kind::kMonitorIn;
  header.value = turn;
  send(rank, header, {}, {}, nullptr, 0);
}

void GroupPort::monitor_out(int rank, uint64_t turn) {
  MessageHeader header;
  header.kind = Kind::kMonitorOut;
  header.value = turn;
  send(rank, header, {}, {}, nullptr, 0);
}

// --- mail

std::optional<GroupPort::MailMessage> GroupPort::next_mail() {
  if (mail_.empty()) return std::nullopt;
  MailMessage message = std::move(mail_.front());
  mail_.pop_front();
  ranks_[size_t(message.from)].mail_cost -= cost_of(message);
  return message;
}

void GroupPort::announce(int rank, const MailHead& head, std::span<const std::byte> body) {
  MessageHeader header;
  header.kind = Kind::kMail;
  send(rank, header, std::as_bytes(std::span(&head, 1)), body, nullptr, 0);
}

void GroupPort::tell_taken(int rank, const Taken& taken) {
  MessageHeader header;
  header.kind = Kind::kTaken;
  header.value = taken.value();
  send(rank, header, {}, {}, nullptr, 0);
}

void GroupPort::grant(int rank, uint64_t number, std::byte* data, size_t bytes) {
  rendezvous_.expect(rank, number, data, bytes);
  MessageHeader header;
  header.kind = Kind::kGrant;
  header.value = number;
  send(rank, header, {}, {}, nullptr, 0);
}

void GroupPort::drop_mail() {
  for (Rank& rank : ranks_) rank.mail_cost = 0;
  mail_.clear();
  rendezvous_.drop();
}

}  // namespace nvx::net
