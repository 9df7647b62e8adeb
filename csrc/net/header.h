#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <span>

namespace nvx::net {

enum class Kind : uint8_t {
  kFirst,   ///< the first segment of a schedule's message; a First follows the header
  kNext,    ///< a later segment of it
  kCredit,  ///< of what the receiver of this had sent, `value` bytes have been taken in
  kPoison,  ///< the sender's group has failed; the body is a FailureNote
  kPing,    ///< of a process, not of a group: are you there?
  kPong,    ///< yes; `value` 1: and its group stands, 0: it does not, 2: the asker has been given up, the body says why
  kMail,    ///< a send's announcement; a MailHead follows the header, and a small message is in the body
  kTaken,   ///< announcements have been read, `value` is a Taken
  kGrant,   ///< the large message of this number may be sent
  kSegment,     ///< a segment of a large message
  kLabel,       ///< what the sender called as its operation `op`, a Label behind it; `value` 1: and here?
  kMonitorIn,   ///< has come to the monitored barrier of number `value`
  kMonitorOut,  ///< all have come to it
  kTrouble,     ///< another group of the sender's process has failed; the body is a FailureNote
  kKinds        ///< how many there are
};

/// Before every message between hosts. Fixed layout, little endian; comes from peers, so every field is checked against
/// what this side knows before it is used.
struct MessageHeader {
  static constexpr uint8_t kMagic = 0x6e;
  static constexpr uint8_t kWire = 5;  ///< moves when a layout in this file, or in failure_note.h, does

  uint8_t magic = kMagic;
  uint8_t messenger = kWire;
  Kind kind = Kind::kPing;
  uint8_t reserved = 0;
  uint32_t from = 0;   ///< rank in the group
  uint32_t to = 0;     ///< rank in the group
  uint32_t op = 0;     ///< which of the group's operations over the wire
  uint64_t group = 0;  ///< its nonce
  union {
    struct {
      uint16_t run;      ///< which of the operation's schedules
      uint16_t message;  ///< the how-manieth of this pair of ranks in the run
      uint32_t segment;  ///< the how-manieth of the message
    };
    uint64_t value;  ///< credits, grants, numbers
  };

  MessageHeader() : value(0) {}
};
static_assert(sizeof(MessageHeader) == 32);

/// What a rank is calling, in the form in which ranks compare it.
using Label = std::array<std::byte, 32>;

struct First {
  Label label;
  uint64_t bytes;  ///< of the whole message
};
static_assert(sizeof(First) == 40);

/// The value of a kTaken, which tells the whole state each time: letters may overtake each other, and then the one that
/// has counted further holds. Both count modulo 2^32.
struct Taken {
  uint32_t count = 0;  ///< announcements that have been read
  uint32_t turns = 0;  ///< how often the reader has changed its mind about data that comes unasked

  bool full() const { return turns % 2 != 0; }  ///< what came is enough: later announcements carry no data
  uint64_t value() const { return uint64_t(turns) << 32 | count; }
  static Taken of(uint64_t value) { return {uint32_t(value), uint32_t(value >> 32)}; }
  /// Updates what is known when another one has come.
  void learn(const Taken& news) {
    if (int32_t(news.count - count) > 0) count = news.count;
    if (int32_t(news.turns - turns) > 0) turns = news.turns;
  }
};

struct MailHead {
  int64_t tag;
  uint64_t bytes;
  uint64_t number;  ///< of the message in its pair, from 1
  uint8_t dtype;
  uint8_t carries_data;
  uint8_t reserved[6];
};
static_assert(sizeof(MailHead) == 32);

/// The header at the beginning of what has come; nothing if it is no header of this version.
inline std::optional<MessageHeader> read_header(std::span<const std::byte> bytes) {
  MessageHeader header;
  if (bytes.size() < sizeof header) return std::nullopt;
  std::memcpy(&header, bytes.data(), sizeof header);
  if (header.magic != MessageHeader::kMagic || header.messenger != MessageHeader::kWire || header.kind >= Kind::kKinds)
    return std::nullopt;
  return header;
}

/// What follows the header, if all of it is there.
template <class T>
std::optional<T> read_behind_header(std::span<const std::byte> bytes) {
  T value;
  if (bytes.size() != sizeof(MessageHeader) + sizeof value) return std::nullopt;
  std::memcpy(&value, bytes.data() + sizeof(MessageHeader), sizeof value);
  return value;
}

}  // namespace nvx::net
