#include "memory/device_measure.h"

#include <algorithm>
#include <functional>
#include <limits>
#include <system_error>
#include <thread>

#include "base/error.h"
#include "memory/apart.h"
#include "memory/device_memory.h"

namespace nvx {
namespace {

constexpr size_t kLarge = 64 << 20, kSmall = 4096;

/// The best of several rounds, in seconds. Negative when one does not end in time.
double best_of(int rounds, const std::function<bool()>& round) {
  double best = std::numeric_limits<double>::max();
  for (int i = 0; i < rounds; ++i) {
    const auto began = Clock::now();
    if (!round()) return -1;
    best = std::min(best, std::chrono::duration<double>(Clock::now() - began).count());
  }
  return best;
}

PairSpeed measure(const std::shared_ptr<DeviceDriver>& driver, int from, int to, const Deadline& deadline) {
  demand_reach(*driver, from, to);
  const auto target = DeviceRegion::make(driver, to, ShareKind::kPointer, kLarge);
  const auto source = DeviceRegion::make(driver, from, ShareKind::kPointer, kLarge);
  target->open_to(from);
  DeviceQueue queue = 0;
  demand(*driver, driver->open_queue(from, &queue), "cuStreamCreate", from);
  Undo undo;
  undo.add([driver, from, queue] { (void)driver->close_queue(from, queue); });
  const auto copy = [&](size_t bytes, int times) {
    for (int i = 0; i < times; ++i)
      demand(*driver, driver->copy(from, queue, target->base(), source->base(), bytes), "cuMemcpyAsync", from);
    for (bool done = false; !done;) {
      demand(*driver, driver->drained(from, queue, &done), "cuStreamQuery", from);
      if (!done && deadline.passed(Clock::now())) return false;
    }
    return true;
  };
  constexpr int kTimes = 4;
  const double small = copy(kLarge, 1) ? best_of(20, [&] { return copy(kSmall, 1); }) : -1;
  const double large = small < 0 ? -1 : best_of(3, [&] { return copy(kLarge, kTimes); });
  if (large > 0) return {double(kLarge) * kTimes / large / 1e9, small * 1e6, ""};
  undo.forget();
  target->abandon();
  source->abandon();
  return {0, 0, "a copy did not end in time"};
}

}  // namespace

PairSpeed measure_pair(const std::shared_ptr<DeviceDriver>& driver, int from, int to, const Deadline& deadline) {
  const std::function<PairSpeed()> work = [driver, from, to, deadline]() -> PairSpeed {
    try {
      return measure(driver, from, to, deadline);
    } catch (const Error& error) {
      return {0, 0, error.reason()};
    }
  };
  try {
    if (auto speed = run_apart(work, deadline)) return *std::move(speed);
    return {0, 0, "a call of the driver did not return in time"};
  } catch (const std::system_error&) {
    return {0, 0, "the system gives no thread to measure with"};
  }
}

}  // namespace nvx
