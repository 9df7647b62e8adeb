#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>

#include "base/failure_note.h"
#include "group/setup/store.h"

namespace nvx {

/// Ranks that give up a set-up leave notes in the store, under the prefix of that set-up. The first note is the cause
/// for all ranks.
void leave_note(Store& store, const std::string& prefix, const Failure& why);

/// The first note, in a group of this many ranks; empty if there is none. A rank whose C++ module does not load writes
/// a text that begins with "rank " (python/nvx/__init__.py).
std::optional<Failure> read_note(Store& store, const std::string& prefix, int ranks);

/// For a rank that cannot join the others because of its world size: 1, or not above the rank. Best effort.
void publish_world_size(Store& store, int rank, int size, const std::string& host = {});

struct OtherWorld {
  int rank;
  std::string text;  ///< "rank 0 (pid 4711, host a01) was started with a world size of 1"
};
/// The last rank that has published its world size. It may have joined a world of the right size since.
std::optional<OtherWorld> published_world_size(Store& store);

/// Waits until this many ranks have left a note, since every rank that reads the first one leaves one. The rank that
/// serves the store must not end before.
void await_notes(Store& store, const std::string& prefix, int64_t ranks, std::chrono::milliseconds most);

}  // namespace nvx
