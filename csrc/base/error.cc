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

namespace {

/// What helps where the system refuses for this reason; empty where there is nothing to say in general.
std::string remedy(int error) {
  switch (error) {
    case EMFILE: return "raise the limit of files that a process may have open (ulimit -n)";
    case ENFILE: return "raise the machine's limit of open files (sysctl fs.file-max)";
    case EFBIG: return "raise the limit of a file's size (ulimit -f), which shared memory counts towards";
    case ENOMEM:
      return "raise the limit of address space (ulimit -v), or have none: 1 GiB of it is mapped for each process "
             "of the host, little of which is used. Where there is no limit, the memory is used up";
    case EAGAIN: return "raise the limit of threads: the user's (ulimit -u) or the container's (pids.max)";
    case EPERM:
    case EACCES:
    case ENOSYS: return "does a sandbox, or a container's seccomp profile, forbid this system call?";
    default: return "";
  }
}

}  // namespace

Error system_error(const std::string& what) {
  const int error = errno;
  const std::string advice = remedy(error);
  return Error(Code::kSystem,
               "nvx: " + what + ": " + std::strerror(error) + (advice.empty() ? "" : ". Next: " + advice));
}

}  // namespace nvx
