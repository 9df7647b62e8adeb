#include "memory/device_check.h"

#include <cstring>
#include <functional>
#include <system_error>
#include <thread>

#include "base/error.h"
#include "memory/apart.h"
#include "memory/device_memory.h"

namespace nvx {
namespace {

uint64_t word_of(uint64_t seed, uint64_t i) {
  uint64_t x = seed + (i + 1) * 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

void write_pattern(std::byte* at, uint64_t seed) {
  for (size_t i = 0; i < kCheckBytes / sizeof(uint64_t); ++i) {
    const uint64_t word = word_of(seed, i);
    std::memcpy(at + i * sizeof word, &word, sizeof word);
  }
}

/// The first byte that differs; kCheckBytes if none does.
size_t first_difference(const std::byte* at, uint64_t seed) {
  for (size_t i = 0; i < kCheckBytes / sizeof(uint64_t); ++i) {
    const uint64_t word = word_of(seed, i);
    if (std::memcmp(at + i * sizeof word, &word, sizeof word) != 0) return i * sizeof word;
  }
  return kCheckBytes;
}

std::string in_time(const Deadline& deadline) {
  return std::to_string(std::chrono::duration_cast<std::chrono::milliseconds>(deadline.end - deadline.start).count()) +
         " ms";
}

/// One check. Throws Error where the driver refuses.
class Errand {
 public:
  Errand(std::shared_ptr<DeviceDriver> driver, const PairCheck& check, const Deadline& deadline)
      : driver_(std::move(driver)), check_(check), deadline_(deadline) {}

  PairVerdict move_data() {
    const int device = check_.device;
    const auto buffer = DeviceRegion::pin(driver_, device, make_host_window(kCheckBytes).get(), kCheckBytes);
    DeviceQueue queue = 0;
    demand(*driver_, driver_->open_queue(device, &queue), "cuStreamCreate", device);
    Undo undo;
    undo.add([driver = driver_, device, queue] { (void)driver->close_queue(device, queue); });
    const auto hung = [&](const char* what) {
      undo.forget();
      buffer->abandon();
      return PairVerdict{PairState::kHung, std::string(what) + " did not end within " + in_time(deadline_)};
    };
    if (check_.from) {
      demand(*driver_, driver_->copy(device, queue, buffer->base(), check_.from, kCheckBytes), "cuMemcpyAsync", device);
      if (!drain(queue)) return hung("reading");
      const size_t at = first_difference(buffer->host(), check_.expect);
      if (at < kCheckBytes) return {PairState::kCorrupt, "what was read differs at byte " + std::to_string(at)};
    }
    if (check_.to) {
      write_pattern(buffer->host(), check_.leave);
      demand(*driver_, driver_->copy(device, queue, check_.to, buffer->base(), kCheckBytes), "cuMemcpyAsync", device);
      if (!drain(queue)) return hung("writing");
    }
    return {};
  }

 private:
  /// False when it has not drained in time.
  bool drain(DeviceQueue queue) {
    for (bool done = false;;) {
      demand(*driver_, driver_->drained(check_.device, queue, &done), "cuStreamQuery", check_.device);
      if (done) return true;
      if (deadline_.passed(Clock::now())) return false;
      std::this_thread::sleep_for(std::chrono::microseconds(20));
    }
  }

  const std::shared_ptr<DeviceDriver> driver_;
  const PairCheck check_;
  const Deadline deadline_;
};

}  // namespace

PairVerdict run_check(const std::shared_ptr<DeviceDriver>& driver, const PairCheck& check, const Deadline& deadline) {
  const std::function<PairVerdict()> work = [driver, check, deadline]() -> PairVerdict {
    try {
      return Errand(driver, check, deadline).move_data();
    } catch (const Error& error) {
      return {PairState::kRefused, error.reason()};
    }
  };
  try {
    if (auto verdict = run_apart(work, deadline)) return *std::move(verdict);
    return {PairState::kHung, "a call of the driver did not return within " + in_time(deadline)};
  } catch (const std::system_error&) {
    return {PairState::kRefused, "the system gives no thread to check with"};
  }
}

}  // namespace nvx
