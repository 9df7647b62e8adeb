#pragma once

#include <cstddef>
#include <cstdint>

#include "kernel/cpu/pad.h"
#include "kernel/verdict.h"

/// The memory that ranks write on each other's devices, and the state that each keeps to itself: every layout of the
/// device algorithms, for the device and the host. All of it is plain memory; the Exec decides how to access it.
///
/// A channel is divided into blocks. The same block of all ranks works independently of the other blocks: it has its
/// own epoch, packets, chunks and flags, and never waits for another block.
namespace nvx::kernel {

/// 16 bytes of any type: the unit that a lane moves.
struct alignas(16) [[gnu::may_alias]] Pack {
  uint64_t words[2];
};

/// 8 bytes of data with their stamps. Each half has 4 bytes of data in its low bits and the stamp in its high bits, and
/// is written atomically. So packets need neither a flag nor memory ordering: a reader that sees the stamp sees the
/// data.
struct alignas(16) Packet {
  uint64_t halves[2];
};
inline constexpr size_t kPacketBytes = 8;

/// Packets lie in rows: the first packets of 32 packs, then their second ones. So the lanes of a warp, which write one
/// pack each, fill whole sectors with each store. A pack's second packet is kRowPacks behind its first.
inline constexpr uint32_t kRowPacks = 32, kRowPackets = 2 * kRowPacks;
constexpr size_t first_packet(size_t pack) { return pack / kRowPacks * kRowPackets + pack % kRowPacks; }

/// A rank's arrival at an operation: the words that it sends to every other rank, as packets.
struct DeviceArrival {
  Fingerprint fingerprint;
  double factor;   ///< the sender's multiplier for premul_sum
  uint64_t bytes;  ///< the bytes that the sender has for this receiver, if ranks compare them pair by pair
};
inline constexpr uint32_t kArrivalWords = sizeof(DeviceArrival) / kPacketBytes;
inline constexpr uint32_t kFingerprintWords = sizeof(Fingerprint) / kPacketBytes;
inline constexpr uint32_t kCountWord = 1, kHistoryWord = 3, kFactorWord = 4, kBytesWord = 5;
static_assert(sizeof(DeviceArrival) == 48 && offsetof(Fingerprint, count) == kCountWord * kPacketBytes &&
              offsetof(Fingerprint, history) == kHistoryWord * kPacketBytes &&
              offsetof(DeviceArrival, factor) == kFactorWord * kPacketBytes &&
              offsetof(DeviceArrival, bytes) == kBytesWord * kPacketBytes);
inline constexpr uint32_t kArrivalPackets = 8;  ///< space for the words, in a cache line of its own

/// Words that follow the arrival if pieces may bypass staging (has_chunks()). kPlaceWord is a Reach whose place is the
/// destination of the receiver's part in the sender's result. kMoreWord is in reductions the place of the receiver's
/// slice in the sender's input, and in exchanges the length that the sender can receive at the place in kPlaceWord.
inline constexpr uint32_t kPlaceWord = kArrivalWords, kMoreWord = kPlaceWord + 1, kReachWords = 2;
static_assert(kArrivalWords + kReachWords <= kArrivalPackets);

/// A rank's information about pools, in one word. The low kPlaceBits bits hold the place: 1 + an offset in the sender's
/// pool, or 0 for none. The high bits hold how much of the receiver's pool the sender has mapped, in granules. A place
/// that does not fit is sent as none; granules that do not fit are truncated.
struct Reach {
  static constexpr uint32_t kPlaceBits = 44;
  static constexpr uint64_t kPlaces = uint64_t(1) << kPlaceBits, kMostGranules = (uint64_t(1) << (64 - kPlaceBits)) - 1;
  static constexpr uint64_t kGranule = 2 << 20;

  uint64_t place;
  uint64_t granules;

  static constexpr Reach of(uint64_t word) { return {word % kPlaces, word >> kPlaceBits}; }
  constexpr uint64_t word() const { return place | granules << kPlaceBits; }
  static constexpr uint64_t granules_of(uint64_t mapped) {
    return mapped / kGranule < kMostGranules ? mapped / kGranule : kMostGranules;
  }
  /// Whether a piece at this place lies within the first `granules` granules of a pool.
  static constexpr bool holds(uint64_t granules, uint64_t place, uint64_t bytes) {
    const uint64_t end = granules * kGranule;
    return place != 0 && bytes != 0 && bytes <= end && place - 1 <= end - bytes;
  }
};
static_assert(Reach::of(Reach{Reach::kPlaces - 1, 5}.word()).granules == 5 &&
              Reach::of(Reach{7, Reach::kMostGranules}.word()).place == 7);

/// The counters of one peer, in the memory of the rank that waits for them. Only the peer writes them. The last three
/// have an epoch in their high half.
struct alignas(kCacheLine) PeerCounters {
  Stamp posted;  ///< the total number of chunks that the peer has written for this rank
  Stamp credit;  ///< the total number of this rank's chunks that the peer has read
  Stamp done;    ///< the last operation that the peer reported as done; low half: a digest of its calls
  Stamp ready;   ///< the last operation in which other ranks may access the peer's tensors; low half: 1
  Stamp quit;    ///< the operation in which the peer failed, so that its tensors are invalid; low half: 1
};

inline constexpr uint32_t kBuffers = 2;        ///< consecutive operations whose packets are separate
inline constexpr uint32_t kChunks = 4;         ///< the most unread chunks from one rank to another
inline constexpr uint32_t kDigests = 8;        ///< operations for which a block keeps a digest of its calls
inline constexpr uint32_t kRestamp = 1 << 24;  ///< operations after which every packet is restamped

constexpr bool is_power_of_two(uint64_t n) { return n != 0 && (n & (n - 1)) == 0; }
// Epochs, stamps and chunk counters wrap. Their remainders continue without a jump only if the divisor is a power of
// two. A stamp can be mistaken for another only if it is as old as the whole range; packets are restamped long
// before that.
static_assert(is_power_of_two(kBuffers) && is_power_of_two(kChunks) && is_power_of_two(kDigests));
static_assert(is_power_of_two(kRestamp) && kRestamp > kBuffers && uint64_t(kRestamp) < (uint64_t(1) << 31));
static_assert(kDigests >= 2 * kBuffers);
// reduce_chunks() has two chunks of one pair in flight while it waits for a third and a fourth.
static_assert(kChunks >= 4);

inline constexpr uint32_t kMostRanks = 192;   ///< a block's shared memory has a Peer for each
inline constexpr uint32_t kMostBlocks = 256;  ///< of one rank

/// The dimensions of a channel. All ranks agree on them, and they never change.
struct DeviceShape {
  uint32_t ranks = 1;
  uint32_t blocks = 1;
  uint32_t packets = 64;        ///< the most that one block receives from one rank in one operation; even
  uint32_t chunk_bytes = 4096;  ///< a multiple of sizeof(Pack)

  /// The packs that these packets carry; a pack takes two packets.
  constexpr uint32_t packs() const { return packets / 2; }
  constexpr bool is_valid() const {
    return ranks > 0 && ranks <= kMostRanks && blocks > 0 && blocks <= kMostBlocks && packets % 2 == 0 &&
           chunk_bytes > 0 && chunk_bytes % sizeof(Pack) == 0;
  }
};

/// The parts of a rank's pad. Each part has one cell per block and sender. Different senders may see different memory
/// as the pad: see PeerPads.
enum class Part : uint32_t { kArrivals, kPackets, kArrivalsOdd, kPacketsOdd, kCounters, kStaging, kEnd };

/// The offsets in a pad, which its owner reads and the other ranks write.
struct DevicePad {
  DeviceShape shape;

  /// The packets that a cell has room for: whole rows. Kernels compute this, so it stays in 32 bits, unlike round_up().
  constexpr size_t packets() const { return (shape.packets + kRowPackets - 1) / kRowPackets * kRowPackets; }
  constexpr size_t cell(Part part) const {
    const size_t bytes[] = {
        kArrivalPackets * sizeof(Packet), packets() * sizeof(Packet), kArrivalPackets * sizeof(Packet),
        packets() * sizeof(Packet),       sizeof(PeerCounters),       size_t(kChunks) * shape.chunk_bytes};
    return round_up(bytes[size_t(part)], kCacheLine);
  }
  constexpr size_t offset(Part part) const {
    size_t sum = 0;
    for (uint32_t i = 0; i < uint32_t(part); ++i) sum += cell(Part(i)) * shape.ranks * shape.blocks;
    return sum;
  }
  /// The cell of `block` that `sender` writes.
  constexpr size_t offset(Part part, uint32_t block, uint32_t sender) const {
    return offset(part) + (size_t(block) * shape.ranks + sender) * cell(part);
  }
  /// The part of this buffer, for a part that exists once per buffer.
  static constexpr Part of(Part part, uint32_t buffer) { return Part(uint32_t(part) + 2 * buffer); }
  constexpr size_t bytes() const { return offset(Part::kEnd); }
};
static_assert(uint32_t(Part::kArrivalsOdd) == uint32_t(Part::kArrivals) + 2 &&
              uint32_t(Part::kPacketsOdd) == uint32_t(Part::kPackets) + 2 && kBuffers == 2);

/// The pads through which a rank and one of its peers communicate, as addresses for this rank's kernels. Each address
/// is the start of a whole pad of which only the cells of this pair are used. So a pair that cannot access each other's
/// devices can use a pad in other memory, and a rank may own several pads of the same format. For a rank with itself,
/// both addresses are equal.
struct PeerPads {
  std::byte* theirs;  ///< the peer's pad, which this rank writes
  std::byte* mine;    ///< this rank's pad, which the peer has as its `theirs`; this rank reads it
};

/// The state of a rank, in memory that no peer writes.
struct alignas(kCacheLine) RankState {
  uint32_t failed;  ///< 1 after the first failure; blocks of later operations then write nothing
  uint32_t left;    ///< the number of blocks that have ended the current launch, if it has a completion counter
  uint32_t direct;  ///< see Control::direct
};

struct alignas(kCacheLine) BlockState {
  uint32_t epoch;              ///< the last operation of this block
  uint32_t replayed;           ///< the number of completed operations from graphs
  uint64_t history;            ///< hash of all operations so far
  uint32_t digests[kDigests];  ///< ... after each of the last operations, by epoch
};

/// The state of a block towards one peer.
struct PipeState {
  Stamp sent;         ///< total number of chunks
  Stamp taken;        ///< total number of chunks
  uint32_t last_met;  ///< the last operation in which the peer was met
};

struct DeviceState {
  DeviceShape shape;

  static constexpr size_t rank() { return 0; }
  /// One PeerPads per rank.
  static constexpr size_t pads() { return rank() + sizeof(RankState); }
  constexpr size_t blocks() const { return round_up(pads() + shape.ranks * sizeof(PeerPads), kCacheLine); }
  constexpr size_t pipes() const { return blocks() + shape.blocks * sizeof(BlockState); }
  constexpr size_t pipe(uint32_t block, uint32_t peer) const {
    return pipes() + (size_t(block) * shape.ranks + peer) * sizeof(PipeState);
  }
  /// One PoolView per rank: the host copies here what it has mapped. Kernels do not read it from the host's memory,
  /// where the reads of a launch's blocks would come one after another.
  constexpr size_t views() const { return round_up(pipe(shape.blocks, 0), kCacheLine); }
  constexpr size_t bytes() const { return round_up(views() + shape.ranks * kViewBytes, kCacheLine); }

 private:
  static constexpr size_t kViewBytes = 16;
};

/// Why a rank's kernel gave up, for the host. Only the first failure of a rank is kept.
struct DeviceVerdict {
  static constexpr uint32_t kReadable = 1;
  uint32_t state;  ///< kReadable when the verdict is complete
  Verdict::Cause cause;
  Waited how;
  int32_t peer;
  uint32_t block;
  uint32_t epoch;
  uint32_t call;  ///< Job::call
  Stamp wanted;
  Stamp seen;
  uint64_t mine[kArrivalWords];    ///< kMismatch and kCounts: the expected arrival ...
  uint64_t theirs[kArrivalWords];  ///< ... and the received one
};

/// How far a block has progressed. One word, so that both parts are of the same launch.
struct BlockEnd {
  uint32_t epoch;     ///< the last epoch that the block has ended
  uint32_t replayed;  ///< operations that graphs had begun by then; wraps

  constexpr uint64_t word() const { return uint64_t(replayed) << 32 | epoch; }
  static constexpr BlockEnd of(uint64_t word) { return {uint32_t(word), uint32_t(word >> 32)}; }
};

/// Shared by host and device, in pinned host memory.
struct alignas(kCacheLine) Control {
  uint32_t abort;                      ///< set by the host; ends every wait
  Stamp dead[(kMostRanks + 63) / 64];  ///< a bit per rank: the host has found it dead; set before `abort`
  alignas(kCacheLine) DeviceVerdict verdict;
  alignas(kCacheLine) uint32_t begun;  ///< the last epoch that the first block has begun, or one more after a failure
  uint32_t direct;  ///< total number of pieces that went to or came from a peer without staging; wraps
  alignas(kCacheLine) uint64_t ended[kMostBlocks];  ///< a BlockEnd per block
};

/// How far the block that is behind the others has progressed: the host's view of what has ended. It shows progress
/// only.
BlockEnd least_ended(const Control& control, uint32_t blocks);

/// The part of another rank's pool (memory/gpu/device_pool.h) that this rank's device can access. The host writes it at
/// any time: first `base`, which then never changes, then `mapped`, which only grows.
struct PoolView {
  uint64_t base;    ///< the address of its first byte; 0: nothing is mapped
  uint64_t mapped;  ///< accessible bytes from there
};

/// The memory that the host and the kernels of a rank share: a Control, then one PoolView per rank, which the host
/// copies to DeviceState::views().
constexpr size_t control_bytes(uint32_t ranks) { return sizeof(Control) + ranks * sizeof(PoolView); }
inline PoolView* pool_views(Control* control) { return reinterpret_cast<PoolView*>(control + 1); }

/// Division by a number that is fixed for a launch, without a division: by the product with its reciprocal. Exact for
/// dividends below 2^54 and divisors up to 2^10.
class Divisor {
 public:
  constexpr Divisor() = default;
  constexpr Divisor(uint32_t n) : n_(n), reciprocal_(n == 1 ? 0 : UINT64_MAX / n + 1) {}
  constexpr uint32_t n() const { return n_; }
  constexpr uint64_t quotient(uint64_t dividend) const {
    return n_ == 1 ? dividend : uint64_t((unsigned __int128)(dividend)*reciprocal_ >> 64);
  }

 private:
  uint32_t n_ = 1;
  uint64_t reciprocal_ = 0;
};

/// One rank's end of a channel, as passed to kernels.
struct DeviceChannel {
  DeviceShape shape;
  uint32_t rank = 0;
  std::byte* state = nullptr;
  Control* control = nullptr;
  const PoolView* pools = nullptr;  ///< by rank, in device memory; null: everything uses staging
  uint32_t by_replays = 0;          ///< 1 if the launch belongs to a graph, whose replays the host does not count
  Stamp* completion = nullptr;  ///< in host memory; set to `completion_value` when the launch has ended without failure
  Stamp completion_value = 0;

  // Set by prepared(), so that kernels need not compute them:
  Divisor by_ranks{}, by_blocks{};
  size_t parts[size_t(Part::kEnd)] = {};    ///< the offset of each part in a pad
  uint32_t cells[size_t(Part::kEnd)] = {};  ///< the size of its cells

  DeviceChannel prepared() const;
  /// DevicePad::offset(), from these.
  constexpr size_t offset(Part part, uint32_t block, uint32_t sender) const {
    return parts[size_t(part)] + size_t(block * shape.ranks + sender) * cells[size_t(part)];
  }
};

/// Initialise a pad and a state for the first operation, whose epoch is first_epoch + 1. Chunk counters begin at
/// first_chunk. Staging needs no initial value, so `pad` has offset(Part::kStaging) bytes only. `pads` has one entry
/// per rank, this rank included.
void format_pad(const DeviceShape& shape, uint32_t first_epoch, Stamp first_chunk, std::byte* pad);
void format_state(const DeviceShape& shape, uint32_t first_epoch, Stamp first_chunk, const PeerPads* pads,
                  std::byte* state);

}  // namespace nvx::kernel
