#pragma once

#include "support/shapes.h"

/// Plays a schedule for all ranks at once as the executor would, on symbols instead of bytes. Each element of an input
/// is a random number of 64 bits, and combining adds them: a term that is missing, twice there or from the wrong place
/// gives another sum. Beside the sum an element carries how it came about, so that the order of combining can be
/// compared.
namespace nvx::test {

/// The steps of all ranks, to be played, or spoiled first.
struct Script {
  Shape shape;
  std::vector<std::vector<schedule::Step>> steps;  ///< by rank
  std::vector<size_t> scratch;
};
/// On every rank, which all_to_all may see differently.
bool legal(const schedule::Row& row, const Shape& shape);
Script write_out(const schedule::Row& row, const Shape& shape);

enum class Memory { kApart, kShared };              ///< input and output
enum class Timing { kAny, kPostFirst, kPostLast };  ///< steps begin at random moments, as early as can be, as late
enum class Hazards { kMinded, kIgnored };           ///< whether a step waits for the bytes that it shares with others

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
  std::string error;    ///< empty: every rank has ended with what it is due, and nothing else is changed
  uint64_t trees = 0;   ///< stands for what was combined with what, in all results
  bool uniform = true;  ///< in the same order for all elements
  bool by_rank = true;  ///< in the order of the ranks
  uint64_t depth = 0;   ///< the longest chain of messages of which each carries something of the one before
  std::vector<uint64_t> sent, messages_out, messages_in;  ///< by rank, to and from others
};
Outcome play(const Script& script, const Conditions& conditions);

/// What the outcome has that the row's guarantee rules out; empty: nothing.
std::string breach(const schedule::Row& row, const Shape& shape, const Outcome& outcome);

}  // namespace nvx::test
