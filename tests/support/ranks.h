#pragma once

#include <functional>
#include <vector>

#include "support/stores.h"

/// One body run by several ranks: as threads, so that ThreadSanitizer sees every access, or as forked processes, with
/// real mappings, descriptors and deaths.
namespace nvx::test {

using Body = std::function<void(int rank)>;

/// Runs body(0) .. body(n - 1) at once and returns when all have returned. An exception fails the test.
void as_threads(int ranks, const Body& body);

/// Why forked ranks cannot be used here, or nullptr.
const char* why_no_processes();

/// Whether ThreadSanitizer or AddressSanitizer is active.
bool is_sanitized();

/// Scales the amount of work of a test, which would take minutes under a sanitizer or an emulator.
inline size_t as_fast(size_t all, size_t few) { return is_sanitized() || why_no_processes() ? few : all; }

/// How a process ended.
struct Ending {
  int exit_code = 0;
  int signal = 0;
  bool well() const { return exit_code == 0 && signal == 0; }
};

/// The same in forked processes. A rank whose expectations fail prints them and exits with an error.
std::vector<Ending> as_processes(int ranks, const Body& body);

/// As processes, each of which must succeed.
void all_end_well(int ranks, const Body& body);

}  // namespace nvx::test
