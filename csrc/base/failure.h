#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace nvx {

enum class Code {
  kTimeout,      ///< a wait outlived its deadline
  kMismatch,     ///< two ranks called different operations
  kPeerDied,     ///< the process of a rank has ended
  kPeerLeft,     ///< a rank has destroyed the group that this one still waits in
  kPeerFailed,   ///< another rank reported a failure first; its words are repeated
  kAborted,      ///< this rank has called the operation off itself: by abort(), or by leaving the group
  kInterrupted,  ///< Ctrl-C on the main thread
  kInvalid,      ///< an argument nobody can serve; the group stays usable
  kSystem,       ///< the operating system refused something
};
inline constexpr size_t kCodes = size_t(Code::kSystem) + 1;

const char* name(Code code);

/// How a process has ended.
struct Ending {
  enum class How : uint8_t { kUnknown, kExited, kKilled };
  static constexpr size_t kHows = size_t(How::kKilled) + 1;
  How how = How::kUnknown;
  int32_t number = 0;  ///< the exit code, or the signal

  bool known() const { return how != How::kUnknown; }
  bool operator==(const Ending&) const = default;
};

/// "signal 9" or "exit code 1", put between these two texts; empty where that is not known.
std::string words_of(const Ending& ending, const std::string& before = "", const std::string& behind = "");

inline constexpr int kNobody = -1;

/// What has happened to a group, or to the making of one: what goes on from here is decided by these fields, and the
/// text that users see is made of them, by words_of(). Ranks tell each other a Failure as a FailureNote.
struct Failure {
  Code code = Code::kSystem;
  std::string cause{};         ///< what has happened, in words, without "nvx: " and without advice
  std::string context{};       ///< where this rank has met it
  std::string advice{};        ///< what to do about it, for who reads this here: "see the log of rank 3"
  std::string before{};        ///< the failure of another group that this one comes of, in words
  int who = kNobody;           ///< the rank that has ended, is lost, or has left
  Ending ending{};             ///< how it has ended, where that is known
  std::vector<int> awaited{};  ///< the ranks that were waited for
  bool told = false;           ///< another rank has met it, and all above is what that one says

  /// What it is to this rank.
  Code met_as() const { return told ? Code::kPeerFailed : code; }
};

/// In one sentence, which begins with "nvx: ".
std::string words_of(const Failure& failure);

/// It, and where it was met, too.
Failure met_in(Failure failure, const std::string& context);

}  // namespace nvx
