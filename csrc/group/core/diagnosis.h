#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "base/error.h"
#include "base/text.h"
#include "kernel/cpu/pad.h"

namespace nvx {

struct Members;

/// Advice for collectives that differ between ranks.
inline constexpr const char* kCallAlike =
    "make all ranks call the same collectives in the same order, with the same shapes, types, operators and roots";
inline constexpr const char* kCompareSizes = "compare the sizes of the tensors, or the split sizes, of the two ranks";

/// The ranks for which a wait waits. `names`: their names, and their progress if known.
struct Awaited {
  std::vector<int> ranks;
  std::string names;
  bool called = false;  ///< they have made the same call, so they are late or wait for others
};

/// The call of one rank. `name`: "rank 3 (pid 4711, host a01)".
struct Called {
  std::string name;
  kernel::Fingerprint what;
};
/// "A called X, B called Y", and the difference if the two texts do not show it.
std::string describe_difference(const Called& one, const Called& other);

/// Byte counts that do not match: `mine` bytes expected here, `theirs` sent by `peer`.
struct ByteCounts {
  std::string peer;
  uint64_t mine = 0, theirs = 0;
};

/// Builds the failures of one group from the view of one rank: cause, context and advice. `FailureState::fail()` stores
/// them. The leading words of a cause are stable: scripts and tests match them.
class Diagnosis {
 public:
  /// `name`: "rank 3"; `describe`: "rank 3 (pid 4711, host a01)".
  Diagnosis(std::string group, int rank, RankNames name, RankNames describe);
  /// `members` must outlive this object.
  explicit Diagnosis(const Members& members);

  /// "rank 3 (pid 4711, host a01)", for this rank.
  std::string self() const { return describe_(rank_); }
  std::string describe(int rank) const { return describe_(rank); }
  /// "this is rank 3": for `context`, if the failure does not belong to an operation.
  std::string me() const { return "this is " + name_(rank_); }
  /// "this is rank 3 in all_reduce(...) #7 of group g". `what`: the operation.
  std::string context(const std::string& what) const { return me() + " in " + what + " of group " + group_; }

  /// `where`: " at #7"; `how`: the calls of the two ranks.
  Failure mismatch(const std::string& where, const std::string& how, const std::string& context) const;
  Failure counts(const std::string& where, const std::string& what, const ByteCounts& bytes,
                 const std::string& context) const;
  Failure bad_lease(const std::string& peer, const std::string& context) const;
  Failure bad_message(const std::string& peer, const std::string& what, const std::string& context) const;
  /// `after`: "1.50 s", empty if unknown; `awaited`: names of `ranks` ranks (0: unknown); `cycle`: of
  /// `cycle_of_waits()`.
  Failure timeout(const std::string& what, const std::string& after, const std::string& awaited, size_t ranks,
                  const std::string& cycle, const std::string& context) const;
  Failure no_memory(const std::string& what) const;

  /// `name` describes the rank, with its progress if known. The callers add `Failure::before`.
  Failure died(int rank, const std::string& name, const ExitStatus& status) const;
  Failure left(int rank, const std::string& name, const std::string& how) const;
  /// A rank of another host: the connection is lost, or that rank considers this one lost.
  Failure lost(int rank, const std::string& why) const;
  Failure declared_lost(int rank, const std::string& why) const;
  /// A failure that rank `by` reported. The reporter is seldom at fault, so its advice stays, or else names another
  /// rank or this one.
  Failure reported(const Failure& failure, int by) const;

  Failure aborted(const std::string& why = "") const;
  Failure destroyed() const;    ///< this rank has left the group with operations in flight
  Failure interrupted() const;  ///< Ctrl-C

  // Results of calls that do not begin.
  Failure failed_earlier(Failure first, const std::string& what) const;
  Status forked(bool has_port) const;
  Status closed() const;
  Status reentrant() const;

 private:
  const std::string group_;
  const int rank_;
  const RankNames name_, describe_;
};

}  // namespace nvx
