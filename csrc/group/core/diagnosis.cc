#include "group/core/diagnosis.h"

#include <algorithm>
#include <csignal>
#include <utility>

#include "base/interrupt.h"
#include "base/text.h"
#include "group/plan/operation.h"
#include "group/setup/members.h"

namespace nvx {
namespace {

constexpr const char* kAfterAStop =
    "check whether this process was stopped (a debugger, SIGSTOP) or its host cut off; destroy the group and make "
    "another one";

}  // namespace

std::string describe_difference(const Called& one, const Called& other) {
  const kernel::Fingerprint &a = one.what, &b = other.what;
  const std::string first = nvx::describe(a), second = nvx::describe(b);
  std::string text = one.name + " called " + first + ", " + other.name + " called " + second;
  if (a.collective == b.collective && a.root != b.root) return text + ": their roots differ";
  if (first != second) return text;
  return text +
         (a.history != b.history ? ", but their earlier operations differed" : ", with different sizes for some ranks");
}

Diagnosis::Diagnosis(std::string group, int rank, RankNames name, RankNames describe)
    : group_(std::move(group)), rank_(rank), name_(std::move(name)), describe_(std::move(describe)) {}

Diagnosis::Diagnosis(const Members& members)
    : Diagnosis(
          members.name, members.rank, [&members](int rank) { return members.rank_name(rank); },
          [&members](int rank) { return members.topology.describe(rank); }) {}

// --- of an operation

Failure Diagnosis::mismatch(const std::string& where, const std::string& how, const std::string& context) const {
  return {.code = Code::kMismatch,
          .cause = "collective mismatch in group " + group_ + where + ": " + how,
          .context = context,
          .advice = kCallAlike};
}

Failure Diagnosis::counts(const std::string& where, const std::string& what, const ByteCounts& bytes,
                          const std::string& context) const {
  Failure failure = mismatch(where,
                             "in " + what + " " + self() + " expects " + std::to_string(bytes.mine) + " bytes from " +
                                 bytes.peer + ", which sends " + std::to_string(bytes.theirs) + " bytes",
                             context);
  failure.advice = kCompareSizes;
  return failure;
}

Failure Diagnosis::bad_lease(const std::string& peer, const std::string& context) const {
  return {Code::kMismatch, peer + " sent an invalid position of its staging memory", context, kOneVersion};
}

Failure Diagnosis::bad_message(const std::string& peer, const std::string& what, const std::string& context) const {
  return {Code::kMismatch, peer + " sends data that belongs to no message of " + what, context, kOneVersion};
}

Failure Diagnosis::timeout(const std::string& what, const std::string& after, const std::string& awaited, size_t ranks,
                           const std::string& cycle, const std::string& context) const {
  return {.code = Code::kTimeout,
          .cause = "timed out in " + what + " of group " + group_ + (after.empty() ? "" : " after " + after) +
                   ", waiting for " + awaited + (cycle.empty() ? "" : "; cycle of waits: " + cycle),
          .context = context,
          .advice = cycle.empty()
                        ? see_logs_of(ranks, "init_process_group(timeout=), NVX_TIMEOUT_S, nvx.set_timeout")
                        : "make these ranks call the operations of the cycle in the same order, and exchange messages "
                          "by dist.batch_isend_irecv; if an operation of the cycle is asynchronous, see the log of its "
                          "rank: it may be busy elsewhere"};
}

Failure Diagnosis::no_memory(const std::string& what) const {
  return {.code = Code::kSystem,
          .cause = self() + " has no memory left for " + what,
          .advice = "raise the memory limit of the process or container"};
}

// --- of another rank

Failure Diagnosis::died(int rank, const std::string& name, const ExitStatus& status) const {
  const bool killed = status == ExitStatus{ExitStatus::How::kKilled, SIGKILL};
  return {
      .code = Code::kPeerDied,
      .cause = name + " has ended" + text_of(status, " (", ")"),
      .advice = see_log_of(name_(rank)) + (killed ? "; if the kernel killed it, `dmesg | grep -i kill` shows it" : ""),
      .lost_rank = rank,
      .exit_status = status};
}

Failure Diagnosis::left(int rank, const std::string& name, const std::string& how) const {
  return {.code = rank == rank_ ? Code::kAborted : Code::kPeerLeft,
          .cause = name + " has left group " + group_ + " while other ranks wait for it: " + how,
          .advice = see_log_of(name_(rank)),
          .lost_rank = rank};
}

Failure Diagnosis::lost(int rank, const std::string& why) const {
  return {.code = Code::kPeerDied,
          .cause = describe_(rank) + " is lost: " + why,
          .advice = see_log_of(name_(rank)) + "; check that its host is up and reachable from here",
          .lost_rank = rank};
}

Failure Diagnosis::declared_lost(int rank, const std::string& why) const {
  return {.code = Code::kPeerDied, .cause = describe_(rank) + " " + why, .advice = kAfterAStop, .lost_rank = rank};
}

Failure Diagnosis::reported(const Failure& failure, int by) const {
  const std::vector<int>& awaited = failure.awaited;
  const bool waited_for_this = std::ranges::find(awaited, rank_) != awaited.end();
  Failure mine = with_context(failure, "reported by " + name_(by));
  if (!mine.advice.empty()) return mine;
  mine.advice = failure.lost_rank == rank_ ? kAfterAStop
                : waited_for_this ? "see what kept this rank, or allow more time (init_process_group(timeout=), "
                                    "NVX_TIMEOUT_S, nvx.set_timeout)"
                                  : "see the log of the rank named first";
  return mine;
}

// --- of this rank

Failure Diagnosis::aborted(const std::string& why) const {
  return {Code::kAborted, "group " + group_ + " was aborted on " + self() + (why.empty() ? "" : ": " + why)};
}

Failure Diagnosis::destroyed() const {
  return {Code::kAborted, "group " + group_ + " was destroyed on " + self() + " with operations in flight"};
}

Failure Diagnosis::interrupted() const { return {Code::kInterrupted, interrupt_text() + " on " + self()}; }

// --- calls that do not begin

/// The advice of the first failure no longer applies to these calls.
Failure Diagnosis::failed_earlier(Failure first, const std::string& what) const {
  first.cause = "group " + group_ + " failed earlier, so " + what + " was not begun; first error: " + first.cause;
  first.advice = "destroy the group and make another one";
  return first;
}

Status Diagnosis::forked(bool has_port) const {
  return {Code::kInvalid,
          "nvx: this process was forked from rank " + std::to_string(rank_) + "; a group does not cross a fork",
          has_port ? "start ranks with spawn or forkserver: connections to other hosts do not survive a fork"
                   : "start ranks with spawn, or call init_process_group in the child"};
}

Status Diagnosis::closed() const { return {Code::kInvalid, "nvx: group " + group_ + " has been destroyed"}; }

Status Diagnosis::reentrant() const {
  return {Code::kInvalid,
          "nvx: re-entrant call on " + self() + ": this thread is inside an operation of group " + group_ +
              " already (in a signal handler?), so waiting for the call would deadlock",
          "call it when the operation has returned, or abort the group"};
}

}  // namespace nvx
