#include "base/error.h"

#include <cerrno>
#include <cstring>

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

Error system_error(const std::string& what) {
  return Error(Code::kSystem, "nvx: " + what + ": " + std::strerror(errno));
}

}  // namespace nvx
