#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>

#include "base/failure_note.h"
#include "group/meet/store.h"

namespace nvx {

/// What ranks that give a set-up up leave for the others in the store, below that set-up's own prefix. The first one's
/// note is the reason for all.
void leave_note(Store& store, const std::string& prefix, const Failure& why);

/// What one of so many ranks has left; nothing where all are well.
std::optional<Failure> read_note(Store& store, const std::string& prefix, int ranks);

/// Waits until so many ranks have left a note, as all do that know of the first one's: who serves the store must not
/// end before them.
void await_notes(Store& store, const std::string& prefix, int64_t ranks, std::chrono::milliseconds most);

}  // namespace nvx
