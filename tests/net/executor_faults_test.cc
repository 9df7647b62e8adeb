// One run beside a peer that breaks the protocol or ends: what the run reports, and which memory it accesses
// afterwards.

#include <gtest/gtest.h>

#include <cstring>

#include "support/ranks.h"
#include "support/schedule_runs.h"
#include "support/scripted_link.h"

namespace nvx::test {
namespace {

using net::First;
using net::Kind;
using net::MessageHeader;
using net::Progress;
using schedule::Collective;
using Cause = net::ScheduleRun::Verdict::Cause;

constexpr size_t kSegment = 64;
constexpr uint64_t kGroup = 5;

/// Rank 0 of 2 over a scripted link, all on one thread. A run adds 40 integers with rank 1, or receives them: messages
/// of three segments, the last of them shorter.
class Alone {
 public:
  static constexpr size_t kElements = 40, kBytes = 4 * kElements;

  explicit Alone(const char* schedule = "pair", Collective collective = Collective::kAllReduce)
      : row_(*schedule::find(collective, schedule)),
        link_(*new ScriptedLink(kSegment)),
        messenger_(
            std::make_shared<net::Messenger>(std::unique_ptr<net::Link>(&link_), std::chrono::milliseconds(200))),
        port_(std::make_unique<net::GroupPort>(messenger_, kGroup, 0, 3)),
        lock_(std::make_unique<MutexLock>(messenger_->mutex())) {
    for (int rank = 1; rank < 3; ++rank) connect(rank);
    Shape shape = shape_of({collective, 2, kElements, 4, /*root=*/1});
    part_ = std::make_unique<Part>(shape, 0, Memory::kApart, 0);
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
  /// The messenger's reason for the loss of rank 1's process.
  std::string lost_because() { return hold(), messenger_->lost_because(0); }
  std::string other_failure(int rank) { return hold(), port_->other_failure(rank); }
  std::optional<Clock::time_point> gave_up_wait_at() { return hold(), port_->gave_up_wait_at(1); }
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
  Clock::duration report_failure(uint64_t group, const std::vector<int>& ranks, std::chrono::milliseconds most) {
    lock_.reset();
    const auto began = Clock::now();
    (group == kGroup ? port_ : fresh_)->poison({Code::kTimeout, "the test says so"}, ranks, most);
    const auto took = Clock::now() - began;
    lock_ = std::make_unique<MutexLock>(messenger_->mutex());
    return took;
  }
  std::optional<net::CallLabels::Theirs> late_label() { return hold(), port_->calls().take_late(); }

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
    if (k == 0) append(sent.header, First{label(1), total});
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
std::optional<std::string> pong(const ScriptedLink& link, uint64_t value) {
  for (const Sent& sent : link.sent) {
    const MessageHeader header = sent.read();
    if (header.kind == Kind::kPong && header.value == value)
      return std::string(reinterpret_cast<const char*>(sent.body.data()), sent.body.size());
  }
  return {};
}

/// A message from the process at rank 1's address, not from a group. `ping`: the number of the ping that it answers.
Sent from_process(Kind kind, uint64_t value, const std::string& body = "", uint32_t ping = 0) {
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
Sent from_rank(Kind kind, std::span<const std::byte> body) {
  Sent sent;
  append(sent.header, Alone::header_of(kind));
  sent.body.assign(body.begin(), body.end());
  return sent;
}

TEST(FailureReport, AFailureComesWithItsFactsAndIsThisRanksOwn) {
  Begun alone;
  const Failure late{.code = Code::kTimeout, .cause = "timed out", .context = "there", .awaited = {0, 2}};
  alone.come({from_rank(Kind::kPoison, FailureNote::of(late).used())});
  const auto reported = alone.reported();
  ASSERT_TRUE(reported);
  EXPECT_EQ(reported->by, 1);
  EXPECT_EQ(reported->failure.cause, "timed out");
  EXPECT_EQ(reported->failure.context, "");
  EXPECT_EQ(reported->failure.code, Code::kTimeout);
  EXPECT_EQ(reported->failure.reported_code(), Code::kPeerFailed);
  EXPECT_EQ(reported->failure.awaited, (std::vector<int>{0, 2}));
}

/// A report to a process that is stopped stays in the link.
TEST(FailureReport, AFailedGroupDoesNotWaitForTheReportsOfOthers) {
  using std::chrono::milliseconds;
  Begun alone;
  alone.begin_group(kGroup + 1);
  alone.link().reads_posts = false;
  EXPECT_GE(alone.report_failure(kGroup, {1}, milliseconds(20)), milliseconds(20));
  EXPECT_LT(alone.report_failure(kGroup + 1, {}, milliseconds(10'000)), milliseconds(5000));
}

/// A damaged report of another group's failure is ignored.
TEST(FailureReport, AFailureWhoseNoteIsDamagedIsOneAllTheSame) {
  const Failure lost{.code = Code::kPeerDied, .cause = "is lost", .lost_rank = 3};  // of ranks 0 to 2
  const FailureNote note = FailureNote::of(lost);
  for (const size_t bytes : {size_t(0), size_t(20), note.used().size() - 1, note.used().size()}) {
    Begun alone;
    alone.come({from_rank(Kind::kOtherFailure, note.used().first(bytes))});
    EXPECT_EQ(alone.other_failure(1), "");
    alone.come({from_rank(Kind::kPoison, note.used().first(bytes))});
    const auto reported = alone.reported();
    ASSERT_TRUE(reported);
    EXPECT_EQ(reported->failure.cause, "the failure note of rank 1 is damaged or from another version of nvx");
    EXPECT_EQ(reported->failure.lost_rank, kNoRank);
  }
}

TEST(Signs, ReceivedSegmentsAreAnsweredWithoutAPing) {
  Begun alone;
  EXPECT_FALSE(pong(alone.link(), 1));
  alone.come({alone.segment(0), alone.segment(1)});
  EXPECT_TRUE(pong(alone.link(), 1)) << "a pong would arrive after all data that is on its way";
  alone.link().sent.clear();
  alone.come({alone.segment(2)});
  EXPECT_FALSE(pong(alone.link(), 1)) << "once a second is enough";
}

TEST(Signs, AProcessThatWasDeclaredLostGetsTheReasonWhenItPings) {
  Begun alone;
  alone.link().to_lose.push_back(0);
  alone.advance();
  alone.link().sent.clear();
  alone.come({from_process(Kind::kPing, 0), from_process(Kind::kPing, 0)});
  EXPECT_EQ(pong(alone.link(), 2), "the test says so");
  EXPECT_EQ(alone.link().sent.size(), 1u) << "once";
}

/// The group's port exists before the group knows the processes of its ranks, so a peer may be faster.
TEST(Signs, AProcessDeclaredLostThatPingsANewGroupGetsNoReason) {
  Begun alone;
  alone.link().to_lose.push_back(0);
  alone.advance();
  alone.begin_group(kGroup + 1);
  alone.link().sent.clear();
  Sent ping = from_process(Kind::kPing, 0);
  MessageHeader header = ping.read();
  header.group = kGroup + 1;
  std::memcpy(ping.header.data(), &header, sizeof header);
  alone.come({ping});
  EXPECT_FALSE(pong(alone.link(), 2)) << "it is about to connect to it";
}

TEST(Signs, ProcessLosesAPeerThatHasDeclaredItLost) {
  Begun alone;
  alone.ping();
  alone.come({from_process(Kind::kPong, 2, "has been silent", 1)});
  const auto departure = alone.departure();
  ASSERT_TRUE(departure);
  EXPECT_EQ(departure->why, "considers this process lost: has been silent");
}

TEST(Signs, PeersReasonIsCutToOnePrintableLine) {
  Begun alone;
  alone.ping();
  alone.come({from_process(Kind::kPong, 2, "a\nb\x1b[2J\xff" + std::string(5000, 'x'), 1)});
  const auto departure = alone.departure();
  ASSERT_TRUE(departure);
  EXPECT_NE(departure->why.find("lost: a b [2J?xxx"), std::string::npos) << departure->why;
  EXPECT_LT(departure->why.size(), 1200u);
}

/// A report that arrived from rank 1 before it was lost, and this process's report to it.
TEST(Signs, FailuresOfOtherGroupsAreReportedOnceToWaitingRanks) {
  Begun alone;
  alone.come({from_rank(Kind::kOtherFailure, FailureNote::of({Code::kTimeout, "its group 9 had failed\n"}).used())});
  EXPECT_EQ(alone.other_failure(1), "its group 9 had failed ");
  EXPECT_EQ(alone.other_failure(2), "");
  EXPECT_FALSE(alone.departure()) << "it is there all the same";
  const auto reports = [&] {
    return std::count_if(alone.link().sent.begin(), alone.link().sent.end(),
                         [](const Sent& sent) { return sent.read().kind == Kind::kOtherFailure; });
  };
  alone.report_other_failure("another one");
  EXPECT_EQ(reports(), 1) << "to rank 1, which has received a message";
  const Sent ping = from_process(Kind::kPing, 0);
  alone.come({ping, ping});
  EXPECT_EQ(reports(), 1);
}

/// Rank 1 has given up a wait for these ranks 250 ms ago.
TEST(Signs, ATimeoutOfAnotherGroupNamesTheAwaitedRankAndTheTime) {
  for (const int awaited : {0, 2}) {
    Begun alone;
    const FailureNote note = FailureNote::of({.code = Code::kTimeout, .cause = "timed out", .awaited = {awaited}});
    Sent report = from_rank(Kind::kOtherFailure, note.used());
    MessageHeader header = report.read();
    header.value = 250;
    std::memcpy(report.header.data(), &header, sizeof header);
    const auto now = Clock::now();
    alone.come({report});
    const auto when = alone.gave_up_wait_at();
    ASSERT_EQ(when.has_value(), awaited == 0);
    if (when) {
      EXPECT_GE(*when, now - std::chrono::milliseconds(250));
      EXPECT_LT(*when, Clock::now() - std::chrono::milliseconds(249));
    }
  }
}

TEST(Signs, ALatePingGetsAnEarlierFailure) {
  Alone alone;
  alone.report_other_failure("another one");
  EXPECT_TRUE(alone.link().sent.empty()) << "nobody waits";
  alone.link().to_come.push_back(from_process(Kind::kPing, 0));
  alone.progress();
  ASSERT_EQ(alone.link().sent.size(), 2u);
  EXPECT_EQ(alone.link().sent[1].read().kind, Kind::kOtherFailure);
}

/// At process exit, waiting for an answer uses no CPU time.
TEST(Signs, TheEndOfAProcessSleepsWhileItWaits) {
  auto* const link = new ScriptedLink(kSegment);
  const auto messenger =
      std::make_shared<net::Messenger>(std::unique_ptr<net::Link>(link), std::chrono::milliseconds(300));
  {
    net::GroupPort port(messenger, kGroup, 0, 2);
    MutexLock lock(messenger->mutex());
    port.mutex().held_by_caller();
    port.connect(1, Bytes(16));
    port.send(1, {Kind::kMonitorIn, 1});
  }
  const auto began = Clock::now();
  messenger->finish();
  EXPECT_GE(Clock::now() - began, std::chrono::milliseconds(290)) << "nobody has answered";
  messenger->close();
  EXPECT_LT(link->looks, 900u);
}

/// An answer to a ping from before this group concerns an earlier one, even if this group has pinged since.
TEST(Signs, EarlierGroupsLossDoesNotCountNow) {
  Begun alone;
  alone.ping();
  alone.come({from_process(Kind::kPong, 2, "has been silent")});
  const auto departure = alone.departure();
  ASSERT_TRUE(departure);
  EXPECT_FALSE(departure->left());
  EXPECT_EQ(departure->why, "considers this process lost: has been silent") << "in that group";
  EXPECT_EQ(alone.lost_because(), "") << "not the process";
}

/// A segment as rank 1 sends it, with one change.
template <class Change>
Sent changed(Sent message, Change change) {
  MessageHeader header = message.read();
  change(header);
  std::memcpy(message.header.data(), &header, sizeof header);
  return message;
}

/// Otherwise the link would have two connections to the process.
TEST(Signs, ALostPeerIsForgottenBeforeItsProcessIsAddedAgain) {
  Begun alone;
  alone.disconnect();
  EXPECT_EQ(alone.link().forgotten, 0u);
  alone.connect(1);
  EXPECT_EQ(alone.link().forgotten, 1u);
}

/// Nobody could take it back when the run ends.
TEST(RunFaults, AMessageOfALostPeerGetsNoPlace) {
  for (const bool lost : {false, true}) {
    Alone alone("binomial", Collective::kBroadcast);
    alone.link().fetches = true;
    alone.link().minds_forget = !lost;
    alone.begin();
    if (lost) alone.link().to_lose.push_back(0);
    alone.come({alone.segment(0)});
    EXPECT_EQ(alone.link().open_fetches(), lost ? 0u : 1u);
    alone.link().minds_forget = true;
  }
}

TEST(RunFaults, AnyOrderOfSegmentsIsRight) {
  Begun alone;
  EXPECT_EQ(alone.come({alone.segment(2), alone.segment(0)}), Progress::kPending);
  EXPECT_EQ(alone.run().waits_for(), std::vector<int>{1});
  EXPECT_EQ(alone.come({alone.segment(1)}), Progress::kDone);
}

TEST(RunFaults, AnotherLabelIsAMismatchThatNamesIt) {
  Begun alone;
  Sent other = alone.segment(0);
  other.header[sizeof(MessageHeader)] = std::byte(9);
  EXPECT_EQ(alone.come({other}), Progress::kFailed);
  EXPECT_EQ(alone.run().verdict().cause, Cause::kMismatch);
  EXPECT_EQ(alone.run().verdict().rank, 1);
  EXPECT_EQ(alone.run().verdict().theirs, label(9));
}

TEST(RunFaults, AnotherLengthIsReported) {
  Begun alone;
  EXPECT_EQ(alone.come({alone.segment(0, 1, 4000)}), Progress::kFailed);
  EXPECT_EQ(alone.run().verdict().cause, Cause::kCounts);
  EXPECT_EQ(alone.run().verdict().mine, Alone::kBytes);
  EXPECT_EQ(alone.run().verdict().other, 4000u);
}

TEST(RunFaults, SegmentOfNoMessageFailsTheRun) {
  const auto verdict_on = [](auto make) {
    Begun alone;
    EXPECT_EQ(alone.come(make(alone)), Progress::kFailed);
    EXPECT_EQ(alone.run().verdict().rank, 1);
    return alone.run().verdict().cause;
  };
  using Messages = std::vector<Sent>;
  EXPECT_EQ(verdict_on([](Alone& a) {
              return Messages{a.segment(0), a.segment(1), a.segment(1)};
            }),
            Cause::kGarbage)
      << "twice the same";
  EXPECT_EQ(verdict_on([](Alone& a) { return Messages{a.segment(0), a.segment(0)}; }), Cause::kGarbage);
  for (const size_t bytes : {size_t(0), size_t(63), size_t(65)}) {
    EXPECT_EQ(verdict_on([&](Alone& a) {
                Sent cut = a.segment(1);
                cut.body.resize(bytes);
                return Messages{cut};
              }),
              Cause::kGarbage)
        << bytes;
  }
  for (const uint32_t number : {3u, 4u, 0x7fffffffu, 0xffffffffu}) {
    EXPECT_EQ(verdict_on([&](Alone& a) {
                return Messages{changed(a.segment(1), [&](MessageHeader& h) { h.segment = number; })};
              }),
              Cause::kGarbage)
        << number;
  }
  EXPECT_EQ(
      verdict_on([](Alone& a) { return Messages{changed(a.segment(1), [](MessageHeader& h) { h.segment = 0; })}; }),
      Cause::kGarbage)
      << "the beginning of a message without its label";
  EXPECT_EQ(verdict_on([](Alone& a) {
              Sent bare = a.segment(0);
              bare.header.resize(sizeof(MessageHeader) + 7);
              return Messages{bare};
            }),
            Cause::kGarbage);
}

/// A message for another run neither fails nor completes this one.
TEST(RunFaults, MessageForAnotherRunChangesNothing) {
  Begun alone;
  std::vector<Sent> all_invalid;
  const auto invalid = [&](auto change) { all_invalid.push_back(changed(alone.segment(0), change)); };
  invalid([](MessageHeader& h) { h.magic ^= 1; });
  invalid([](MessageHeader& h) { h.version += 1; });
  invalid([](MessageHeader& h) { h.kind = Kind(77); });
  invalid([](MessageHeader& h) { h.from = 0; });
  invalid([](MessageHeader& h) { h.from = 3; });
  invalid([](MessageHeader& h) { h.from = 0xffffffff; });
  invalid([](MessageHeader& h) { h.from = 2; });
  invalid([](MessageHeader& h) { h.to = 1; });
  invalid([](MessageHeader& h) { h.group += 1; });
  invalid([](MessageHeader& h) { h.op = 2; });
  invalid([](MessageHeader& h) { h.run = 1; });
  invalid([](MessageHeader& h) { h.message = 1; });
  all_invalid.push_back({Bytes(31), {}});
  all_invalid.push_back({{}, {}});
  for (Kind kind = Kind::kFirst; kind <= Kind::kMonitorOut; kind = Kind(int(kind) + 1)) {
    if (kind == Kind::kPoison || kind == Kind::kFirst || kind == Kind::kNext) continue;
    Sent bare;
    append(bare.header, Alone::header_of(kind));
    all_invalid.push_back(bare);
  }
  EXPECT_EQ(alone.come(all_invalid), Progress::kPending);
  EXPECT_EQ(alone.come({alone.segment(0), alone.segment(1), alone.segment(2)}), Progress::kDone);
  EXPECT_EQ(alone.come({alone.segment(0), alone.segment(1)}), Progress::kDone) << "too late to be distinguished";
}

TEST(RunFaults, ALostPeerIsNamed) {
  for (const bool reads : {true, false}) {
    Alone alone;
    alone.link().reads_posts = reads;
    alone.begin();
    alone.come({alone.segment(0)});
    alone.link().to_lose.push_back(0);
    alone.advance();
    alone.hold();
    alone.run().check_peers();
    EXPECT_EQ(alone.advance(), Progress::kFailed);
    EXPECT_EQ(alone.run().verdict().cause, Cause::kLost);
    EXPECT_EQ(alone.run().verdict().rank, 1);
    EXPECT_NE(alone.departure()->why.find("the test says so"), std::string::npos);
  }
}

/// For AddressSanitizer: the link reads and writes for the last time when it has to forget the peer.
TEST(RunFaults, AbandonedPostsEndInTime) {
  for (const bool minds : {true, false}) {
    Alone alone;
    alone.link().reads_posts = false;
    alone.link().minds_forget = minds;
    alone.begin();
    ASSERT_GT(alone.link().open_posts(), 0u);
    const auto began = Clock::now();
    if (minds) {
      alone.end();
      EXPECT_EQ(alone.link().open_posts(), 0u);
    } else {
      alone.hold();
      net::ScheduleRun* const runs[] = {&alone.run()};
      net::ScheduleRun::abandon(alone.port(), runs);  // the memory stays, because this link breaks its contract
      alone.link().reads_posts = true;
      alone.advance();
    }
    EXPECT_LT(Clock::now() - began, std::chrono::seconds(3));
  }
}

TEST(RunFaults, AbandonedFetchesEndInTime) {
  for (const bool refused : {false, true}) {
    Alone alone("binomial", Collective::kBroadcast);
    alone.link().fetches = true;
    alone.begin();
    alone.come({alone.segment(0), alone.segment(2)});
    ASSERT_EQ(alone.link().open_fetches(), 2u);
    if (refused) {  // the run fails with fetches in flight
      alone.link().fetches = false;
      Sent cut = alone.segment(1);
      cut.body.resize(3);
      EXPECT_EQ(alone.come({cut}), Progress::kFailed);
    }
    const auto began = Clock::now();
    alone.end();
    EXPECT_EQ(alone.link().open_fetches(), 0u);
    EXPECT_LT(Clock::now() - began, std::chrono::milliseconds(1000));
  }
}

/// The memory of a segment is released once the segment has arrived, also if it is refused.
TEST(RunFaults, RefusedFetchesAreOver) {
  Alone alone("binomial", Collective::kBroadcast);
  alone.link().fetches = true;
  alone.begin();
  alone.come({alone.segment(1), alone.segment(1)});
  alone.link().finish_fetches();
  EXPECT_EQ(alone.advance(), Progress::kFailed);
  EXPECT_EQ(alone.run().verdict().cause, Cause::kGarbage);
  const auto began = Clock::now();
  alone.end();
  EXPECT_LT(Clock::now() - began, std::chrono::milliseconds(100)) << "waits for fetches that are over";
  EXPECT_FALSE(alone.departure()) << "and gives up a peer for them";
}

TEST(RunFaults, FetchedSegmentsAreRight) {
  Alone alone("binomial", Collective::kBroadcast);
  alone.link().fetches = true;
  alone.begin();
  alone.come({alone.segment(2), alone.segment(0), alone.segment(1)});
  alone.link().finish_fetches();
  EXPECT_EQ(alone.advance(), Progress::kDone);
}

/// A segment for an operation that has ended here comes from a rank that called another operation.
TEST(RunFaults, StraysOfAnEndedOperationAreReported) {
  Alone alone;
  alone.hold();
  alone.end_operation(1);
  Sent other = alone.segment(0);
  other.header[sizeof(MessageHeader)] = std::byte(9);
  alone.begin(2);
  alone.come({other, alone.segment(1)});
  const auto late_label = alone.late_label();
  ASSERT_TRUE(late_label);
  EXPECT_EQ(late_label->rank, 1);
  EXPECT_EQ(late_label->op, 1u);
  EXPECT_EQ(late_label->label, label(9));
  // The same if it arrived early and was never used.
  alone.come({alone.segment(0, 3)});
  EXPECT_FALSE(alone.late_label());
  alone.end_operation(2);
  alone.end_operation(3);
  const auto later = alone.late_label();
  ASSERT_TRUE(later);
  EXPECT_EQ(later->op, 3u);
}

/// A correct peer stops at its credit. One that does not is disconnected before it has filled the memory.
TEST(RunFaults, PeerThatExceedsItsCreditIsDisconnected) {
  for (const bool of_bytes : {true, false}) {
    Begun alone;
    size_t kept = 0;
    alone.hold();
    for (uint32_t op = 2; op < 20'000 && !alone.departure(); ++op) {
      Sent early = alone.segment(0, op);
      early.body.resize(of_bytes ? 64 << 10 : 0);
      alone.come({early});
      kept += early.body.size() + 1;
    }
    ASSERT_TRUE(alone.departure());
    EXPECT_LT(kept, size_t(9) << 20);
    EXPECT_NE(alone.departure()->why.find("more than its credit allows"), std::string::npos) << alone.departure()->why;
  }
}

}  // namespace
}  // namespace nvx::test
