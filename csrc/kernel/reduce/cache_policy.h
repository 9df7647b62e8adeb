#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <optional>

namespace nvx::kernel {

/// How a rank writes what other cores are going to read: through its caches, out of which they must fetch it, or past
/// them, into memory.
enum class CachePolicy : uint8_t { kCached, kPast };

/// Which policy is the faster one for operations of one kind and about one size. That depends on the machine and on how
/// far apart the ranks' cores are, which the scheduler changes, and under a virtual machine the host; either policy can
/// cost several times the other one. So both are tried, and the one that costs more is tried again now and then: the
/// worse it was, the more seldom. Costs are those of a rank's own work without its waits, in any unit.
///
/// Where all ranks write and read, what a rank's work costs depends on how its peers write. So one rank decides for
/// all, and says so one operation ahead (Channel::tell): in each operation everybody has the same policy. Who only
/// writes decides by itself: where cores are far apart, what costs is to take the lines away from whoever has read them
/// last.
class CachePolicyRecord {
 public:
  CachePolicy now() const { return now_; }
  void now(CachePolicy policy) { now_ = policy; }

  CachePolicy best() const {
    const double past = cost(CachePolicy::kPast);
    return past != 0 && past < kGain * cost(CachePolicy::kCached) ? CachePolicy::kPast : CachePolicy::kCached;
  }

  /// For the rank that decides: the policy of the next operation.
  CachePolicy next() {
    const CachePolicy best = this->best(),
                      other = best == CachePolicy::kPast ? CachePolicy::kCached : CachePolicy::kPast;
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

  /// The same, of a rank that only writes.
  void learn_of_writing(double cost) { learn(now_ == CachePolicy::kPast ? kReadersShare * cost : cost); }

 private:
  static constexpr int kPeriod = 32;  ///< operations: trials take a thirtieth of the time at most
  static constexpr int kMostPeriods = 16;
  static constexpr double kGain = 0.9;          ///< past the caches only where that saves a tenth
  static constexpr double kReadersShare = 1.3;  ///< readers of what is in memory take longer, unless they are far away

  double cost(CachePolicy policy) const { return costs_[size_t(policy)]; }

  std::array<double, 2> costs_{};  // 0: not tried yet
  int until_trial_ = 0;
  CachePolicy now_ = CachePolicy::kCached;
};

/// The records of one kind of operation, for each power of two of bytes.
class CachePolicyRecords {
 public:
  static constexpr size_t kLeastBytes = 2 << 10;  ///< below this there is nothing to choose

  CachePolicyRecord& of(size_t bytes) {
    return records_[std::min(size_t(std::bit_width(bytes / kLeastBytes)), kSizes - 1)];
  }

 private:
  static constexpr size_t kSizes = 18;  ///< the last: 128 MiB and more

  std::array<CachePolicyRecord, kSizes> records_;
};

/// The records of one lane.
class CachePolicies {
 public:
  static constexpr size_t kKinds = 24;  ///< of operations

  CachePolicyRecord& record(size_t kind, size_t bytes) { return records_[kind].of(bytes); }

  /// For tests: this policy and no other.
  void only(CachePolicy policy) { only_ = policy; }
  const std::optional<CachePolicy>& only() const { return only_; }

 private:
  std::array<CachePolicyRecords, kKinds> records_;
  std::optional<CachePolicy> only_;
};

}  // namespace nvx::kernel
