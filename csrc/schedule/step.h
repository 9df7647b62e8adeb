#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>

/// A schedule states which rank sends which bytes to which rank and when, as data: two pure functions, steps() and
/// at(), give every rank its steps. net/executor runs them; tests prove and simulate them.
namespace nvx::schedule {

/// One of a rank's three buffers. Input and output may be the same memory; a schedule must be correct in both cases.
enum class Buffer : uint8_t { kInput, kOutput, kScratch };
using enum Buffer;

struct Range {
  Buffer buffer = Buffer::kOutput;
  size_t offset = 0;  ///< bytes
  size_t bytes = 0;
};

/// One step of one rank: at most one message out and one in, at the same time. The received message is stored in
/// `recv`; if `reduce` is set, it is combined with `with` (of the same size; may equal `recv`) and the result is stored
/// in `recv`. The outgoing message is read before the same step writes anything. A step whose peers are both the rank
/// itself copies or combines `send` within its own memory.
///
/// Steps begin in order. A step may begin while earlier ones are in flight if those write none of its ranges and read
/// none that it writes. So a step depends on another only through shared bytes; an empty range creates no dependency.
///
/// Any two ranges of one step are identical or disjoint, whether input and output are one memory or two. If `recv`
/// equals `send`, the step reduces, or copies a range onto itself, which does nothing.
///
/// The k-th message that a rank sends to a peer is the k-th that the peer receives from it, so there are no tags.
/// An empty message is sent and received too, so that a rank can name the peer it waits for.
struct Step {
  int send_to = -1;  ///< -1: nothing goes out
  Range send{};
  int recv_from = -1;  ///< -1: nothing comes in
  Range recv{};
  bool reduce = false;
  Range with{};
};

/// The maximum number of a rank's steps in flight.
inline constexpr int kMaxDepth = 16;

/// Whether a step may begin while an earlier one is in flight. `received`, `sent`: whether the message of the earlier
/// one has been. `overlap(a, b)`: whether two ranges share bytes.
template <class Overlap>
bool may_begin_beside(const Step& earlier, bool received, bool sent, const Step& step, const Overlap& overlap) {
  const Range reads = step.send_to >= 0 ? step.send : Range{}, writes = step.recv_from >= 0 ? step.recv : Range{};
  const Range with = step.recv_from >= 0 && step.reduce ? step.with : Range{};
  if (!received) {
    if (overlap(reads, earlier.recv) || overlap(writes, earlier.recv) || overlap(with, earlier.recv)) return false;
    if (earlier.reduce && overlap(writes, earlier.with)) return false;
  }
  return sent || !overlap(writes, earlier.send);
}

/// A rank's part of one buffer.
struct Block {
  size_t offset = 0;
  size_t bytes = 0;

  constexpr size_t end() const { return offset + bytes; }
  constexpr Range in(Buffer buffer) const { return {buffer, offset, bytes}; }
};

/// The sizes and places of a collective. The same on every rank, except where noted.
struct Layout {
  int size = 1;      ///< ranks that take part
  int root = 0;      ///< broadcast, reduce, gather, scatter
  size_t width = 1;  ///< bytes of an element; no boundary splits an element
  size_t bytes = 0;  ///< all_reduce, reduce, broadcast: the whole

  /// One block per rank. all_gather: in the output, by contributing rank. reduce_scatter: in the input, by receiving
  /// rank. gather: in the root's output. scatter: in the root's input. Blocks need not be contiguous or in order.
  std::span<const Block> blocks;

  /// all_to_all, different on every rank: in the input by destination, in the output by source.
  std::span<const Block> to;
  std::span<const Block> from;

  constexpr Block whole() const { return {0, bytes}; }
  /// A rank's block in a memory that holds nothing else.
  constexpr Block own(int rank) const { return {0, blocks[size_t(rank)].bytes}; }
  constexpr const Block& block(int rank) const { return blocks[size_t(rank)]; }

  /// The i-th of `size` nearly equal parts of the whole, split between elements.
  constexpr Block chunk(int i) const { return part(bytes, i, size); }
  /// The i-th of n nearly equal parts of `whole` bytes, split between elements. The first parts are the longer ones.
  constexpr Block part(size_t whole, int i, int n) const {
    const size_t elements = whole / width, each = elements / size_t(n), more = elements % size_t(n), k = size_t(i);
    return {(k * each + (k < more ? k : more)) * width, (each + (k < more ? 1 : 0)) * width};
  }
  /// Parts first .. last - 1 of n parts of the whole, which are contiguous.
  constexpr Block parts(int first, int last, int n) const {
    const size_t from = part(bytes, first, n).offset;
    return {from, part(bytes, last, n).offset - from};
  }
};

/// A local step of `rank`: copies `from` to `to`.
constexpr Step move(int rank, Range from, Range to) {
  return {.send_to = rank, .send = from, .recv_from = rank, .recv = to};
}

/// Whether the blocks are contiguous and in rank order.
constexpr bool contiguous(std::span<const Block> blocks) {
  for (size_t i = 1; i < blocks.size(); ++i) {
    if (blocks[i].offset != blocks[i - 1].end()) return false;
  }
  return true;
}

constexpr bool equally_long(std::span<const Block> blocks) {
  return std::ranges::all_of(blocks, [&](const Block& b) { return b.bytes == blocks[0].bytes; });
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

/// a modulo n, in 0 .. n - 1 whatever the sign of a.
constexpr int mod(int a, int n) {
  const int rest = a % n;
  return rest < 0 ? rest + n : rest;
}

/// The least k with 2^k >= n, and the greatest with 2^k <= n; n >= 1.
constexpr int log2_up(int n) { return std::bit_width(unsigned(n - 1)); }
constexpr int log2_down(int n) { return std::bit_width(unsigned(n)) - 1; }

}  // namespace nvx::schedule
