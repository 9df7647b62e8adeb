// Failure notes from pads, messages and the store: any input is refused, or is a failure of that group with printable
// text.

#include <cstdint>
#include <cstdlib>
#include <span>

#include "base/failure_note.h"
#include "base/text.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const int ranks = 1 + data[0] % 8;
  const bool lays_over = data[0] & 0x80;
  std::span<const std::byte> bytes = std::as_bytes(std::span(data + 1, size - 1));
  // A valid note, overlaid with the input, so that the checks behind the magic number are reached.
  nvx::FailureNote note = nvx::FailureNote::of({.code = nvx::Code::kTimeout,
                                                .cause = "late",
                                                .advice = "wait",
                                                .before = "dead",
                                                .lost_rank = 0,
                                                .awaited = {0}});
  auto* const laid = reinterpret_cast<std::byte*>(&note);
  if (lays_over) {
    for (size_t i = 0; i + 2 < bytes.size(); i += 3)
      laid[(size_t(bytes[i]) << 8 | size_t(bytes[i + 1])) % sizeof note] ^= bytes[i + 2];
    bytes = {laid, sizeof note};
  }
  const auto read = nvx::FailureNote::read(bytes, ranks);
  if (!read) return 0;
  const auto in_group = [&](int rank) { return rank >= 0 && rank < ranks; };
  if (read->lost_rank != nvx::kNoRank && !in_group(read->lost_rank)) std::abort();
  for (const int rank : read->awaited) {
    if (!in_group(rank)) std::abort();
  }
  for (const std::string& text : {read->cause, read->before, read->advice}) {
    if (text.size() > nvx::FailureNote::kMostText || nvx::printable(text) != text) std::abort();
  }
  if (read->cause.empty() || !read->reported || !read->context.empty()) std::abort();
  // A decoded failure can be sent on.
  const nvx::FailureNote again = nvx::FailureNote::of(*read);
  const auto twice = nvx::FailureNote::read(again.used(), ranks);
  if (!twice || twice->cause != read->cause || twice->lost_rank != read->lost_rank || twice->awaited != read->awaited)
    std::abort();
  return 0;
}
