#pragma once

#include <atomic>

namespace nvx {

/// Set by the language that hosts nvx: true when the user wants the main thread to stop what it does (Ctrl-C).
using InterruptCheck = bool (*)();
inline std::atomic<InterruptCheck> interrupt_check{nullptr};

/// Whether the user wants this thread to stop. Asks on the main thread only, and there at most ten times a second,
/// however often it is called; in between, and elsewhere: false.
bool stop_wanted();

}  // namespace nvx
