#pragma once

#include <exception>
#include <string>

#include "base/failure.h"

namespace nvx {

/// A failure, as the reason for something else that this rank says: "<what>: <its cause>". The other facts stay, and so
/// does its advice, which knows more; where it has none, this one is given.
Failure reason_for(const std::string& what, Failure failure, const std::string& advice = "");

/// What was thrown here, as the reason for this: a failure of this rank's own system, whatever it comes of.
Failure system_failure(const std::string& what, const std::exception& thrown);

}  // namespace nvx
