#pragma once

#include <cxxabi.h>

#include <exception>

#include "base/log.h"

namespace nvx {

/// Runs somebody else's code, whose exceptions nobody here could handle. What it throws goes no further: say() is given
/// the std::exception, or null where it is none.
template <class Act, class Say>
void contain_and(Act&& act, Say&& say) {
  try {
    act();
  } catch (const std::exception& error) {
    say(&error);
  } catch (abi::__forced_unwind&) {
    throw;  // the end of a thread is no exception, and must not be stopped
  } catch (...) {
    say(static_cast<const std::exception*>(nullptr));
  }
}

/// The same, where what was thrown is logged.
template <class Act>
void contain(const char* what, Act&& act) {
  contain_and(act, [&](const std::exception* error) {
    if (error) {
      NVX_LOG(kWarn, "%s threw an exception, which goes no further: %s", what, error->what());
    } else {
      NVX_LOG(kWarn, "%s threw something that is no std::exception, which goes no further", what);
    }
  });
}

}  // namespace nvx
