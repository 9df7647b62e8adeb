#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

namespace nvx::kernel {

/// How a rank writes data that other cores will read: through its caches, or past them into memory.
enum class CachePolicy : uint8_t { kCached, kPast };

/// Measures which policy is faster for operations of one kind and size. The answer depends on the machine and on the
/// distance between the ranks' cores, which the scheduler, and the host of a virtual machine, can change; either policy
/// can be several times slower than the other. So both are tried, and the slower one is tried again from time to time,
/// the less often the slower it was, and when the faster one has become slower. The cost is that of a rank's own work
/// without its waits, in any unit.
///
/// If all ranks write and read, the cost of a rank's work depends on how its peers write. So one rank decides for all
/// and announces its choice one operation ahead (Channel::announce()): in each operation all ranks use the same policy.
/// A rank that only writes decides for itself: between distant cores, its cost is to take the cache lines away from
/// their last readers.
class CachePolicyRecord {
 public:
  CachePolicy now() const { return now_; }
  void now(CachePolicy policy) { now_ = policy; }

  CachePolicy best() const {
    const double past = cost(CachePolicy::kPast);
    return past != 0 && past < kGain * cost(CachePolicy::kCached) ? CachePolicy::kPast : CachePolicy::kCached;
  }

  /// The policy of the next operation. Called by the rank that decides.
  CachePolicy next() {
    const CachePolicy best = this->best(),
                      other = best == CachePolicy::kPast ? CachePolicy::kCached : CachePolicy::kPast;
    if (cost(best) == 0) return best;
    if (lowest_ == 0 || cost(best) < lowest_) lowest_ = cost(best);
    if (cost(best) > kChange * lowest_) until_trial_ = 0, period_ = kFirstPeriod;
    if (--until_trial_ > 0) return best;
    lowest_ = cost(best);
    const double worse = cost(other) / cost(best);  // 0: its trials have not given a cost yet
    until_trial_ = worse == 0 ? kFirstPeriod / 2 : period_ * std::clamp(int(worse), 1, kMostPeriods);
    if (worse != 0) period_ = std::min(2 * period_, kPeriod);
    return other;
  }

  /// Records a cost. A lower one is adopted at once, a higher one gradually: the rank may have been interrupted.
  void add(double cost) {
    double& estimate = costs_[size_t(now_)];
    estimate = estimate == 0 || cost < estimate ? cost : (3 * estimate + std::min(cost, 2 * estimate)) / 4;
  }

  /// add() for a rank that only writes.
  void add_write(double cost) { add(now_ == CachePolicy::kPast ? kReadersShare * cost : cost); }

 private:
  static constexpr int kFirstPeriod = 16, kPeriod = 256;  ///< operations between trials: fewer than 1 % are trials
  static constexpr int kMostPeriods = 16;
  static constexpr double kChange = 1.5;        ///< a cost that has grown so much since the last trial causes one
  static constexpr double kGain = 0.9;          ///< bypassing the caches must save at least a tenth
  static constexpr double kReadersShare = 1.3;  ///< readers from memory take longer, unless their cores are distant

  double cost(CachePolicy policy) const { return costs_[size_t(policy)]; }

  std::array<double, 2> costs_{};  // 0: not tried yet
  double lowest_ = 0;              // of the better policy since the last trial
  int until_trial_ = 0, period_ = kFirstPeriod;
  CachePolicy now_ = CachePolicy::kCached;
};

/// The records of one kind of operation, one per power of two of bytes.
class CachePolicyRecords {
 public:
  static constexpr size_t kLeastBytes = 2 << 10;  ///< below this the policy makes no difference

  CachePolicyRecord& of(size_t bytes) {
    return records_[std::min(size_t(std::bit_width(bytes / kLeastBytes)), kSizes - 1)];
  }

 private:
  static constexpr size_t kSizes = 18;  ///< the last one is for 128 MiB and more

  std::array<CachePolicyRecord, kSizes> records_;
};

/// The records of one lane.
class CachePolicies {
 public:
  /// Kinds are small numbers. The reference is valid until another kind is used for the first time.
  CachePolicyRecord& record(size_t kind, size_t bytes) {
    if (kind >= records_.size()) records_.resize(kind + 1);
    return records_[kind].of(bytes);
  }

  /// For tests: uses this policy only.
  void only(CachePolicy policy) { only_ = policy; }
  const std::optional<CachePolicy>& only() const { return only_; }

 private:
  std::vector<CachePolicyRecords> records_;
  std::optional<CachePolicy> only_;
};

}  // namespace nvx::kernel
