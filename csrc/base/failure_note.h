#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "base/failure.h"

namespace nvx {

/// A failure as one rank tells it to the others: in its pad, in a message between hosts, in the store. Fixed layout,
/// little endian; comes from peers, so read() believes nothing of it. Where this rank has met the failure is its own
/// affair, and not told.
struct FailureNote {
  static constexpr uint32_t kMagic = 0x6678766e;  // "nvxf"
  static constexpr uint16_t kVersion = 1;
  static constexpr size_t kMostAwaited = 32;  ///< the first ones; the words, too, name only some of more
  static constexpr size_t kMostText = 856;

  uint32_t magic = kMagic;
  uint16_t version = kVersion;
  uint16_t bytes = 0;  ///< of all this, as far as the text is used
  uint8_t code = 0;    ///< Code
  uint8_t how = 0;     ///< Ending::How
  uint16_t awaited_ranks = 0;
  int32_t who = kNobody;
  int32_t number = 0;  ///< of the Ending
  uint16_t cause_bytes = 0;
  uint16_t before_bytes = 0;
  uint16_t advice_bytes = 0;
  uint16_t reserved[3] = {};
  int32_t awaited[kMostAwaited] = {};
  char text[kMostText] = {};  ///< cause, before, advice, one behind the other

  /// What has no room is cut off; of the advice, all or nothing is told. A cause of which nothing is left is named by
  /// its code.
  static FailureNote of(const Failure& failure);
  /// What is to be sent of it.
  std::span<const std::byte> used() const { return {reinterpret_cast<const std::byte*>(this), bytes}; }
  /// What a rank of a group of so many ranks says, in words that are fit for a message; nothing where it is damaged, or
  /// of another version of nvx. More bytes than the note's may follow.
  static std::optional<Failure> read(std::span<const std::byte> bytes, int ranks);
};
static_assert(sizeof(FailureNote) == 1016 && offsetof(FailureNote, text) == 1016 - FailureNote::kMostText);

/// For what cannot be read of it: that this rank, "rank 3", has told of a failure.
Failure unreadable_note(const std::string& teller);

}  // namespace nvx
