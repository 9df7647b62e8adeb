#pragma once

#include <atomic>
#include <string>

namespace nvx {

/// Set by the language that hosts nvx: true when the user wants the main thread to stop what it does (Ctrl-C), or a
/// handler of his for another signal does.
using InterruptCheck = bool (*)();
inline std::atomic<InterruptCheck> interrupt_check{nullptr};

/// Whether the user wants this thread to stop. Asks on the main thread only, and there at most ten times a second,
/// however often it is called; in between, and elsewhere: false.
bool stop_wanted();

/// What asked the thread to stop, in words for errors: "interrupted by the user". To be read and set on the main thread
/// only.
const std::string& stop_words();
void set_stop_words(std::string words);

}  // namespace nvx
