#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <optional>

namespace nvx::kernel {

/// How a rank writes what other cores are going to read: through its caches, out of which they must fetch it, or past
/// them, into memory.
enum class Way : uint8_t { kCached, kPast };

/// Which way is the faster one for operations of one kind and about one size. That depends on the machine and on how
/// far apart the ranks' cores are, which the scheduler changes, and under a virtual machine the host; either way can
/// cost several times the other one. So both are tried, and what costs more is tried again now and then: the worse it
/// was, the more seldom. Costs are of a rank's own work, waits left out, in any unit.
///
/// A rank's work gets dearer by the way that its peers write. So one rank decides for all, and says so one operation
/// ahead (Channel::tell): in each operation everybody goes the same way.
class WayRecord {
 public:
  Way now() const { return now_; }
  void now(Way way) { now_ = way; }

  Way best() const {
    const double past = cost(Way::kPast);
    return past != 0 && past < kGain * cost(Way::kCached) ? Way::kPast : Way::kCached;
  }

  /// Whether past the caches is better by so much that it must be so for whatever passes between these cores.
  bool far() const { return cost(Way::kPast) != 0 && 2 * cost(Way::kPast) < cost(Way::kCached); }

  /// For the rank that decides: the way of the next operation.
  Way next() {
    const Way best = this->best(), other = best == Way::kPast ? Way::kCached : Way::kPast;
    if (cost(best) == 0) return best;
    if (--until_trial_ > 0) return best;
    const double worse = cost(other) / cost(best);  // 0: its trials have taught nothing yet
    until_trial_ = worse == 0 ? kPeriod / 4 : kPeriod * std::clamp(int(worse), 1, kMostPeriods);
    return other;
  }

  /// What this operation has cost. A better time is believed at once, a worse one by and by: the rank may have been
  /// interrupted.
  void learn(double cost) {
    double& known = costs_[size_t(now_)];
    known = known == 0 || cost < known ? cost : (3 * known + std::min(cost, 2 * known)) / 4;
  }

 private:
  static constexpr int kPeriod = 32;  ///< operations: trials take a thirtieth of the time at most
  static constexpr int kMostPeriods = 16;
  static constexpr double kGain = 0.9;  ///< past the caches only where that saves a tenth

  double cost(Way way) const { return costs_[size_t(way)]; }

  std::array<double, 2> costs_{};  // 0: not tried yet
  int until_trial_ = 0;
  Way now_ = Way::kCached;
};

/// What the rank that decides tells the others.
struct WayNews {
  Way next = Way::kCached;     ///< of the next operation like this one
  Way general = Way::kCached;  ///< Ways::general()
};

/// The records of one lane: one for each kind of operation and each power of two of bytes.
class Ways {
 public:
  static constexpr size_t kKinds = 8;
  static constexpr size_t kLeastBytes = 2 << 10;  ///< below this there is nothing to choose

  WayRecord& record(size_t kind, size_t bytes) {
    const size_t size = size_t(std::bit_width(bytes / kLeastBytes));
    return records_[kind % kKinds][std::min(size, kSizes - 1)];
  }

  /// For what some ranks only write and others only read, so that none sees what it costs: past the caches where large
  /// operations have shown the cores to be far from each other. From any thread.
  Way general() const { return general_.load(std::memory_order_relaxed); }
  void general(Way way) { general_.store(way, std::memory_order_relaxed); }

  static constexpr size_t kLargeBytes = 256 << 10;

  /// For tests: this way and no other.
  void only(Way way) { only_ = way; }
  const std::optional<Way>& only() const { return only_; }

 private:
  static constexpr size_t kSizes = 18;  ///< the last: 128 MiB and more

  std::array<std::array<WayRecord, kSizes>, kKinds> records_;
  std::atomic<Way> general_{Way::kCached};
  std::optional<Way> only_;
};

}  // namespace nvx::kernel
