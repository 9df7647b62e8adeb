#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>

/// Who sends what when, as data. A schedule is a pair of pure functions, steps() and at(), that give every rank its
/// steps one by one; nothing is stored, nothing is sent here. net/executor runs them, tests prove and simulate them.
namespace nvx::schedule {

/// Which of a rank's three memories. Input and output may be the same memory; a schedule must be right in both cases.
enum class Place : uint8_t { kInput, kOutput, kScratch };
using enum Place;

struct Range {
  Place place = Place::kOutput;
  size_t offset = 0;  ///< bytes
  size_t bytes = 0;
};

/// One step of one rank: at most one message out and one in, at the same time. What comes in is stored in `recv`, or
/// where `reduce`, combined with what is in `with` (of the same size; may be `recv` itself) and the result stored
/// there. The message out is read before anything of the same step is written. A step whose peers are both the rank
/// itself moves what is in `send`, or combines it, inside its own memory.
///
/// Steps are taken in order; one begins while others are still under way if none of its ranges is written by them, and
/// what it writes is not read by them either. So a step waits for another only by the bytes that they share, and a
/// range of no bytes makes nothing wait.
///
/// Any two ranges of one step are the same bytes or have none in common, input and output being one memory or two.
/// Where `recv` is the same as `send`, the step reduces, or moves a range onto itself, which is to do nothing.
///
/// The k-th message that a rank sends to a peer is the k-th that the peer receives from it; so there are no tags.
/// A message of no bytes is sent and received all the same, so that a rank can name what it waits for.
struct Step {
  int send_to = -1;  ///< -1: nothing goes out
  Range send{};
  int recv_from = -1;  ///< -1: nothing comes in
  Range recv{};
  bool reduce = false;
  Range with{};
};

/// A rank's part of a memory.
struct Block {
  size_t offset = 0;
  size_t bytes = 0;

  constexpr size_t end() const { return offset + bytes; }
  constexpr Range in(Place place) const { return {place, offset, bytes}; }
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

  constexpr Block whole() const { return {0, bytes}; }
  /// A rank's block in the memory that holds nothing else.
  constexpr Block own(int rank) const { return {0, blocks[size_t(rank)].bytes}; }
  constexpr const Block& block(int rank) const { return blocks[size_t(rank)]; }

  /// The i-th of `size` nearly equal parts of the whole, cut between elements.
  constexpr Block chunk(int i) const { return part(bytes, i, size); }
  /// The i-th of n nearly equal parts of so many bytes from 0, cut between elements; the first ones are longer.
  constexpr Block part(size_t whole, int i, int n) const {
    const size_t elements = whole / width, each = elements / size_t(n), more = elements % size_t(n), k = size_t(i);
    return {(k * each + (k < more ? k : more)) * width, (each + (k < more ? 1 : 0)) * width};
  }
  /// Of n parts of the whole, the ones from first to last - 1: they touch.
  constexpr Block parts(int first, int last, int n) const {
    const size_t from = part(bytes, first, n).offset;
    return {from, part(bytes, last, n).offset - from};
  }
};

/// A step of `rank` alone: `from` goes to `to`.
constexpr Step move(int rank, Range from, Range to) {
  return {.send_to = rank, .send = from, .recv_from = rank, .recv = to};
}

/// A step of `rank` alone: what is in `from`, combined with what is in `with`, goes to `to`.
constexpr Step combine(int rank, Range from, Range with, Range to) {
  return {.send_to = rank, .send = from, .recv_from = rank, .recv = to, .reduce = true, .with = with};
}

/// Blocks in the order of their ranks with nothing between them.
constexpr bool touch(std::span<const Block> blocks) {
  for (size_t i = 1; i < blocks.size(); ++i) {
    if (blocks[i].offset != blocks[i - 1].end()) return false;
  }
  return true;
}

constexpr bool equally_long(std::span<const Block> blocks) {
  for (const Block& b : blocks) {
    if (b.bytes != blocks[0].bytes) return false;
  }
  return true;
}

constexpr size_t longest(std::span<const Block> blocks) {
  size_t most = 0;
  for (const Block& b : blocks) most = b.bytes > most ? b.bytes : most;
  return most;
}

constexpr size_t total(std::span<const Block> blocks) {
  size_t sum = 0;
  for (const Block& b : blocks) sum += b.bytes;
  return sum;
}

/// What all blocks but one have together, at most.
constexpr size_t all_but_one(std::span<const Block> blocks) {
  size_t least = blocks[0].bytes;
  for (const Block& b : blocks) least = b.bytes < least ? b.bytes : least;
  return total(blocks) - least;
}

/// a modulo n, from 0 to n - 1 whatever the sign of a.
constexpr int mod(int a, int n) {
  const int rest = a % n;
  return rest < 0 ? rest + n : rest;
}

/// The least k with 2^k >= n, and the greatest with 2^k <= n; n >= 1.
constexpr int log2_up(int n) { return std::bit_width(unsigned(n - 1)); }
constexpr int log2_down(int n) { return std::bit_width(unsigned(n)) - 1; }

}  // namespace nvx::schedule
