#pragma once

#include <atomic>

namespace nvx {

/// Set by the language that hosts nvx: true when the user wants the main thread to stop what it does (Ctrl-C). Called
/// on the main thread only, at most about ten times a second, by waiters.
using InterruptCheck = bool (*)();
inline std::atomic<InterruptCheck> interrupt_check{nullptr};

}  // namespace nvx
