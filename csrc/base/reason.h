#pragma once

#include <exception>
#include <string>

#include "base/failure.h"

namespace nvx {

/// The failure as the cause of something else: "<what>: <its cause>". All other facts stay. `advice` is used only if
/// the failure has none, because the failure's own is more specific.
Failure reason_for(const std::string& what, Failure failure, const std::string& advice = "");

/// An exception on this rank as the cause of `what`. The code is always `kSystem`, whatever the exception carried.
Failure system_failure(const std::string& what, const std::exception& thrown);

}  // namespace nvx
