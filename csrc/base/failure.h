#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace nvx {

enum class Code {
  kTimeout,      ///< a wait exceeded its deadline
  kMismatch,     ///< two ranks called different operations
  kPeerDied,     ///< the process of a rank ended
  kPeerLeft,     ///< a rank destroyed the group while this one still waits in it
  kPeerFailed,   ///< another rank reported a failure first; its text is repeated
  kAborted,      ///< this rank aborted the operation, by abort() or by leaving the group
  kInterrupted,  ///< Ctrl-C on the main thread
  kInvalid,      ///< an invalid argument; the group stays usable
  kSystem,       ///< the operating system refused a call
};
inline constexpr size_t kCodes = size_t(Code::kSystem) + 1;

const char* name(Code code);

/// How a process ended.
struct ExitStatus {
  enum class How : uint8_t {
    kUnknown,
    kExited,
    kKilled,
    kReplaced,  ///< it lives, and runs another program
  };
  static constexpr size_t kHows = size_t(How::kReplaced) + 1;
  How how = How::kUnknown;
  int32_t number = 0;  ///< the exit code or the signal number

  bool known() const { return how != How::kUnknown; }
  bool operator==(const ExitStatus&) const = default;
};

/// "signal 9", "exit code 1" or "exec of another program" between the two texts. Empty if the status is unknown.
std::string text_of(const ExitStatus& status, const std::string& before = "", const std::string& behind = "");

inline constexpr int kNoRank = -1;

/// A failure of a group, or of its set-up, as facts. Code decides by these fields. The text for users is made from them
/// by text_of() and is never parsed. Ranks send a Failure to each other as a FailureNote.
struct Failure {
  Code code = Code::kSystem;
  std::string cause{};         ///< the event, without "nvx: " and without advice
  std::string context{};       ///< where this rank observed it
  std::string advice{};        ///< what the reader can do: "see the log of rank 3"
  std::string before{};        ///< the failure of another group that caused this one
  int lost_rank = kNoRank;     ///< the rank that ended, is unreachable, or left
  ExitStatus exit_status{};    ///< how that rank ended, if known
  std::vector<int> awaited{};  ///< the ranks that this rank waited for
  bool reported = false;       ///< another rank observed the failure and reported the fields above

  /// The code that this rank reports.
  Code reported_code() const { return reported ? Code::kPeerFailed : code; }
};

/// The failure in one sentence that begins with "nvx: ".
std::string text_of(const Failure& failure);

/// The failure with one more line of context: where this rank observed it.
Failure with_context(Failure failure, const std::string& context);

/// The failure as the cause of something else: "<what>: <its cause>". All other facts stay. `advice` is used only if
/// the failure has none, because the failure's own is more specific.
Failure reason_for(const std::string& what, Failure failure, const std::string& advice = "");

}  // namespace nvx
