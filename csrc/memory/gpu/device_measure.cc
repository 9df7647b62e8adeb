#include "memory/gpu/device_measure.h"

#include <algorithm>
#include <functional>
#include <limits>

#include "base/error.h"
#include "memory/driver/thread_call.h"
#include "memory/gpu/device_work.h"

namespace nvx {
namespace {

constexpr size_t kSmall = 4096;

/// The time of the best of several rounds, in seconds, or a negative number if one does not end in time.
double best_of(int rounds, const std::function<bool()>& round) {
  double best = std::numeric_limits<double>::max();
  for (int i = 0; i < rounds; ++i) {
    const auto began = Clock::now();
    if (!round()) return -1;
    best = std::min(best, std::chrono::duration<double>(Clock::now() - began).count());
  }
  return best;
}

PairSpeed measure(const std::shared_ptr<DeviceDriver>& driver, int from, int to, const Deadline& deadline,
                  size_t large) {
  check_peer_access(*driver, from, to);
  const std::shared_ptr<DeviceRegion> target = DeviceRegion::make(driver, to, ShareKind::kPointer, large);
  const std::shared_ptr<DeviceRegion> source = DeviceRegion::make(driver, from, ShareKind::kPointer, large);
  target->allow_access(from);
  DeviceWork work(driver, from, {target, source});
  const auto copy = [&](DevicePtr into, size_t bytes, int times) {
    for (int i = 0; i < times; ++i) work.copy(into, source->base(), bytes);
    return work.drain(deadline, std::chrono::microseconds(0)) && !deadline.passed(Clock::now());
  };
  constexpr int kTimes = 4, kRounds = 20;
  const DevicePtr there = target->base(), here = source->base() + kSmall;
  const double latency = copy(there, large, 1) ? best_of(kRounds, [&] { return copy(there, kSmall, 1); }) : -1;
  const double own = latency < 0 ? -1 : best_of(kRounds, [&] { return copy(here, kSmall, 1); });
  const double span = own < 0 ? -1 : best_of(3, [&] { return copy(there, large, kTimes); });
  if (span > 0) return {double(large) * kTimes / span / 1e9, latency * 1e6, own * 1e6, ""};
  return {0, 0, 0, "a copy did not end within " + how_long(deadline)};
}

}  // namespace

PairSpeed measure_pair(const std::shared_ptr<DeviceDriver>& driver, int from, int to, const Deadline& deadline,
                       size_t large) {
  try {
    return call_or_throw<PairSpeed>("a driver call", deadline, [driver, from, to, deadline, large] {
      return measure(driver, from, to, deadline, large);
    });
  } catch (const Error& error) {
    return {0, 0, 0, error.reason()};
  }
}

}  // namespace nvx
