#pragma once

#include <cstdint>
#include <functional>
#include <span>

#include "kernel/cpu/run_on_cpu.h"
#include "kernel/gpu/device_pad.h"
#include "kernel/piece.h"

namespace nvx::kernel {

/// The algorithms that push into their peers' memory: kernel/gpu/device_collectives.h.
enum class DeviceAlgorithm : uint8_t {
  kReducePackets,         ///< all to all readers: all_reduce and reduce in one step; reduce_scatter
  kReducePacketsTwoShot,  ///< all_reduce in two steps, for more than a few KiB
  kReduceChunks,          ///< the same in chunks, for any length: all_reduce, reduce, reduce_scatter
  kExchangePackets,       ///< all_gather, broadcast, all_to_all, gather, scatter, barrier
  kExchangeChunks,        ///< the same in chunks
  kExchangePieces,        ///< the same, pair by pair: packets if the piece fits, otherwise chunks
  kMoveOwn,               ///< copies between pieces of this rank alone; no peer takes part
  kReduceMulticast,       ///< all_reduce of sums, which the switch adds: kernel/gpu/multicast.h, in a launch of its own
};
inline constexpr size_t kDeviceAlgorithmCount = 8;

const char* name(DeviceAlgorithm algorithm);

/// Whether the algorithm can move data in chunks. Ranks that have mapped each other's memory may then bypass staging.
NVX_HD constexpr bool has_chunks(DeviceAlgorithm algorithm) {
  return algorithm == DeviceAlgorithm::kReduceChunks || algorithm == DeviceAlgorithm::kExchangeChunks ||
         algorithm == DeviceAlgorithm::kExchangePieces;
}

/// Whether the algorithm reduces, by the rules that all but kReduceMulticast follow; otherwise it only moves data.
NVX_HD constexpr bool reduces(DeviceAlgorithm algorithm) { return algorithm <= DeviceAlgorithm::kReduceChunks; }

/// The most packs of a block's share of a piece that a packet algorithm holds; chunks have no limit.
constexpr size_t most_packs(DeviceAlgorithm algorithm, const DeviceShape& shape) {
  switch (algorithm) {
    case DeviceAlgorithm::kReducePackets:
    case DeviceAlgorithm::kExchangePackets: return shape.packs();
    case DeviceAlgorithm::kReducePacketsTwoShot: return shape.packs() / 2;  // half of the packets per step
    default: return SIZE_MAX;
  }
}

/// The pieces of all ranks, given by a rule if there is one, otherwise by a table.
struct Pieces {
  enum class Kind : uint32_t {
    kNone,   ///< no rank has a piece
    kSame,   ///< the same piece for all ranks
    kOnly,   ///< one piece, of rank `index`
    kEven,   ///< pieces of `bytes` each, contiguous
    kSplit,  ///< `bytes` in total, split between packs
    kTable,  ///< in the table, from `index` on
    kOwn,    ///< of this rank alone: `bytes` is their number, in the table from `index` on
  };
  Kind kind = Kind::kNone;
  uint32_t index = 0;
  std::byte* base = nullptr;  ///< no piece has a byte before it
  uint64_t bytes = 0;

  NVX_HD Piece of(uint32_t rank, const Divisor& ranks, const Piece* table) const {
    switch (kind) {
      case Kind::kNone:
      case Kind::kOwn: break;
      case Kind::kSame: return {base, bytes};
      case Kind::kOnly: return rank == index ? Piece{base, bytes} : Piece{};
      case Kind::kEven: return {base + rank * bytes, bytes};
      case Kind::kSplit: return slice({base, bytes}, rank, ranks);
      case Kind::kTable: return table[index + rank];
    }
    return {};
  }

  /// The number of kOwn pieces.
  NVX_HD uint32_t owns() const { return kind == Kind::kOwn ? uint32_t(bytes) : 0; }

  /// All pieces, per rank or kOwn: their maximum number, and the i-th.
  uint32_t count(uint32_t ranks) const { return kind == Kind::kOwn ? owns() : ranks; }
  Piece at(uint32_t i, uint32_t ranks, const Piece* table) const {
    return kind == Kind::kOwn ? table[index + i] : of(i, ranks, table);
  }

  /// The bytes of the largest block's share of a piece.
  NVX_HD static size_t fullest(const Piece& piece, uint32_t blocks) { return slice(piece, 0, blocks).bytes; }

  /// The i-th of n slices of a piece. They begin between packs, so that no element straddles two slices.
  NVX_HD static Piece slice(const Piece& piece, uint32_t i, const Divisor& n) {
    const size_t packs = ceil_div(piece.bytes, sizeof(Pack));
    const size_t share = n.quotient(packs), more = packs - share * n.n();
    const size_t first = (share * i + (i < more ? i : more)) * sizeof(Pack);
    const size_t last = first + (share + (i < more ? 1 : 0)) * sizeof(Pack);
    if (first >= piece.bytes) return {piece.data, 0};
    return {piece.data + first, (last < piece.bytes ? last : piece.bytes) - first};
  }
};

/// One operation of one rank.
struct Job {
  Fingerprint fingerprint;  ///< the channel fills in `history`
  double factor = 1;
  int32_t root = -1;
  DeviceAlgorithm algorithm = DeviceAlgorithm::kExchangePackets;
  uint32_t call = 0;        ///< the host's number of the operation; verdicts name it
  Pieces send;              ///< the piece for each rank, this rank included
  Pieces recv;              ///< the destination of each rank's part of the result
  uint64_t timeout_ns = 0;  ///< from the start of the operation until a wait gives up; 0: no limit
  // 1 + the offset of these pieces' first byte in this rank's pool, or 0 if not all of them lie in it. Peers that have
  // the pool mapped then access them in place.
  uint64_t send_place = 0;
  uint64_t recv_place = 0;
  // For kMoveOwn: the counter to wait for, in pinned host memory. The host raises it.
  const Stamp* awaited = nullptr;  ///< null: none
  Stamp awaits = 0;
};

/// The pieces that the jobs of a launch list.
using PieceTable = const Piece*;

/// The job for `args`, with elements of `width` bytes. Lists of pieces are written to `table`, which has space for 2 *
/// ranks, and are referred to as if it began at `index`.
Job job_of(DeviceAlgorithm algorithm, const CollectiveArgs& args, uint32_t rank, uint32_t ranks, size_t width,
           uint32_t index, Piece* table);

/// The range from the first to the last byte of these pieces.
Piece extent_of(const Pieces& pieces, uint32_t ranks, PieceTable table);

/// Whether every piece that is not empty begins at a multiple of `bytes`, a power of two.
bool are_aligned(const Pieces& pieces, uint32_t ranks, PieceTable table, size_t bytes);

/// Sets a job's places. `place_of` returns 1 + the offset of a range in this rank's pool, or 0.
using PlaceOf = std::function<uint64_t(const std::byte* data, size_t bytes)>;
void put_places(Job& job, uint32_t ranks, PieceTable table, const PlaceOf& place_of);

/// A job that copies each piece of `from` to that of `to`. Both are listed in `table`, as if it began at `index`.
Job job_of_moves(std::span<const Piece> from, std::span<const Piece> to, uint32_t index, Piece* table);

/// Whether the algorithm can run the job: its collective, its type and, for packets, its length. Launches refuse other
/// jobs. If counts differ by rank, the answer may differ too; kExchangePieces and chunks are the algorithms that all
/// ranks can agree on then.
bool can_do(DeviceAlgorithm algorithm, const Job& job, const DeviceShape& shape, PieceTable table);

}  // namespace nvx::kernel
