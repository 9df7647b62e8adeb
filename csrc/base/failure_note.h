#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "base/failure.h"

namespace nvx {

/// The layout in which one rank reports a failure to the others: in its pad, in a message between hosts, in the store.
/// The layout is fixed and little endian. A note comes from a peer, so read() checks every field. `Failure::context`
/// concerns the reporting rank alone and is not part of a note.
struct FailureNote {
  static constexpr uint32_t kMagic = 0x6678766e;  // "nvxf"
  static constexpr uint16_t kVersion = 1;
  static constexpr size_t kMostAwaited = 32;  ///< a longer list is truncated
  static constexpr size_t kMostText = 856;

  uint32_t magic = kMagic;
  uint16_t version = kVersion;
  uint16_t bytes = 0;  ///< the size of the note, up to the end of its text
  uint8_t code = 0;    ///< a Code
  uint8_t how = 0;     ///< an ExitStatus::How
  uint16_t awaited_ranks = 0;
  int32_t lost_rank = kNoRank;
  int32_t number = 0;  ///< ExitStatus::number
  uint16_t cause_bytes = 0;
  uint16_t before_bytes = 0;
  uint16_t advice_bytes = 0;
  uint16_t reserved[3] = {};
  int32_t awaited[kMostAwaited] = {};
  char text[kMostText] = {};  ///< cause, before, advice, without separators

  /// Truncates the cause and `before` to fit, and drops an advice that does not. Code names replace empty causes.
  static FailureNote of(const Failure& failure);
  /// The bytes to send.
  std::span<const std::byte> used() const { return {reinterpret_cast<const std::byte*>(this), bytes}; }
  /// Decodes a note from a rank of a group of `ranks` ranks. The texts are made printable. Returns nothing if the note
  /// is damaged or comes from another version of nvx. Bytes after the note are ignored.
  static std::optional<Failure> read(std::span<const std::byte> bytes, int ranks);
};
static_assert(sizeof(FailureNote) == 1016 && offsetof(FailureNote, text) == 1016 - FailureNote::kMostText);

/// The failure to report when the note of `writer` ("rank 3") cannot be decoded.
Failure unreadable_note(const std::string& writer);

}  // namespace nvx
