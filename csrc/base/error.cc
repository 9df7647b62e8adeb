#include "base/error.h"

#include <cerrno>
#include <cstring>

namespace nvx {

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

Status::Status(Code code, const std::string& what, const std::string& advice) {
  const auto met = std::make_shared<Met>();
  met->failure.code = code;
  met->failure.cause = without_name(what);
  met->failure.advice = advice;
  met->words = what + (advice.empty() ? "" : ". Next: " + advice);
  met_ = met;
}

Status::Status(const Failure& failure) : met_(std::make_shared<const Met>(Met{failure, words_of(failure)})) {}

Failure failure_of(const std::exception& thrown) {
  if (const auto* error = dynamic_cast<const Error*>(&thrown)) return error->failure();
  return {.code = Code::kSystem, .cause = without_name(thrown.what())};
}

Error system_error(const std::string& what) {
  const int error = errno;
  return Error(Code::kSystem, "nvx: " + what + ": " + std::strerror(error), remedy(error));
}

}  // namespace nvx
