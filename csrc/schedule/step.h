#pragma once

#include <cstddef>
#include <cstdint>
#include <span>

/// Who sends what when, as data. A schedule is a pair of pure functions, steps() and at(), that give every rank its
/// steps one by one; nothing is stored, nothing is sent here. net/executor runs them, tests prove and simulate them.
namespace nvx::schedule {

/// Which of a rank's three memories. Input and output may be the same memory; a schedule must be right in both cases.
enum class Place : uint8_t { kInput, kOutput, kScratch };

struct Range {
  Place place = Place::kOutput;
  size_t offset = 0;  ///< bytes
  size_t bytes = 0;
};

/// One step of one rank: at most one message out and one in, at the same time. What comes in is stored in `recv`, or
/// where `reduce`, combined with what is in `with` (of the same size; may be `recv` itself) and the result stored there.
/// The message out is read before anything of the same step is written. A step whose peers are both the rank itself
/// moves, or combines, inside its own memory.
///
/// The k-th message that a rank sends to a peer is the k-th that the peer receives from it; so there are no tags.
/// A message of no bytes is sent and received all the same: it carries order.
struct Step {
  int send_to = -1;  ///< -1: nothing goes out
  Range send;
  int recv_from = -1;  ///< -1: nothing comes in
  Range recv;
  bool reduce = false;
  Range with;
};

/// A rank's part of a memory.
struct Block {
  size_t offset = 0;
  size_t bytes = 0;
};

/// What a collective is about. The same on every rank, except where it says otherwise.
struct Layout {
  int size = 1;      ///< ranks that take part
  int root = 0;      ///< broadcast, reduce, gather, scatter
  size_t width = 1;  ///< bytes of an element, which no boundary splits
  size_t bytes = 0;  ///< all_reduce, reduce, broadcast: the whole

  /// A block for each rank. all_gather: in the output, by who contributes it. reduce_scatter: in the input, by whose it
  /// becomes. gather: in the root's output; scatter: in the root's input. Blocks need not touch or be in order.
  std::span<const Block> blocks;

  /// all_to_all, different on every rank: in the input by destination, and in the output by source.
  std::span<const Block> to;
  std::span<const Block> from;

  /// The i-th of `size` nearly equal parts of the whole, cut between elements.
  constexpr Block chunk(int i) const { return part(bytes, i, size); }
  /// The i-th of n nearly equal parts of so many bytes from 0, cut between elements; the first ones are longer.
  constexpr Block part(size_t whole, int i, int n) const {
    const size_t elements = whole / width, each = elements / size_t(n), more = elements % size_t(n), k = size_t(i);
    return {(k * each + (k < more ? k : more)) * width, (each + (k < more ? 1 : 0)) * width};
  }
};

constexpr int mod(int a, int n) { return ((a % n) + n) % n; }

}  // namespace nvx::schedule
