#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>

namespace nvx::net {

enum class Kind : uint8_t {
  kFirst,         ///< the first segment of a schedule's message; a First follows the header
  kNext,          ///< a later segment of it
  kCredit,        ///< the receiver has processed `value` bytes of those sent to it
  kPoison,        ///< the sender's group has failed; the body is a FailureNote
  kPing,          ///< to a process, not to a group: a liveness check
  kPong,          ///< the answer; `value` is a Liveness::Answer; the body of a kDeclaredLost is the reason
  kEnvelope,      ///< the announcement of a send; an Envelope follows the header, and a small message is in the body
  kTaken,         ///< announcements have been read; `value` is a Taken
  kGrant,         ///< the receiver of this header may send all of the large message of this number
  kSegment,       ///< a segment of a large message
  kFingerprint,   ///< the call with number `op` on the sender; its fingerprint follows. `value` 1: send yours
  kMonitorIn,     ///< the sender has entered the monitored barrier of number `value`
  kMonitorOut,    ///< all ranks have entered it
  kReady,         ///< the receiver of this header may send this message: its place on a device is free
  kOtherFailure,  ///< another group of the sender's process failed `value` ms ago; the body is a FailureNote
  kKinds          ///< the number of kinds
};

/// The header of every message between hosts: fixed, little endian, and checked before use, since peers send it.
struct MessageHeader {
  static constexpr uint8_t kMagic = 0x6e;
  static constexpr uint8_t kVersion = 7;  ///< changes with any layout in this file or in failure_note.h

  uint8_t magic = kMagic;
  uint8_t version = kVersion;
  Kind kind = Kind::kPing;
  uint8_t reserved = 0;
  uint32_t from = 0;   ///< rank in the group
  uint32_t to = 0;     ///< rank in the group
  uint32_t op = 0;     ///< the group's operation between hosts
  uint64_t group = 0;  ///< the nonce of the group
  union {
    struct {
      uint16_t run;      ///< the run of the operation
      uint16_t message;  ///< the index of the message between these two ranks in the run
      uint32_t segment;  ///< the index of the segment in the message
    };
    uint64_t value;  ///< credits, grants, numbers
  };

  MessageHeader(Kind kind = Kind::kPing, uint64_t value = 0) : kind(kind), value(value) {}
};
static_assert(sizeof(MessageHeader) == 32);

/// A call as ranks compare it: a kernel::Fingerprint.
using FingerprintBytes = std::array<std::byte, 32>;

struct First {
  FingerprintBytes fingerprint;
  uint64_t bytes;  ///< of the whole message
};
static_assert(sizeof(First) == 40);

/// The value of a kTaken message. Each one carries the whole state, because messages may overtake each other; the
/// highest counts are the latest. Both counts are modulo 2^32.
struct Taken {
  uint32_t count = 0;  ///< the number of announcements that have been read
  uint32_t turns = 0;  ///< how often the reader has switched unexpected data on or off

  bool full() const {
    return turns % 2 != 0;
  }  ///< the reader's buffer for unexpected data is full: later announcements must carry no data
  uint64_t value() const { return uint64_t(turns) << 32 | count; }
  static Taken of(uint64_t value) { return {uint32_t(value), uint32_t(value >> 32)}; }
  void update(const Taken& newer) {
    if (int32_t(newer.count - count) > 0) count = newer.count;
    if (int32_t(newer.turns - turns) > 0) turns = newer.turns;
  }
};

struct Envelope {
  int64_t tag;
  uint64_t bytes;
  uint64_t number;  ///< number of the message in its pair of ranks, from 1
  uint8_t dtype;
  uint8_t carries_data;
  uint8_t reserved[6];
};
static_assert(sizeof(Envelope) == 32);

/// The header at the start of a message, or nothing if it is invalid or of another version.
inline std::optional<MessageHeader> read_header(std::span<const std::byte> bytes) {
  MessageHeader header;
  if (bytes.size() < sizeof header) return std::nullopt;
  std::memcpy(&header, bytes.data(), sizeof header);
  if (header.magic != MessageHeader::kMagic || header.version != MessageHeader::kVersion || header.kind >= Kind::kKinds)
    return std::nullopt;
  return header;
}

/// The value that follows the header, if it is complete.
template <class T>
std::optional<T> read_behind_header(std::span<const std::byte> bytes) {
  T value;
  if (bytes.size() != sizeof(MessageHeader) + sizeof value) return std::nullopt;
  std::memcpy(&value, bytes.data() + sizeof(MessageHeader), sizeof value);
  return value;
}

}  // namespace nvx::net
