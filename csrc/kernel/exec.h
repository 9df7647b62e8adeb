#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "base/flag.h"
#include "kernel/level.h"

#if defined(__CUDACC__)
#define NVX_HD __host__ __device__
#else
#define NVX_HD
#endif

namespace nvx::kernel {

/// Why an algorithm returned false.
struct Verdict {
  enum class Cause { kNone, kWait, kMismatch, kBadLease, kCounts };
  Cause cause = Cause::kNone;
  Waited how = Waited::kReached;
  int peer = -1;
  Stamp wanted = 0;
  Stamp seen = 0;
  uint64_t mine = 0;    ///< kCounts: bytes expected here ...
  uint64_t theirs = 0;  ///< ... and offered there
};

/// The verbs of an algorithm, played by one thread of the host: one tile of one lane, bulk work by the level's wide
/// loops.
class CpuExec {
 public:
  CpuExec(size_t width, ReduceFn reduce, const double* factors, const WaitRules& rules)
      : level_(level()), width_(width), reduce_(reduce), factors_(factors), rules_(rules) {}

  int lane() const { return 0; }
  int lanes() const { return 1; }
  int tile() const { return 0; }
  int tiles() const { return 1; }
  void sync() const {}
  bool all(bool mine) const { return mine; }

  /// Bytes of one element.
  size_t width() const { return width_; }

  void signal(Flag& flag, Stamp value) const { nvx::signal(flag, value); }

  /// False when the wait ended without the stamp; the verdict then says why, and the algorithm must return.
  bool wait(Flag& flag, Stamp want, int peer) {
    const Waited how = nvx::wait(flag, want, peer, rules_);
    if (how == Waited::kReached) return true;
    verdict_ = {Verdict::Cause::kWait, how, peer, want, flag.value.load(std::memory_order_relaxed), 0, 0};
    return false;
  }

  void copy(void* dst, const void* src, size_t bytes) const {
    if (bytes != 0 && dst != src) level_.copy(dst, src, bytes);
  }

  /// dst[i] = op over the ranks' srcs, in absolute rank order, rounded once.
  void reduce(void* dst, const void* const* srcs, int ranks, size_t n) const {
    if (n != 0) reduce_(dst, srcs, ranks, n, factors_);
  }

  bool fail(const Verdict& verdict) {
    verdict_ = verdict;
    return false;
  }
  const Verdict& verdict() const { return verdict_; }

  /// Bytes after which alternating between two bulk verbs keeps the data in the nearest cache.
  static constexpr size_t kBlock = 16 << 10;

 private:
  const Level& level_;
  size_t width_;
  ReduceFn reduce_;
  const double* factors_;
  const WaitRules& rules_;
  Verdict verdict_;
};

}  // namespace nvx::kernel
