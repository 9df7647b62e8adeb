#pragma once

#include <cstddef>
#include <cstdint>

#include "kernel/cpu/pad.h"
#include "kernel/verdict.h"

/// What ranks write into each other's device memory, and what each keeps to itself: every layout of the pushed
/// algorithms, stated once for the device and for the host. All of it is plain memory; how it is accessed is up to the
/// Exec.
///
/// A channel is cut into blocks, and the same block of all ranks works apart from the other blocks: it has its own
/// epoch, packets, chunks and flags, and never waits for another block.
namespace nvx::kernel {

/// 16 bytes of anything: what a lane moves at a time.
struct alignas(16) [[gnu::may_alias]] Pack {
  uint64_t words[2];
};

/// 8 bytes of data with their stamps. Each half has 4 bytes of data in its low bits and the stamp in its high bits, and
/// is written at once. So the data needs neither a flag nor any order: whoever sees the stamp sees the data.
struct alignas(16) Packet {
  uint64_t halves[2];
};
inline constexpr size_t kPacketBytes = 8;

/// What every rank says to every other at the start of an operation, as packets.
struct Greeting {
  Fingerprint fingerprint;
  double factor;   ///< premul_sum's multiplier of the sender
  uint64_t bytes;  ///< what the sender has for this receiver, where ranks compare that pair by pair
};
inline constexpr uint32_t kGreetingWords = sizeof(Greeting) / kPacketBytes;
inline constexpr uint32_t kFingerprintWords = sizeof(Fingerprint) / kPacketBytes;
inline constexpr uint32_t kCountWord = 1, kHistoryWord = 3, kFactorWord = 4, kBytesWord = 5;
static_assert(sizeof(Greeting) == 48 && offsetof(Fingerprint, count) == kCountWord * kPacketBytes &&
              offsetof(Fingerprint, history) == kHistoryWord * kPacketBytes &&
              offsetof(Greeting, factor) == kFactorWord * kPacketBytes &&
              offsetof(Greeting, bytes) == kBytesWord * kPacketBytes);
inline constexpr uint32_t kGreetingPackets = 8;  ///< room for the words, in a line of its own

/// Words that follow the greeting where pieces may go without staging (has_chunks). kPlaceWord is a Reach; its place is
/// where, in the sender's result, the receiver's part belongs. kMoreWord is, in reductions, the place of the receiver's
/// slice in the sender's input, and in exchanges, how many bytes the sender has room for at the place in kPlaceWord.
inline constexpr uint32_t kPlaceWord = kGreetingWords, kMoreWord = kPlaceWord + 1, kReachWords = 2;
static_assert(kGreetingWords + kReachWords <= kGreetingPackets);

/// What a rank says of pools, in one word. The low kPlaceBits bits hold the place: 1 + an offset in the sender's pool,
/// or 0 for none. The high bits hold how much of the receiver's pool the sender has mapped, in granules. A place that
/// does not fit its bits is told as none, and granules that do not fit theirs are not told.
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
  /// Whether a piece at this place lies within the first so many granules of a pool.
  static constexpr bool holds(uint64_t granules, uint64_t place, uint64_t bytes) {
    const uint64_t end = granules * kGranule;
    return place != 0 && bytes != 0 && bytes <= end && place - 1 <= end - bytes;
  }
};
static_assert(Reach::of(Reach{Reach::kPlaces - 1, 5}.word()).granules == 5 &&
              Reach::of(Reach{7, Reach::kMostGranules}.word()).place == 7);

/// Counters of one peer, which alone writes them, in the memory of the rank that waits for them. The last three have an
/// epoch in their high half.
struct alignas(kCacheLine) PeerCounters {
  Stamp posted;  ///< chunks that the peer has written for me, ever
  Stamp credit;  ///< chunks of mine that the peer has read, ever
  Stamp done;   ///< the last operation it is done with, of those that it tells of; low half: a digest of what it called
  Stamp ready;  ///< the last operation for which its tensors are ready to be touched by others; low half: 1
  Stamp quit;   ///< the operation in which it has failed, so that its tensors cannot be relied on; low half: 1
};

inline constexpr uint32_t kBuffers = 2;        ///< operations whose packets are kept apart
inline constexpr uint32_t kChunks = 4;         ///< chunks from one rank to another that may be unread
inline constexpr uint32_t kDigests = 8;        ///< operations of which a block remembers what it called
inline constexpr uint32_t kRestamp = 1 << 24;  ///< operations after which every packet is stamped anew

constexpr bool is_power_of_two(uint64_t n) { return n != 0 && (n & (n - 1)) == 0; }
// Epochs, stamps and chunk counters wrap. Remainders of them go on without a jump only where the divisor is a power of
// two. And a stamp may be mistaken for another one only when it is as old as the whole range; packets are stamped anew
// long before that.
static_assert(is_power_of_two(kBuffers) && is_power_of_two(kChunks) && is_power_of_two(kDigests));
static_assert(is_power_of_two(kRestamp) && kRestamp > kBuffers && uint64_t(kRestamp) < (uint64_t(1) << 31));
static_assert(kDigests >= 2 * kBuffers);
// ReduceChunks has two chunks of one pair under way while it waits for a third and a fourth.
static_assert(kChunks >= 4);

/// The measures of a channel. Agreed by all ranks, and never changed.
struct DeviceShape {
  uint32_t ranks = 1;
  uint32_t blocks = 1;
  uint32_t packets = 64;        ///< that one block can get from one rank in one operation; even
  uint32_t chunk_bytes = 4096;  ///< a multiple of the pack

  /// Packs that those packets carry: two packets hold one.
  constexpr uint32_t packs() const { return packets / 2; }
  constexpr bool sound() const {
    return ranks > 0 && blocks > 0 && packets % 2 == 0 && chunk_bytes > 0 && chunk_bytes % sizeof(Pack) == 0;
  }
};

/// The parts of a rank's pad. Each part has one cell for every block and sender. Different senders may be shown
/// different memory as the pad: see PeerPads.
enum class Part : uint32_t { kGreetings, kPackets, kGreetingsOdd, kPacketsOdd, kCounters, kStaging, kEnd };

/// Where everything is in a pad, which its owner reads and the others write.
struct DevicePad {
  DeviceShape shape;

  constexpr size_t cell(Part part) const {
    const size_t bytes[] = {
        kGreetingPackets * sizeof(Packet), shape.packets * sizeof(Packet), kGreetingPackets * sizeof(Packet),
        shape.packets * sizeof(Packet),    sizeof(PeerCounters),           size_t(kChunks) * shape.chunk_bytes};
    return (bytes[size_t(part)] + kCacheLine - 1) / kCacheLine * kCacheLine;
  }
  constexpr size_t offset(Part part) const {
    size_t sum = 0;
    for (uint32_t i = 0; i < uint32_t(part); ++i) sum += cell(Part(i)) * shape.ranks * shape.blocks;
    return sum;
  }
  /// The cell of this block into which this sender writes.
  constexpr size_t offset(Part part, uint32_t block, uint32_t sender) const {
    return offset(part) + (size_t(block) * shape.ranks + sender) * cell(part);
  }
  /// Of a part that exists once for each buffer: the one of this buffer.
  static constexpr Part of(Part part, uint32_t buffer) { return Part(uint32_t(part) + 2 * buffer); }
  constexpr size_t bytes() const { return offset(Part::kEnd); }
};
static_assert(uint32_t(Part::kGreetingsOdd) == uint32_t(Part::kGreetings) + 2 &&
              uint32_t(Part::kPacketsOdd) == uint32_t(Part::kPackets) + 2 && kBuffers == 2);

/// Where a rank and one of its peers meet, as addresses for this rank's kernels. Each is where a whole pad begins, of
/// which only the cells of this pair are touched. So a pair that cannot reach each other's devices has a pad in other
/// memory, and a rank may own several pads, all formatted alike. For a rank with itself, the two addresses are the
/// same.
struct PeerPads {
  std::byte* theirs;  ///< the peer's, in which this rank writes
  std::byte* mine;    ///< this rank's, which the peer sees as its `theirs`: where this rank reads what it wrote
};

/// What a rank keeps for itself, in memory that no peer has mapped.
struct alignas(kCacheLine) RankState {
  uint32_t failed;    ///< 1 after the first failure: no block of a later operation writes anything
  uint32_t left;      ///< blocks that have ended the operation under way
  uint32_t replayed;  ///< operations that graphs have begun and that have ended
  uint32_t direct;    ///< as Control's
};

struct alignas(kCacheLine) BlockState {
  uint32_t epoch;  ///< the last operation of this block
  uint32_t reserved;
  uint64_t history;            ///< hash of all operations so far
  uint32_t digests[kDigests];  ///< ... after each of the last ones, by epoch
};

/// Of a block, with one peer.
struct PipeState {
  Stamp sent;      ///< chunks, ever
  Stamp taken;     ///< chunks, ever
  uint32_t heard;  ///< the last operation in which the peer was met

  // In this operation, where pieces may go without staging. What this rank has told the peer:
  uint32_t granules;  ///< how much of the peer's pool this rank reaches
  uint64_t pool;      ///< where this rank sees that pool begin
  // What both conclude from their greetings. Addresses are those of this block's share; null means that it goes by
  // staging.
  std::byte* out;           ///< in the peer's result, where what this rank has for it belongs
  const std::byte* in;      ///< this rank's slice of the peer's input
  uint32_t is_written;      ///< the peer writes to this rank's result itself
  uint32_t is_read;         ///< the peer reads this rank's input itself
  const std::byte* source;  ///< the chunk from the peer that is being reduced
};
static_assert(sizeof(PipeState) == 64);

struct DeviceState {
  DeviceShape shape;

  static constexpr size_t rank() { return 0; }
  /// One PeerPads for each rank.
  static constexpr size_t pads() { return rank() + sizeof(RankState); }
  constexpr size_t blocks() const { return round(pads() + shape.ranks * sizeof(PeerPads)); }
  constexpr size_t pipes() const { return blocks() + shape.blocks * sizeof(BlockState); }
  constexpr size_t pipe(uint32_t block, uint32_t peer) const {
    return pipes() + (size_t(block) * shape.ranks + peer) * sizeof(PipeState);
  }
  constexpr size_t bytes() const { return round(pipe(shape.blocks, 0)); }

 private:
  static constexpr size_t round(size_t n) { return (n + kCacheLine - 1) / kCacheLine * kCacheLine; }
};

/// Why a rank's kernel gave up, for the host. The first failure of a rank is the one that is kept.
struct DeviceVerdict {
  static constexpr uint32_t kReadable = 1;
  uint32_t state;  ///< kReadable when there is one
  Verdict::Cause cause;
  Waited how;
  int32_t peer;
  uint32_t block;
  uint32_t epoch;
  uint32_t call;  ///< the job's
  Stamp wanted;
  Stamp seen;
  uint64_t mine[kGreetingWords];    ///< kMismatch and kCounts: the greeting expected ...
  uint64_t theirs[kGreetingWords];  ///< ... and the one received
};

/// In memory of the host that the device reaches too.
struct alignas(kCacheLine) Control {
  uint32_t abort;  ///< the host raises it, and every wait ends
  alignas(kCacheLine) DeviceVerdict verdict;
  alignas(kCacheLine) uint64_t finished;  ///< the last epoch that all blocks have ended
  uint64_t replayed;  ///< how many operations graphs had begun by then; written first; wraps after 32 bits
  uint32_t begun;     ///< the last epoch that the first block has begun
  uint32_t direct;    ///< pieces that have gone to or come from a peer without staging, ever; wraps
};

/// Another rank's pool (memory/gpu/device_pool.h) as this rank's device sees it, in memory of the host that the device
/// reaches too. The host writes it at any time: base first, which then stays as it is, then mapped, which only grows.
struct PoolView {
  uint64_t base;    ///< where its first byte is; 0: nothing of it is mapped
  uint64_t mapped;  ///< bytes from there that may be touched
};

/// Where the host and the kernels of a rank meet: Control, and behind it a PoolView a rank.
constexpr size_t control_bytes(uint32_t ranks) { return sizeof(Control) + ranks * sizeof(PoolView); }
inline PoolView* pool_views(Control* control) { return reinterpret_cast<PoolView*>(control + 1); }

/// One rank's end of a channel, as kernels are handed it.
struct DeviceChannel {
  DeviceShape shape;
  uint32_t rank = 0;
  std::byte* state = nullptr;
  Control* control = nullptr;
  const PoolView* pools = nullptr;  ///< by rank; null: all goes by staging
  uint32_t by_replays = 0;          ///< whether the launch is kept in a graph, whose replays the host does not count
  Stamp* told = nullptr;            ///< raised to `tells` when the launch has ended well, where the host reads it
  Stamp tells = 0;
};

/// These write what a pad and a state must hold before the first operation, whose epoch is first_epoch + 1. Chunk
/// counters begin at first_chunk. Staging may hold anything, so `pad` is of offset(Part::kStaging) bytes only. pads:
/// one for each rank, this rank included.
void format_pad(const DeviceShape& shape, uint32_t first_epoch, Stamp first_chunk, std::byte* pad);
void format_state(const DeviceShape& shape, uint32_t first_epoch, Stamp first_chunk, const PeerPads* pads,
                  std::byte* state);

}  // namespace nvx::kernel
