#pragma once

#include <functional>
#include <vector>

#include "support/stores.h"

/// One body, run by several ranks: as threads, so that ThreadSanitizer sees every access, or as forked processes, where
/// mappings, descriptors and death are real.
namespace nvx::test {

using Body = std::function<void(int rank)>;

/// ScheduleRuns body(0) .. body(n - 1) at once and returns when all have. What one throws fails the test.
void as_threads(int ranks, const Body& body);

/// Why forked ranks cannot be tried here; nullptr where they can.
const char* why_no_processes();

/// By ThreadSanitizer or AddressSanitizer.
bool is_sanitized();

/// How much of something a test takes: less where a sanitizer or an emulator would take minutes for all of it.
inline size_t as_fast(size_t all, size_t few) { return why_no_processes() ? few : all; }

/// How a process ended.
struct Ending {
  int exit_code = 0;
  int signal = 0;
  bool well() const { return exit_code == 0 && signal == 0; }
};

/// The same in forked processes. A rank whose expectations failed ends badly, and has printed which.
std::vector<Ending> as_processes(int ranks, const Body& body);

/// As processes, of which each must end well.
void all_end_well(int ranks, const Body& body);

}  // namespace nvx::test
