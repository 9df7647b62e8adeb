#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "schedule/catalog.h"

/// The requests to a schedule, on all ranks at once, and the expected results.
namespace nvx::test {

/// The order and lengths of blocks in their memory.
enum class Blocks {
  kEqual,      ///< equal lengths, contiguous
  kNearly,     ///< lengths differ by one element; some are empty if there are few elements
  kUneven,     ///< any lengths, contiguous
  kLoose,      ///< any lengths, in any order, with gaps
  kEqualLoose  ///< equal lengths, in any order, with gaps
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
  std::vector<std::vector<schedule::Block>> to{}, from{};  ///< by rank; or one for all ranks

  schedule::Layout layout(int rank) const;
  size_t input_bytes(int rank) const;
  size_t output_bytes(int rank) const;
  std::string text() const;
};

struct ShapeRequest {
  schedule::Collective collective;
  int size;
  size_t elements;  ///< in the whole, or in all blocks together
  size_t width = 1;
  int root = 0;
  Blocks blocks = Blocks::kEqual;
  uint64_t seed = 0;
};
Shape shape_of(const ShapeRequest& request);

bool has_root(schedule::Collective collective);
bool has_blocks(schedule::Collective collective);

/// The bytes of the output that a rank receives, and their expected content.
struct Due {
  schedule::Block output;
  size_t input_offset = 0;
  int source = 0;  ///< the rank whose input it is; kEverybody: the sum of all
};
inline constexpr int kEverybody = -1;
std::vector<Due> contract(const Shape& shape, int rank);

/// Input and output as parts of one memory, for a collective whose input and output can share bytes.
struct Overlay {
  size_t input = 0, output = 0;  ///< their offsets
};
Overlay overlay(const Shape& shape, int rank);

/// A pseudo-random number that depends only on the arguments.
constexpr uint64_t mix(uint64_t a, uint64_t b) {
  uint64_t x = a * 0x9e3779b97f4a7c15 ^ (b + 0x632be59bd9b4e019) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

}  // namespace nvx::test
