#include "base/failure.h"

namespace nvx {

const char* name(Code code) {
  switch (code) {
    case Code::kTimeout: return "timeout";
    case Code::kMismatch: return "mismatch";
    case Code::kPeerDied: return "peer died";
    case Code::kPeerLeft: return "peer left";
    case Code::kPeerFailed: return "peer failed";
    case Code::kAborted: return "aborted";
    case Code::kInterrupted: return "interrupted";
    case Code::kInvalid: return "invalid";
    case Code::kSystem: return "system";
  }
  return "unknown";
}

std::string text_of(const ExitStatus& status, const std::string& before, const std::string& behind) {
  if (!status.known()) return "";
  if (status.how == ExitStatus::How::kReplaced) return before + "exec of another program" + behind;
  const bool killed = status.how == ExitStatus::How::kKilled;
  return before + (killed ? "signal " : "exit code ") + std::to_string(status.number) + behind;
}

std::string text_of(const Failure& failure) {
  std::string text = "nvx: " + failure.cause;
  if (!failure.before.empty()) text += "; before that, " + failure.before;
  if (!failure.context.empty()) text += "; " + failure.context;
  if (!failure.advice.empty()) text += ". Next: " + failure.advice;
  return text;
}

Failure with_context(Failure failure, const std::string& context) {
  failure.context += (failure.context.empty() ? "" : "; ") + context;
  return failure;
}

Failure reason_for(const std::string& what, Failure failure, const std::string& advice) {
  failure.cause = what + ": " + failure.cause;
  if (failure.advice.empty()) failure.advice = advice;
  return failure;
}

}  // namespace nvx
