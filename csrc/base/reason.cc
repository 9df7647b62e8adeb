#include "base/reason.h"

#include "base/error.h"

namespace nvx {

Failure reason_for(const std::string& what, Failure failure, const std::string& advice) {
  failure.cause = what + ": " + failure.cause;
  if (failure.advice.empty()) failure.advice = advice;
  return failure;
}

Failure system_failure(const std::string& what, const std::exception& thrown) {
  Failure failure = reason_for(what, failure_of(thrown));
  failure.code = Code::kSystem;
  failure.reported = false;
  return failure;
}

}  // namespace nvx
