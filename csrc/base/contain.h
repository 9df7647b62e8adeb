#pragma once

#include <cxxabi.h>

#include <exception>

#include "base/log.h"

namespace nvx {

/// Runs what somebody else has written, for whom nobody here could catch: what it throws is said, and goes no further.
template <class Act>
void contain(const char* what, Act&& act) {
  try {
    act();
  } catch (const std::exception& error) {
    NVX_LOG(kWarn, "%s threw an exception, which goes no further: %s", what, error.what());
  } catch (abi::__forced_unwind&) {
    throw;  // the end of a thread is no exception, and must not be stopped
  } catch (...) {
    NVX_LOG(kWarn, "%s threw something that is no std::exception, which goes no further", what);
  }
}

}  // namespace nvx
