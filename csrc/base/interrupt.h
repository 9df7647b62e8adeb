#pragma once

#include <atomic>
#include <string>

namespace nvx {

/// Installed by the host language. True when the user has requested the main thread to stop, or when a signal handler
/// raised.
using InterruptCheck = bool (*)();
inline std::atomic<InterruptCheck> interrupt_check{nullptr};

/// Whether the user has requested this thread to stop. Checks on the main thread only, and at most ten times a second.
bool stop_requested();

/// For destructors, which cannot raise: while one exists, stop_requested() is false on this thread. The signal stays
/// pending, and the host language handles it afterwards.
class Uninterrupted {
 public:
  Uninterrupted() { ++depth; }
  ~Uninterrupted() { --depth; }
  Uninterrupted(const Uninterrupted&) = delete;

 private:
  friend bool stop_requested();
  inline static thread_local int depth = 0;
};

/// The cause of the interrupt for error texts: "interrupted by the user". Read and set it on the main thread only.
const std::string& interrupt_text();
void set_interrupt_text(std::string text);

}  // namespace nvx
