#pragma once

#include <atomic>

#include "base/contain.h"

namespace nvx {

/// Runs code of the user's in a place where nobody could catch what it throws: a thread of nvx's, or one that has other
/// hooks to run. The first time at each place it is said; it goes no further.
template <class Call>
void run_hook(const char* whose, Call&& call) {
  static std::atomic<bool> said{false};  // one for each place: each has a Call of its own
  contain_and(call, [&](const std::exception* error) {
    if (said.exchange(true)) return;
    if (error) {
      log_line("%s threw, and nvx goes on without it: %s", whose, error->what());
    } else {
      log_line("%s threw something that is no std::exception, and nvx goes on without it", whose);
    }
  });
}

}  // namespace nvx
