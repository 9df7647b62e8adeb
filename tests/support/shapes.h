#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "schedule/catalog.h"

/// What a schedule may be asked for, on all ranks at once, and what it then has to leave behind.
namespace nvx::test {

/// How blocks lie in their memory, and how long they are.
enum class Blocks {
  kEqual,      ///< all as long, one behind the other
  kNearly,     ///< they differ by an element; some are empty where there are few elements
  kUneven,     ///< of any length, one behind the other
  kLoose,      ///< of any length, in any order, with gaps
  kEqualLoose  ///< all as long, in any order, with gaps
};
inline constexpr Blocks kAllBlocks[] = {Blocks::kEqual, Blocks::kNearly, Blocks::kUneven, Blocks::kLoose,
                                        Blocks::kEqualLoose};

/// A collective of `size` ranks.
struct Shape {
  schedule::Collective collective = schedule::Collective::kBarrier;
  int size = 1;
  int root = 0;
  size_t width = 1;
  size_t bytes = 0;
  std::vector<schedule::Block> blocks{};
  std::vector<std::vector<schedule::Block>> to{}, from{};  ///< by rank; or one, of all ranks

  schedule::Layout layout(int rank) const;
  size_t input_bytes(int rank) const;
  size_t output_bytes(int rank) const;
  std::string text() const;
};

struct Asked {
  schedule::Collective collective;
  int size;
  size_t elements;  ///< in the whole, or in all blocks together
  size_t width = 1;
  int root = 0;
  Blocks blocks = Blocks::kEqual;
  uint64_t seed = 0;
};
Shape shape_of(const Asked& asked);

bool has_root(schedule::Collective collective);
bool has_blocks(schedule::Collective collective);

/// Bytes of the output that a rank is due, and what belongs there.
struct Due {
  schedule::Block output;
  size_t input_offset = 0;
  int source = 0;  ///< the rank whose input it is; kEverybody: the sum of all
};
inline constexpr int kEverybody = -1;
std::vector<Due> contract(const Shape& shape, int rank);

/// Input and output as parts of one memory, where the collective has bytes that are in both.
struct Overlay {
  size_t input = 0, output = 0;  ///< where they begin
};
Overlay overlay(const Shape& shape, int rank);

/// A number that looks random, and is the same for the same arguments.
constexpr uint64_t mix(uint64_t a, uint64_t b) {
  uint64_t x = a * 0x9e3779b97f4a7c15 ^ (b + 0x632be59bd9b4e019) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

}  // namespace nvx::test
