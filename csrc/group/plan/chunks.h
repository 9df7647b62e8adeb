#pragma once

#include <cstddef>
#include <vector>

#include "group/plan/operation.h"
#include "group/plan/plan.h"

/// Large operations on memory that ranks do not share, such as a device's, go in chunks: the ranks exchange one chunk
/// while the next is copied to shared memory and the one before is copied back. A chunk is an operation of its own on
/// the same slice of every piece. Its result has the same bits as that part of the whole operation.
namespace nvx {

/// Bytes of a chunk, over all ranks' pieces: so many that its fixed cost of about ten microseconds is negligible.
inline constexpr size_t kChunk = 4 << 20;

/// Whether an operation of this many elements, as the fingerprint counts them, goes in chunks. Depends only on fields
/// that ranks compare: all ranks get the same answer, or the first chunk finds that their calls differ. False for
/// collectives such as all-to-all, where a rank has only its own pieces.
bool goes_in_chunks(kernel::Collective collective, DType dtype, size_t count);

/// The division of an operation into chunks.
struct Cut {
  size_t slice = 0;   ///< bytes of each piece in a chunk
  size_t chunks = 0;  ///< of the longest piece
  size_t bytes = 0;   ///< see `Whole`

  /// Chunk k of a piece; empty past its end.
  kernel::Piece of(kernel::Piece piece, size_t k) const;
};

/// A copy between a device and host memory.
struct CopyPair {
  kernel::Piece device, host;
};
/// A chunk in host memory: the operation there, and the copies before (`d2h`) and after it (`h2d`).
struct StagedChunk {
  Operation part;
  std::vector<CopyPair> d2h, h2d;
  size_t bytes = 0;  ///< of host memory
};
/// Chunk k of any collective on a device's memory. Pure. `buffer`: `buffer_bytes()` bytes.
StagedChunk stage_chunk(const Operation& operation, const Cut& cut, size_t k, int rank, std::byte* buffer);
size_t buffer_bytes(const Operation& operation, const Cut& cut, int rank);

Cut unsplit(const Operation& operation);
/// Pure, and the same on every rank. A schedule between hosts may combine an element's terms in an order that depends
/// on the element's position. Then chunks end where the schedule of the whole repeats, so the bits stay the same.
Cut cut(const Operation& operation, const PlanFacts& facts);

}  // namespace nvx
