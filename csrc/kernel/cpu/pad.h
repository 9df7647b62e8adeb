#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>

#include "base/collective.h"
#include "base/failure_note.h"
#include "base/flag.h"
#include "base/round_up.h"
#include "kernel/reduce/dtype.h"

namespace nvx::kernel {

/// A pad is the memory of a rank that the others read: flags, small messages, and the place of its staging. There is
/// one per rank and group, in the rank's arena. Its owner is the only writer, except where noted.

using nvx::Collective;

/// How tensors store their elements. Sparse tensors use host memory, in several steps of one collective.
enum class Form : uint8_t { kDense, kSparse };

/// The identity of a call. Ranks compare these byte by byte.
struct Fingerprint {
  Collective collective = Collective::kNone;
  DType dtype = DType::kBytes;
  ReduceOp op = ReduceOp::kSum;
  Form form = Form::kDense;
  int32_t root = -1;
  uint64_t count = 0;    ///< elements of all ranks together; 0 if counts are compared pair by pair
  uint64_t shape = 0;    ///< hash of the counts by rank, if they may differ
  uint64_t history = 0;  ///< hash of all operations before this one
};
static_assert(sizeof(Fingerprint) == 32);

inline constexpr size_t kCacheLine = 128;         ///< two cache lines, because the adjacent-line prefetcher pairs them
inline constexpr uint32_t kEpochs = 4;            ///< consecutive operations whose arrivals and slots are separate
inline constexpr uint32_t kRecent = 2 * kEpochs;  ///< operations whose fingerprints are kept: see Channel::compare()
inline constexpr size_t kInlineBytes = 168;
inline constexpr size_t kSlotBytes = 64 << 10;  ///< the longest message in a slot
inline constexpr size_t kSlotsBytes = 1 << 20;  ///< the memory in which slots follow one another
static_assert(kSlotsBytes >= (kEpochs + 1) * kSlotBytes);

/// A rank's announcement that it has begun an operation: its call, the place of its data, and the data if it is small.
struct alignas(kCacheLine) Arrival {
  Flag flag;
  Fingerprint fingerprint;
  /// Of this operation's staging: in the owner's arena; if `in_place`, of its data in the memory of its process's
  /// tensors; without a lease, of its slot in the pad.
  uint64_t lease_offset;
  uint64_t lease_bytes;  ///< if `in_place`, the staging that sizes the chunks; 0: no lease
  double factor;         ///< this rank's multiplier for premul_sum
  uint32_t next_policy;  ///< the CachePolicy of the next operation like this one, if its owner decides for all ranks
  uint32_t in_place;     ///< 1: peers read the data where it is: see Channel::lend()
  std::byte payload[kInlineBytes];
};
static_assert(sizeof(Arrival) == 2 * kCacheLine);

struct alignas(kCacheLine) FlagLine {
  Flag flag;
};

/// Why a rank failed the group; the other ranks repeat it.
struct PostedNote {
  enum State : uint32_t { kNone, kReadable };
  std::atomic<State> state;
  uint32_t reserved;
  FailureNote note;

  /// Acquire: if it returns true, the note that the owner wrote before is visible.
  bool readable() const { return state.load(std::memory_order_acquire) == kReadable; }
  /// For the pad's owner, on one thread at a time. The first note stays.
  void write(const Failure& failure) {
    if (state.load(std::memory_order_relaxed) != kNone) return;
    note = FailureNote::of(failure);
    state.store(kReadable, std::memory_order_release);
  }
  /// For a peer in a group of so many ranks. Empty where the note is damaged.
  std::optional<Failure> read(int ranks) const { return FailureNote::read(std::as_bytes(std::span(&note, 1)), ranks); }
};
static_assert(sizeof(PostedNote) == 1024);

enum class Presence : uint32_t { kAbsent, kHere, kLeft };

struct alignas(kCacheLine) PadHeader {
  std::atomic<uint64_t> group;  ///< identifies the set-up: a reused pad shows another value, a fresh one 0
  std::atomic<Presence> presence;
  int32_t rank;
  // Of the rank's device. None of it changes after the rank has left.
  std::atomic<uint64_t> launched;     ///< operations that calls launched on the device
  std::atomic<uint32_t> ended_epoch;  ///< the last operation that the device completed, graph replays included
  std::atomic<uint64_t> pool_grown;   ///< bytes of its pool that peers may map; may grow at any time
  PostedNote failure;
  PostedNote other_failure;  ///< why another group of this rank's process failed
  FlagLine ready;            ///< set-up: this rank has mapped all peers
  FlagLine monitored_in;     ///< monitored barrier: this rank has entered; on rank 0: it has begun
  FlagLine monitored_out;    ///< monitored barrier, rank 0: all ranks have entered
  FlagLine message_bell;     ///< peers ring it when there is a message; its value is unused
};

inline constexpr uint32_t kEnvelopes = 16;
inline constexpr size_t kEnvelopePayload = 976;

/// The announcement of a message, with its data if small; a large one is streamed when the receiver grants it.
struct Envelope {
  uint64_t message;  ///< number of the message in its pair of ranks, from 1
  int64_t tag;
  uint64_t bytes;
  DType dtype;
  uint8_t carries_data;
  uint8_t on_device;  ///< the data is in the memory of a GPU
  uint8_t reserved[5];
  uint64_t place;  ///< 1 + the data's offset in the sender's pool of GPU memory; 0: it is elsewhere
  uint64_t reserved_too;
  std::byte payload[kEnvelopePayload];
};
static_assert(sizeof(Envelope) == 1024);

/// Where the chunks of a granted message are: in a lease of the owner's arena in host memory, in slots of its arena of
/// GPU memory, or in its pool of GPU memory, whole.
enum class ChunkPlace : uint64_t { kHost, kSlots, kPool };

/// Messages from the pad's owner to one peer.
struct alignas(kCacheLine) Outbox {
  FlagLine posted;    ///< the number of envelopes written
  FlagLine streamed;  ///< the number of chunks of granted messages written, over all messages of the pair
  uint64_t lease_offset;
  uint64_t lease_bytes;
  ChunkPlace lease_place;
  Envelope envelopes[kEnvelopes];
};

/// Receive state of the pad's owner for one peer. The owner is the writer here too.
struct alignas(kCacheLine) Inbox {
  FlagLine taken;     ///< the number of envelopes read
  FlagLine granted;   ///< the number of messages granted
  FlagLine consumed;  ///< the number of chunks read, over all messages of the pair
  FlagLine full;      ///< 1: announcements must carry no data, because enough unexpected messages are buffered
  uint64_t grants[kEnvelopes];  ///< numbers of messages, with the bits kByCopies and kInPlace
};

/// In a grant: the receiver can fetch the message from slots of GPU memory, and also from the sender's pool.
inline constexpr uint64_t kByCopies = uint64_t(1) << 63, kInPlace = uint64_t(1) << 62;

/// The offsets in a pad of a group of this many ranks. All pad sizes are computed here.
class PadLayout {
 public:
  explicit constexpr PadLayout(size_t ranks) : ranks_(ranks) {}

  static constexpr size_t header() { return 0; }
  static constexpr size_t done() { return round_up(sizeof(PadHeader), kCacheLine); }
  static constexpr size_t staged() { return done() + sizeof(FlagLine); }
  static constexpr size_t reduced() { return staged() + sizeof(FlagLine); }
  static constexpr size_t fetched() { return reduced() + sizeof(FlagLine); }
  static constexpr size_t recent() { return fetched() + sizeof(FlagLine); }
  static constexpr size_t arrivals() { return round_up(recent() + kRecent * sizeof(Fingerprint), kCacheLine); }
  static constexpr size_t counts() { return arrivals() + kEpochs * sizeof(Arrival); }
  constexpr size_t outboxes() const { return round_up(counts() + kEpochs * ranks_ * sizeof(uint64_t), kCacheLine); }
  constexpr size_t inboxes() const { return outboxes() + ranks_ * sizeof(Outbox); }
  constexpr size_t slots() const { return round_up(inboxes() + ranks_ * sizeof(Inbox), 4096); }
  constexpr size_t bytes() const { return slots() + kSlotsBytes; }
  constexpr size_t ranks() const { return ranks_; }

 private:
  size_t ranks_;
};
static_assert(PadLayout::arrivals() % kCacheLine == 0 && PadLayout(3).outboxes() % kCacheLine == 0);

/// A rank's pad as this process maps it.
class Pad {
 public:
  Pad(std::byte* base, size_t ranks) : base_(base), layout_(ranks) {}

  PadHeader& header() const { return at<PadHeader>(PadLayout::header()); }
  Flag& done() const { return at<Flag>(PadLayout::done()); }
  // The steps of an operation. Any algorithm may use them, with stamp(epoch, k) for k = 1, 2, ... in that order.
  Flag& staged() const { return at<Flag>(PadLayout::staged()); }
  Flag& reduced() const { return at<Flag>(PadLayout::reduced()); }
  Flag& fetched() const { return at<Flag>(PadLayout::fetched()); }
  /// The fingerprint of the owner's call in this epoch, valid for recent epochs. Written before the arrival.
  Fingerprint& recent(uint32_t epoch) const {
    return at<Fingerprint>(PadLayout::recent() + epoch % kRecent * sizeof(Fingerprint));
  }
  Arrival& arrival(uint32_t epoch) const {
    return at<Arrival>(PadLayout::arrivals() + epoch % kEpochs * sizeof(Arrival));
  }
  uint64_t* counts(uint32_t epoch) const {
    return &at<uint64_t>(PadLayout::counts() + epoch % kEpochs * layout_.ranks() * sizeof(uint64_t));
  }
  /// The slot at an offset. A wrong offset, from a peer, is replaced by a valid one.
  std::byte* slot(uint64_t at) const { return base_ + layout_.slots() + std::min(at, kSlotsBytes - kSlotBytes); }
  Outbox& outbox(int peer) const { return at<Outbox>(layout_.outboxes() + size_t(peer) * sizeof(Outbox)); }
  Inbox& inbox(int peer) const { return at<Inbox>(layout_.inboxes() + size_t(peer) * sizeof(Inbox)); }

 private:
  template <class T>
  T& at(size_t offset) const {
    return *reinterpret_cast<T*>(base_ + offset);
  }

  std::byte* base_;
  PadLayout layout_;
};

}  // namespace nvx::kernel
