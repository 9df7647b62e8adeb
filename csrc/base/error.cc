#include "base/error.h"

#include <algorithm>
#include <cerrno>
#include <cstring>

namespace nvx {

namespace {

/// The advice for this errno, or an empty text if there is none in general.
std::string advice_for(int error) {
  switch (error) {
    case EMFILE: return "raise the limit of open files per process (ulimit -n)";
    case ENFILE: return "raise the limit of open files of the machine (sysctl fs.file-max)";
    case EFBIG: return "raise the file size limit (ulimit -f); it also applies to shared memory";
    case ENOSPC:
      return "free memory on this host, or raise the limit of its container; for epoll, fs.epoll.max_user_watches";
    case ENOMEM:
      return "raise or remove the limit of address space (ulimit -v): nvx maps 1 GiB of it for each process of the "
             "host and uses little of that. Without such a limit, the host is out of memory";
    case EAGAIN: return "raise the limit of threads, of the user (ulimit -u) or of the container (pids.max)";
    case EPERM:
    case EACCES:
    case ENOSYS: return "check whether a sandbox or the container's seccomp profile forbids this system call";
    default: return "";
  }
}

}  // namespace

Status::Status(Code code, const std::string& what, const std::string& advice) {
  const auto state = std::make_shared<State>();
  state->failure.code = code;
  state->failure.cause = without_name(what);
  state->failure.advice = advice;
  state->text = what + (advice.empty() ? "" : ". Next: " + advice);
  state_ = state;
}

Status::Status(const Failure& failure) : state_(std::make_shared<const State>(State{failure, text_of(failure)})) {}

Failure failure_of(const std::exception& thrown) {
  if (const auto* error = dynamic_cast<const Error*>(&thrown)) return error->failure();
  std::string cause = without_name(thrown.what());
  cause.resize(std::min(cause.size(), cause.find('\n')));  // a stack may follow, of Python or of torch
  return {.code = Code::kSystem, .cause = cause};
}

Failure system_failure(const std::string& what, const std::exception& thrown) {
  Failure failure = reason_for(what, failure_of(thrown));
  failure.code = Code::kSystem;
  failure.reported = false;
  return failure;
}

Error system_error(const std::string& what, int error) {
  return Error(Code::kSystem, "nvx: " + what + ": " + std::strerror(error), advice_for(error));
}

}  // namespace nvx
