#pragma once

#include <cxxabi.h>

#include <exception>

#include "base/log.h"

namespace nvx {

/// Runs foreign code whose exceptions no caller could handle. An exception stops here: `report` receives the
/// std::exception, or null if the exception is of another type.
template <class Act, class Report>
void contain_and(Act&& act, Report&& report) {
  try {
    act();
  } catch (const std::exception& error) {
    report(&error);
  } catch (abi::__forced_unwind&) {
    throw;  // pthread_exit() and cancellation unwind this way and must not be stopped
  } catch (...) {
    report(static_cast<const std::exception*>(nullptr));
  }
}

/// Like contain_and(), and logs the exception.
template <class Act>
void contain(const char* what, Act&& act) {
  contain_and(act, [&](const std::exception* error) {
    if (error) {
      NVX_LOG(kWarn, "%s threw an exception, which nvx does not pass on: %s", what, error->what());
    } else {
      NVX_LOG(kWarn, "%s threw an exception of an unknown type, which nvx does not pass on", what);
    }
  });
}

}  // namespace nvx
