#include "memory/gpu/device_check.h"

#include <cstring>
#include <string>
#include <utility>

#include "base/hash.h"
#include "base/words.h"

namespace nvx {
namespace {

uint64_t word_of(uint64_t seed, uint64_t i) { return Hash().add(seed + i * 0x9e3779b97f4a7c15).value(); }

void write_pattern(std::byte* at, uint64_t seed) {
  for (size_t i = 0; i < kCheckBytes / sizeof(uint64_t); ++i) {
    const uint64_t word = word_of(seed, i);
    std::memcpy(at + i * sizeof word, &word, sizeof word);
  }
}

/// The offset of the first byte that differs, or kCheckBytes if none does.
size_t first_difference(const std::byte* at, uint64_t seed) {
  for (size_t i = 0; i < kCheckBytes / sizeof(uint64_t); ++i) {
    const uint64_t word = word_of(seed, i);
    if (std::memcmp(at + i * sizeof word, &word, sizeof word) != 0) return i * sizeof word;
  }
  return kCheckBytes;
}

PairVerdict move_data(const std::shared_ptr<DeviceDriver>& driver, const PairCheck& check, const Deadline& deadline) {
  const std::shared_ptr<DeviceRegion> buffer =
      DeviceRegion::pin(driver, check.device, make_host_fallback(kCheckBytes).get(), kCheckBytes);
  std::vector<std::shared_ptr<DeviceRegion>> touches = check.holds;
  touches.push_back(buffer);
  DeviceWork work(driver, check.device, std::move(touches));
  const auto hung = [&](const char* what) {
    return PairVerdict{PairState::kHung, std::string(what) + " did not end within " + how_long(deadline)};
  };
  return work.carry_out([&]() -> PairVerdict {
    if (check.from) {
      work.copy(buffer->base(), check.from, kCheckBytes);
      if (!work.drain(deadline)) return hung("reading");
      const size_t at = first_difference(buffer->host(), check.expect);
      if (at < kCheckBytes) return {PairState::kCorrupt, "the data read differs at byte " + std::to_string(at)};
    }
    if (check.to) {
      // By the deadline the other ranks have decided, so nothing may be written to memory that they expect at rest.
      if (deadline.passed(Clock::now())) return hung("reading");
      write_pattern(buffer->host(), check.leave);
      work.copy(check.to, buffer->base(), kCheckBytes);
      if (!work.drain(deadline)) return hung("writing");
    }
    return {};
  });
}

}  // namespace

PairVerdict run_check(const std::shared_ptr<DeviceDriver>& driver, const PairCheck& check, const Deadline& deadline) {
  return run_work([driver, check, deadline] { return move_data(driver, check, deadline); }, deadline);
}

}  // namespace nvx
