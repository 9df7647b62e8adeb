#include "base/failure_note.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/text.h"

namespace nvx {
namespace {

constexpr size_t kFixed = offsetof(FailureNote, text);

/// The length of the longest prefix that fits into `room` bytes and does not split a UTF-8 character.
size_t fits(const std::string& text, size_t room) {
  if (text.size() <= room) return text.size();
  while (room > 0 && (static_cast<unsigned char>(text[room]) & 0xc0) == 0x80) --room;
  return room;
}

bool names_rank(int32_t rank, int ranks) { return rank >= 0 && rank < ranks; }

/// Whether the fields of the note are consistent with each other and with the `received` bytes that arrived.
bool consistent(const FailureNote& note, size_t received, int ranks) {
  const size_t text = size_t(note.cause_bytes) + note.before_bytes + note.advice_bytes;
  return note.magic == FailureNote::kMagic && note.version == FailureNote::kVersion && note.bytes <= received &&
         note.bytes == kFixed + text && text <= FailureNote::kMostText && note.cause_bytes > 0 && note.code < kCodes &&
         note.how < ExitStatus::kHows && note.awaited_ranks <= FailureNote::kMostAwaited &&
         (note.lost_rank == kNoRank || names_rank(note.lost_rank, ranks)) &&
         std::all_of(note.awaited, note.awaited + note.awaited_ranks, [&](int32_t r) { return names_rank(r, ranks); });
}

}  // namespace

FailureNote FailureNote::of(const Failure& failure) {
  FailureNote note;
  size_t used = 0;
  const auto put = [&](const std::string& text, size_t bytes) {
    std::memcpy(note.text + used, text.data(), bytes);
    used += bytes;
    return uint16_t(bytes);
  };
  note.code = uint8_t(failure.code);
  note.how = uint8_t(failure.exit_status.how);
  note.number = failure.exit_status.number;
  note.lost_rank = failure.lost_rank;
  note.awaited_ranks = uint16_t(std::min(failure.awaited.size(), kMostAwaited));
  std::copy_n(failure.awaited.begin(), note.awaited_ranks, note.awaited);
  const std::string cause = fits(failure.cause, kMostText) > 0 ? failure.cause : name(failure.code);
  note.cause_bytes = put(cause, fits(cause, kMostText));
  const size_t rest = note.cause_bytes == cause.size() ? kMostText - used : 0;  // nothing follows a truncated text
  note.before_bytes = put(failure.before, fits(failure.before, rest));
  if (failure.advice.size() <= rest - note.before_bytes) note.advice_bytes = put(failure.advice, failure.advice.size());
  note.bytes = uint16_t(kFixed + used);
  return note;
}

std::optional<Failure> FailureNote::read(std::span<const std::byte> bytes, int ranks) {
  FailureNote note;
  if (bytes.size() < kFixed) return std::nullopt;
  // One copy: the peer may change the memory meanwhile.
  std::memcpy(static_cast<void*>(&note), bytes.data(), std::min(bytes.size(), sizeof note));
  if (!consistent(note, bytes.size(), ranks)) return std::nullopt;
  const char* at = note.text;
  const auto next = [&](size_t length) { return printable(std::string(std::exchange(at, at + length), length)); };
  Failure failure{.code = Code(note.code), .cause = next(note.cause_bytes), .reported = true};
  failure.before = next(note.before_bytes);
  failure.advice = next(note.advice_bytes);
  failure.lost_rank = note.lost_rank;
  failure.exit_status = {ExitStatus::How(note.how), note.number};
  failure.awaited.assign(note.awaited, note.awaited + note.awaited_ranks);
  return failure;
}

Failure unreadable_note(const std::string& writer) {
  return {.code = Code::kPeerFailed,
          .cause = "the failure note of " + writer + " is damaged or from another version of nvx",
          .reported = true};
}

}  // namespace nvx
