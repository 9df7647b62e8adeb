#include "memory/device_measure.h"

#include <algorithm>
#include <functional>
#include <limits>

#include "base/error.h"
#include "memory/apart.h"
#include "memory/device_work.h"

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
  const std::shared_ptr<DeviceRegion> target = DeviceRegion::make(driver, to, ShareKind::kPointer, kLarge);
  const std::shared_ptr<DeviceRegion> source = DeviceRegion::make(driver, from, ShareKind::kPointer, kLarge);
  target->open_to(from);
  DeviceWork work(driver, from, {target, source});
  const auto copy = [&](size_t bytes, int times) {
    for (int i = 0; i < times; ++i) work.copy(target->base(), source->base(), bytes);
    return work.drain(deadline, std::chrono::microseconds(0)) && !deadline.passed(Clock::now());
  };
  constexpr int kTimes = 4;
  const double small = copy(kLarge, 1) ? best_of(20, [&] { return copy(kSmall, 1); }) : -1;
  const double large = small < 0 ? -1 : best_of(3, [&] { return copy(kLarge, kTimes); });
  if (large > 0) return {double(kLarge) * kTimes / large / 1e9, small * 1e6, ""};
  return {0, 0, "a copy did not end within " + how_long(deadline)};
}

}  // namespace

PairSpeed measure_pair(const std::shared_ptr<DeviceDriver>& driver, int from, int to, const Deadline& deadline) {
  try {
    return demand_apart<PairSpeed>("a call of the driver", deadline,
                                   [driver, from, to, deadline] { return measure(driver, from, to, deadline); });
  } catch (const Error& error) {
    return {0, 0, error.reason()};
  }
}

}  // namespace nvx
