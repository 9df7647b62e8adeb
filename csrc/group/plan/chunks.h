#pragma once

#include <cstddef>
#include <vector>

#include "group/plan/operation.h"
#include "group/plan/plan.h"

/// Large operations on memory that ranks do not share, such as a device's, go in chunks: while the ranks are at one,
/// the next is brought to where they reach it, and the one before is taken back. A chunk is an operation of its own, on
/// the same slice of every piece, and gives the bits that the whole would.
namespace nvx {

/// Bytes of a chunk, of all ranks' pieces together: a chunk takes the bus tenths of a millisecond; its fixed cost, some
/// ten microseconds, is negligible.
inline constexpr size_t kChunk = 4 << 20;

/// Whether an operation of this many elements, as the fingerprint counts them, goes in chunks. Of what ranks compare,
/// and nothing else: they answer alike, or find in the first chunk that they call different things. Where a rank knows
/// its own pieces only, as in all-to-all, it cannot tell.
bool goes_in_chunks(kernel::Collective collective, DType dtype, size_t count);

/// How it is cut.
struct Cut {
  size_t slice = 0;   ///< bytes of each piece in a chunk
  size_t chunks = 0;  ///< that the longest piece has
  size_t bytes = 0;   ///< see Whole

  /// Chunk k of a piece; empty behind its end.
  kernel::Piece of(kernel::Piece piece, size_t k) const;
};

/// What is copied between a device and host memory.
struct CopyPair {
  kernel::Piece device, host;
};
/// A chunk in host memory: the operation there, and what is copied there before it and from there after it.
struct StagedChunk {
  Operation part;
  std::vector<CopyPair> down, up;
};
/// Chunk k of an operation on a device's memory, of any collective. Pure. room: of room_for() bytes.
StagedChunk land(const Operation& operation, const Cut& cut, size_t k, int rank, std::byte* room);
size_t room_for(const Operation& operation, const Cut& cut, int rank);

/// All of it as one chunk.
Cut uncut(const Operation& operation);
/// Pure, and the same on every rank. Between hosts a schedule may combine an element's terms in an order that goes by
/// its place: then chunks end where the schedule of the whole begins anew.
Cut cut(const Operation& operation, const PlanFacts& facts);

}  // namespace nvx
