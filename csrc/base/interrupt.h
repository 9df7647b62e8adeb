#pragma once

#include <atomic>
#include <string>

namespace nvx {

/// Installed by the host language. Returns true when the user wants the main thread to stop (Ctrl-C), or when a signal
/// handler of the user raised an exception.
using InterruptCheck = bool (*)();
inline std::atomic<InterruptCheck> interrupt_check{nullptr};

/// Whether the user wants this thread to stop. Calls the check on the main thread only and at most ten times a second;
/// returns false otherwise.
bool stop_wanted();

/// The cause of the interrupt for error texts: "interrupted by the user". Read and set it on the main thread only.
const std::string& stop_words();
void set_stop_words(std::string words);

}  // namespace nvx
