// Failures as ranks report them to each other: all facts are kept, and inconsistent notes are refused.

#include "base/failure_note.h"

#include <gtest/gtest.h>

#include <functional>

#include "base/error.h"

namespace nvx {
namespace {

constexpr int kRanks = 4;

Failure some_failure() {
  return {.code = Code::kPeerDied,
          .cause = "rank 3 has ended, waiting for rank 0. Next: tea; before that, nothing",
          .context = "this is rank 1",
          .advice = "see the log of rank 3",
          .before = "group 2 of rank 3 had failed",
          .lost_rank = 3,
          .exit_status = {ExitStatus::How::kKilled, 9},
          .awaited = {3, 0}};
}

std::optional<Failure> read(const FailureNote& note) { return FailureNote::read(note.used(), kRanks); }

TEST(FailureNote, CarriesEveryFactExceptTheContext) {
  const Failure failure = some_failure();
  const auto decoded = read(FailureNote::of(failure));
  ASSERT_TRUE(decoded);
  EXPECT_EQ(decoded->code, failure.code);
  EXPECT_EQ(decoded->cause, failure.cause);
  EXPECT_EQ(decoded->context, "");
  EXPECT_EQ(decoded->advice, failure.advice);
  EXPECT_EQ(decoded->before, failure.before);
  EXPECT_EQ(decoded->lost_rank, 3);
  EXPECT_EQ(decoded->exit_status, failure.exit_status);
  EXPECT_EQ(decoded->awaited, failure.awaited);
  EXPECT_TRUE(decoded->reported);
  EXPECT_EQ(decoded->reported_code(), Code::kPeerFailed);
}

/// Every field is checked. All bytes are present, as in a pad.
TEST(FailureNote, IsRefusedWhereAnythingDoesNotHoldTogether) {
  const std::function<void(FailureNote&)> spoils[] = {
      [](FailureNote& n) { n.magic ^= 1; },
      [](FailureNote& n) { ++n.version; },
      [](FailureNote& n) { ++n.bytes; },
      [](FailureNote& n) { n.bytes = 0; },
      [](FailureNote& n) { n.code = kCodes; },
      [](FailureNote& n) { n.how = ExitStatus::kHows; },
      [](FailureNote& n) { n.lost_rank = kRanks; },
      [](FailureNote& n) { n.lost_rank = -2; },
      [](FailureNote& n) { n.awaited[1] = kRanks; },
      [](FailureNote& n) { n.awaited[0] = -1; },
      [](FailureNote& n) { n.awaited_ranks = FailureNote::kMostAwaited + 1; },
      [](FailureNote& n) { n.cause_bytes = 0xffff; },
      [](FailureNote& n) { n.before_bytes = 0xffff; },
      [](FailureNote& n) { --n.advice_bytes; },
      [](FailureNote& n) { n.bytes = uint16_t(n.bytes - n.cause_bytes), n.cause_bytes = 0; },
  };
  for (size_t i = 0; i < std::size(spoils); ++i) {
    FailureNote note = FailureNote::of(some_failure());
    spoils[i](note);
    EXPECT_FALSE(FailureNote::read(std::as_bytes(std::span(&note, 1)), kRanks)) << i;
  }
}

TEST(FailureNote, IsRefusedUnlessAllOfItHasCome) {
  const FailureNote note = FailureNote::of(some_failure());
  for (size_t bytes = 0; bytes < note.used().size(); ++bytes)
    EXPECT_FALSE(FailureNote::read(note.used().first(bytes), kRanks)) << bytes;
  EXPECT_TRUE(FailureNote::read(std::as_bytes(std::span(&note, 1)), kRanks)) << "as it lies in a pad";
}

TEST(FailureNote, CutsWhatHasNoRoomAndKeepsCharactersWhole) {
  Failure failure = some_failure();
  for (size_t before = 0; before < 4; ++before) {
    failure.cause = std::string(before, 'x');
    while (failure.cause.size() < 2000) failure.cause += "\xe6\x9d\xb1";
    const auto decoded = read(FailureNote::of(failure));
    ASSERT_TRUE(decoded);
    EXPECT_GT(decoded->cause.size(), FailureNote::kMostText - 3);
    EXPECT_EQ(decoded->cause, failure.cause.substr(0, decoded->cause.size()));
    EXPECT_EQ(decoded->before + decoded->advice, "");
    EXPECT_EQ(decoded->lost_rank, 3);
  }
  failure.cause = std::string(FailureNote::kMostText - failure.before.size() - 3, 'x');
  const auto decoded = read(FailureNote::of(failure));
  ASSERT_TRUE(decoded);
  EXPECT_EQ(decoded->before, failure.before);
  EXPECT_EQ(decoded->advice, "") << "half of an advice is none";
}

/// A note without a cause would be refused as damaged.
TEST(FailureNote, NamesItsCodeWhereNothingIsLeftOfTheCause) {
  Failure failure = some_failure();
  for (const std::string& cause : {std::string(), std::string(2000, '\x9d')}) {
    failure.cause = cause;
    const auto decoded = read(FailureNote::of(failure));
    ASSERT_TRUE(decoded) << cause.size();
    EXPECT_EQ(decoded->cause, "peer died");
    EXPECT_EQ(decoded->before, failure.before);
    EXPECT_EQ(decoded->advice, failure.advice);
  }
}

TEST(FailureNote, NamesTheFirstOfManyRanks) {
  Failure failure = some_failure();
  failure.awaited.resize(1000);
  for (size_t r = 0; r < failure.awaited.size(); ++r) failure.awaited[r] = int(r);
  const auto decoded = FailureNote::read(FailureNote::of(failure).used(), 1000);
  ASSERT_TRUE(decoded);
  EXPECT_EQ(decoded->awaited, std::vector<int>(failure.awaited.begin(), failure.awaited.begin() + 32));
}

TEST(FailureNote, IsFitForAMessageWhateverWasWritten) {
  const auto decoded = read(FailureNote::of({.code = Code::kSystem, .cause = "a\nb\x1b[2J\xff"}));
  ASSERT_TRUE(decoded);
  EXPECT_EQ(decoded->cause, "a b [2J?");
}

TEST(Failure, ReadsAsOneSentence) {
  Failure failure = some_failure();
  failure.cause = "rank 3 has ended" + text_of(failure.exit_status, " (", ")");
  EXPECT_EQ(text_of(with_context(failure, "in send")),
            "nvx: rank 3 has ended (signal 9); before that, group 2 of rank 3 had failed; this is rank 1; in send. "
            "Next: see the log of rank 3");
  EXPECT_EQ(text_of(Failure{.cause = "it"}), "nvx: it");
  EXPECT_EQ(text_of(ExitStatus{}, "(", ")"), "");
  EXPECT_EQ(text_of(ExitStatus{ExitStatus::How::kExited, 7}), "exit code 7");
}

TEST(Failure, AsTheReasonForAnotherKeepsItsFacts) {
  const Failure more = reason_for("no group", some_failure(), "drink tea");
  EXPECT_EQ(more.cause, "no group: " + some_failure().cause);
  EXPECT_EQ(more.advice, "see the log of rank 3") << "the rank that observed the failure knows the advice";
  EXPECT_EQ(more.before, some_failure().before);
  EXPECT_EQ(more.lost_rank, 3);
  EXPECT_EQ(more.exit_status, some_failure().exit_status);
  EXPECT_EQ(text_of(reason_for("no group", {.cause = "no memory"}, "drink tea")),
            "nvx: no group: no memory. Next: drink tea");
  EXPECT_EQ(text_of(reason_for("no group", failure_of(Error(Code::kSystem, "nvx: no memory", "buy some")))),
            "nvx: no group: no memory. Next: buy some");
}

/// Other ranks receive the cause and add their own advice.
TEST(Failure, OfThisRanksSystemNamesNvxOnceAndKeepsAdviceApart) {
  Failure inner = some_failure();
  inner.cause = "no memory", inner.advice = "buy some", inner.reported = true;
  const Failure failure = system_failure("launching failed", Error(inner));
  EXPECT_EQ(failure.reported_code(), Code::kSystem);
  EXPECT_EQ(failure.cause, "launching failed: no memory");
  EXPECT_EQ(failure.advice, "buy some");
  EXPECT_EQ(failure.lost_rank, 3);
  EXPECT_EQ(system_failure("launching failed", std::runtime_error("nvx: bad")).cause, "launching failed: bad");
}

/// The text of the advice does not matter.
TEST(Failure, OfAnErrorKeepsAdviceApart) {
  const Error error(Code::kSystem, "nvx: no. Next: nothing", "wait");
  EXPECT_EQ(error.failure().cause, "no. Next: nothing");
  EXPECT_EQ(error.failure().advice, "wait");
  EXPECT_STREQ(error.what(), "nvx: no. Next: nothing. Next: wait");
  EXPECT_EQ(with_context(error.status(), "here").what(), "nvx: no. Next: nothing; here. Next: wait");
  EXPECT_EQ(failure_of(std::runtime_error("bad")).cause, "bad");
  EXPECT_EQ(failure_of(std::runtime_error("bad: thing\n\nAt:\n  f.py(1)")).cause, "bad: thing");
  EXPECT_EQ(failure_of(error).advice, "wait");
}

}  // namespace
}  // namespace nvx
