#pragma once

#include <cstdint>
#include <functional>
#include <span>

#include "kernel/cpu/launch.h"
#include "kernel/gpu/device_pad.h"
#include "kernel/piece.h"

namespace nvx::kernel {

/// The algorithms that push into their peers' memory: kernel/gpu/device_collectives.h.
enum class DeviceAlgorithm : uint8_t {
  kReducePackets,         ///< all to all who read: all_reduce and reduce in one trip; reduce_scatter
  kReducePacketsTwoShot,  ///< all_reduce in two trips, for more than a few KiB
  kReduceChunks,          ///< the same in chunks, of any length: all_reduce, reduce, reduce_scatter
  kExchangePackets,       ///< all_gather, broadcast, all_to_all, gather, scatter, barrier; messages
  kExchangeChunks,        ///< the same in chunks
  kExchangePieces,        ///< the same, pair by pair: packets where they hold the piece, chunks where they do not
  kMoveOwn,               ///< pieces that are this rank's alone, each to where it belongs: no peer has a part in it
};
inline constexpr size_t kDeviceAlgorithmCount = 7;

const char* name(DeviceAlgorithm algorithm);

/// Whether it may move data in chunks. Then ranks that have mapped each other's memory may do without staging.
NVX_HD constexpr bool has_chunks(DeviceAlgorithm algorithm) {
  return algorithm == DeviceAlgorithm::kReduceChunks || algorithm == DeviceAlgorithm::kExchangeChunks ||
         algorithm == DeviceAlgorithm::kExchangePieces;
}

/// Whether it carries out reductions; else it only moves data.
NVX_HD constexpr bool reduces(DeviceAlgorithm algorithm) { return algorithm <= DeviceAlgorithm::kReduceChunks; }

/// Packs of each block's share of a piece that an algorithm of packets holds; of chunks any number goes.
constexpr size_t most_packs(DeviceAlgorithm algorithm, const DeviceShape& shape) {
  switch (algorithm) {
    case DeviceAlgorithm::kReducePackets:
    case DeviceAlgorithm::kExchangePackets: return shape.packs();
    case DeviceAlgorithm::kReducePacketsTwoShot: return shape.packs() / 2;  // half of the packets for each trip
    default: return SIZE_MAX;
  }
}

/// Where each rank's piece lies: by a rule where there is one, else listed in a table.
struct Pieces {
  enum class Kind : uint32_t {
    kNone,   ///< nobody has one
    kSame,   ///< one for all
    kOnly,   ///< one, of rank `index`
    kEven,   ///< all of `bytes`, one behind the other
    kSplit,  ///< `bytes` in all, cut between packs
    kTable,  ///< listed from `index`
    kOwn,    ///< this rank's alone: `bytes` is how many, listed from `index`
  };
  Kind kind = Kind::kNone;
  uint32_t index = 0;
  std::byte* base = nullptr;  ///< no piece has a byte before it
  uint64_t bytes = 0;

  NVX_APART Piece of(uint32_t rank, uint32_t ranks, const Piece* table) const {
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

  /// How many pieces of a table are its own.
  NVX_HD uint32_t owns() const { return kind == Kind::kOwn ? uint32_t(bytes) : 0; }

  /// All pieces, whether each is another rank's or all are its own: how many there may be, and the i-th.
  uint32_t count(uint32_t ranks) const { return kind == Kind::kOwn ? owns() : ranks; }
  Piece at(uint32_t i, uint32_t ranks, const Piece* table) const {
    return kind == Kind::kOwn ? table[index + i] : of(i, ranks, table);
  }

  /// The bytes that the fullest block has to take of a piece.
  NVX_HD static size_t fullest(const Piece& piece, uint32_t blocks) { return slice(piece, 0, blocks).bytes; }

  /// The i-th of n slices of a piece. They begin between packs, so that no element straddles two.
  NVX_HD static Piece slice(const Piece& piece, uint32_t i, uint32_t n) {
    const size_t packs = ceil_div(piece.bytes, sizeof(Pack));
    const size_t share = packs / n, more = packs % n;
    const size_t first = (share * i + (i < more ? i : more)) * sizeof(Pack);
    const size_t last = first + (share + (i < more ? 1 : 0)) * sizeof(Pack);
    if (first >= piece.bytes) return {piece.data, 0};
    return {piece.data + first, (last < piece.bytes ? last : piece.bytes) - first};
  }
};

/// One operation of one rank.
struct Job {
  Fingerprint fingerprint;  ///< the history is filled in by the channel
  double factor = 1;
  int32_t root = -1;
  DeviceAlgorithm algorithm = DeviceAlgorithm::kExchangePackets;
  uint32_t call = 0;         ///< what the host knows it by: verdicts name it
  Pieces send;               ///< what goes to each rank; to itself too
  Pieces recv;               ///< where each rank's part of the result goes
  uint64_t patience_ns = 0;  ///< from its beginning, until a wait gives up; 0: until it is aborted
  // Where the first of these pieces' bytes is in this rank's pool, plus 1; 0 where not all of them lie in it. Peers
  // that have it mapped then read and write them where they are.
  uint64_t send_place = 0;
  uint64_t recv_place = 0;
  // Of kMoveOwn: what it waits for, in memory of the host that the device reaches too. The host raises it.
  const Stamp* awaited = nullptr;  ///< null: nothing
  Stamp awaits = 0;
};

/// What a launch is handed beside jobs: the pieces that they list.
using PieceTable = const Piece*;

/// The job that does what `work` says, of elements of `width` bytes. Lists of pieces are written to table, which has
/// room for 2 * ranks, and are named as if it began at `index`.
Job job_of(DeviceAlgorithm algorithm, const Work& work, uint32_t rank, uint32_t ranks, size_t width, uint32_t index,
           Piece* table);

/// From the first byte of any of these pieces to the last.
Piece extent_of(const Pieces& pieces, uint32_t ranks, PieceTable table);

/// Tells a job its places. place_of: 1 + where so many bytes begin in this rank's pool, or 0.
using PlaceOf = std::function<uint64_t(const std::byte* data, size_t bytes)>;
void put_places(Job& job, uint32_t ranks, PieceTable table, const PlaceOf& place_of);

/// Moves each of these pieces to the other one of its place. Both are listed in table, as if it began at `index`.
Job job_of_moves(std::span<const Piece> from, std::span<const Piece> to, uint32_t index, Piece* table);

/// A message's two jobs, of who sends it and of who receives it, on a channel of these two ranks that has this
/// direction to itself. It is a broadcast, whose root is the sender. What must match is the fingerprint's: type and
/// elements.
Job job_of_send(DeviceAlgorithm algorithm, const Piece& message, DType dtype, uint32_t rank);
Job job_of_recv(DeviceAlgorithm algorithm, const Piece& room, DType dtype, uint32_t rank);

/// Whether the algorithm can carry out the job: its collective, its type and, in packets, its length. Launches refuse
/// jobs that it cannot. Where counts differ by rank the answer may do so too; kExchangePieces and chunks are what all
/// ranks can agree on there.
bool can_do(DeviceAlgorithm algorithm, const Job& job, const DeviceShape& shape, PieceTable table);

}  // namespace nvx::kernel
