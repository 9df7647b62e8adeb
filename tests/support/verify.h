#pragma once

#include "support/shapes.h"

/// Runs a schedule for all ranks at once like the executor, on symbols instead of bytes. Each element of an input is a
/// random 64-bit number, and combining adds them: a term that is missing, duplicated or from the wrong place changes
/// the sum. An element also records how it was combined, so that orders can be compared.
namespace nvx::test {

/// The steps of all ranks, to be run, or spoiled first.
struct Script {
  Shape shape;
  std::vector<std::vector<schedule::Step>> steps;  ///< by rank
  std::vector<size_t> scratch;
};
/// The layout on every rank, which may differ for all_to_all.
bool legal(const schedule::Row& row, const Shape& shape);
Script write_out(const schedule::Row& row, const Shape& shape);

enum class Memory { kApart, kShared };  ///< input and output
enum class Timing {
  kAny,
  kPostFirst,
  kPostLast
};  ///< steps begin at random moments, as early as possible, or as late as possible
enum class Hazards { kMinded, kIgnored };  ///< whether a step waits for the bytes that it shares with others

struct Conditions {
  int depth = 1;  ///< steps in flight
  Memory memory = Memory::kApart;
  Timing timing = Timing::kAny;
  int late = -1;  ///< a rank that does nothing as long as others can
  uint64_t seed = 0;
  Hazards hazards = Hazards::kMinded;

  std::string text() const;
};

struct Outcome {
  std::string error;    ///< empty: every rank has its expected result, and nothing else has changed
  uint64_t trees = 0;   ///< identifies the combinations in all results
  bool uniform = true;  ///< the same order for all elements
  bool by_rank = true;  ///< in the order of the ranks
  uint64_t depth = 0;   ///< the longest chain of messages that each depend on the one before
  std::vector<uint64_t> sent, messages_out, messages_in;  ///< by rank, to and from others
};
Outcome run_script(const Script& script, const Conditions& conditions);

/// A property of the outcome that the row's guarantee excludes; empty if there is none.
std::string breach(const schedule::Row& row, const Shape& shape, const Outcome& outcome);

}  // namespace nvx::test
