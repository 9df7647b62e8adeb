#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "support/ranks.h"
#include "support/schedule_runs.h"
#include "support/scripted_link.h"

/// One rank of a group over a scripted link, beside peers that the test simulates.
namespace nvx::test {

using net::First;
using net::Kind;
using net::MessageHeader;
using net::Progress;
using schedule::Collective;

inline constexpr size_t kSegment = 64;
inline constexpr uint64_t kGroup = 5;

/// Rank 0 of 2 over a scripted link, all on one thread. A run adds 40 integers with rank 1, or receives them: messages
/// of three segments, the last of them shorter.
class Alone {
 public:
  static constexpr size_t kElements = 40, kBytes = 4 * kElements;

  explicit Alone(const char* schedule = "pair", Collective collective = Collective::kAllReduce,
                 Memory memory = Memory::kApart)
      : row_(*schedule::find(collective, schedule)),
        link_(*new ScriptedLink(kSegment)),
        messenger_(
            std::make_shared<net::Messenger>(std::unique_ptr<net::Link>(&link_), std::chrono::milliseconds(200))),
        port_(std::make_unique<net::GroupPort>(messenger_, kGroup, 0, 3)),
        lock_(std::make_unique<MutexLock>(messenger_->mutex())) {
    for (int rank = 1; rank < 3; ++rank) connect(rank);
    Shape shape = shape_of({collective, 2, kElements, 4, /*root=*/1});
    part_ = std::make_unique<Part>(shape, 0, memory, 0);
  }
  ~Alone() {
    hold();
    run_.reset();
    lock_.reset();
    port_.reset();
    fresh_.reset();
  }

  ScriptedLink& link() { return link_; }
  net::ScheduleRun& run() { return *run_; }
  net::GroupPort& port() { return *port_; }
  std::optional<net::GroupPort::Departure> departure() { return hold(), port_->departure(1); }
  void connect(int rank) {
    hold();
    Bytes address(16);
    address[0] = std::byte(rank);
    port_->connect(rank, address);
  }
  void disconnect() { hold(), port_->disconnect(1); }
  void ping() { hold(), port_->ping(1); }
  /// From the group that has begun, which connects to rank 1.
  void ping_from_group_begun() {
    hold();
    Bytes address(16);
    address[0] = std::byte(1);
    const auto connect = [&](net::GroupPort& port) {
      port.mutex().held_by_caller(), port.connect(1, address), port.ping(1);
    };
    connect(*fresh_);
  }
  void check_peers() { hold(), run_->check_peers(); }
  /// The messenger's reason for the loss of rank 1's process.
  std::string lost_because() { return hold(), messenger_->lost_because(0); }
  /// The same for the set-up of another group: rank 1 is rank 1 of the job.
  std::string how_lost() {
    hold();
    const auto membership = std::make_shared<int>();
    messenger_->liveness().note_rank(1, 0, membership, "(there)");
    return messenger_->liveness().how_lost(1);
  }
  std::string other_failure(int rank) { return hold(), port_->other_failure(rank).text; }
  std::optional<Clock::time_point> gave_up_wait_at() { return hold(), port_->other_failure(1).gave_up_at; }
  void report_other_failure(const std::string& what) { hold(), port_->report_other_failure({Code::kTimeout, what}); }
  std::optional<net::GroupPort::ReportedFailure> reported() { return hold(), port_->reported(); }
  void progress() { hold(), messenger_->progress(); }
  /// Another group has begun, and does not know the processes of its ranks yet.
  void begin_group(uint64_t group) {
    lock_.reset();
    fresh_ = std::make_unique<net::GroupPort>(messenger_, group, 0, 3);
    lock_ = std::make_unique<MutexLock>(messenger_->mutex());
  }
  /// How long a report of the group's failure to these ranks takes, or of the failure of the group that has begun.
  Clock::duration report_failure(uint64_t group, const std::vector<int>& ranks) {
    poison(*(group == kGroup ? port_ : fresh_), ranks);
    lock_.reset();
    const auto began = Clock::now();
    messenger_->flush_reports();
    const auto took = Clock::now() - began;
    lock_ = std::make_unique<MutexLock>(messenger_->mutex());
    return took;
  }
  std::optional<net::CallFingerprints::Theirs> late_call() { return hold(), port_->calls().take_late(); }

  net::ScheduleRun& begin(uint32_t op = 1) {
    hold();
    run_ = std::make_unique<net::ScheduleRun>(*port_, part_->args(row_, op, 4));
    advance();
    return *run_;
  }
  Progress advance() {
    hold();
    Progress progress = run_->advance();
    for (int i = 0; i < 5; ++i) messenger_->progress(), progress = run_->advance();
    return progress;
  }
  void end() {
    hold();
    run_.reset();
    part_.reset();
  }
  void end_operation(uint32_t op) {
    hold();
    run_.reset();
    port_->end_operation(op + 1);
  }

  /// A segment as rank 1 would send it.
  Sent segment(size_t k, uint32_t op = 1, size_t total = kBytes) const {
    MessageHeader header = header_of(k == 0 ? Kind::kFirst : Kind::kNext);
    header.op = op;
    header.segment = uint32_t(k);
    Sent sent;
    append(sent.header, header);
    if (k == 0) append(sent.header, First{fingerprint(1), total});
    sent.body = Bytes(std::min(kSegment, kBytes - k * kSegment), std::byte(1));
    return sent;
  }
  static MessageHeader header_of(Kind kind) {
    MessageHeader header;
    header.kind = kind;
    header.group = kGroup;
    header.from = 1;
    header.to = 0;
    return header;
  }
  Progress come(const std::vector<Sent>& messages) {
    for (const Sent& message : messages) link_.to_come.push_back(message);
    return advance();
  }
  static void poison(net::GroupPort& port, const std::vector<int>& ranks) {
    port.mutex().held_by_caller();
    port.poison({Code::kTimeout, "the test says so"}, ranks);
  }
  void hold() const ASSERT_CAPABILITY(port_->mutex()) ASSERT_CAPABILITY(messenger_->mutex()) {
    port_->mutex().held_by_caller();
    messenger_->mutex().held_by_caller();
  }

 private:
  const schedule::Row& row_;
  ScriptedLink& link_;
  std::shared_ptr<net::Messenger> messenger_;
  std::unique_ptr<net::GroupPort> port_, fresh_;
  std::unique_ptr<MutexLock> lock_;
  std::unique_ptr<Part> part_;
  std::unique_ptr<net::ScheduleRun> run_;
};

/// The same, with a run that has begun.
struct Begun : Alone {
  Begun() { begin(); }
};

/// The body of the pong with this value that this side has posted, if any.
inline std::optional<std::string> pong(const ScriptedLink& link, uint64_t value) {
  for (const Sent& sent : link.sent) {
    const MessageHeader header = sent.read();
    if (header.kind == Kind::kPong && header.value == value)
      return std::string(reinterpret_cast<const char*>(sent.body.data()), sent.body.size());
  }
  return {};
}

/// A message from the process at rank 1's address, not from a group. `ping`: the number of the ping that it answers.
inline Sent from_process(Kind kind, uint64_t value, const std::string& body = "", uint32_t ping = 0) {
  MessageHeader header = Alone::header_of(kind);
  header.value = value;
  header.op = ping;
  Sent sent;
  append(sent.header, header);
  append(sent.header, uint64_t(1));  // as read by connect() from the address
  sent.body.assign(reinterpret_cast<const std::byte*>(body.data()),
                   reinterpret_cast<const std::byte*>(body.data() + body.size()));
  return sent;
}

/// A message from rank 1 in the group.
inline Sent from_rank(Kind kind, std::span<const std::byte> body) {
  Sent sent;
  append(sent.header, Alone::header_of(kind));
  sent.body.assign(body.begin(), body.end());
  return sent;
}

/// A segment as rank 1 sends it, with one change.
template <class Change>
Sent changed(Sent message, Change change) {
  MessageHeader header = message.read();
  change(header);
  std::memcpy(message.header.data(), &header, sizeof header);
  return message;
}

}  // namespace nvx::test
