#pragma once

#include <atomic>
#include <chrono>
#include <memory>

#include "base/flag.h"
#include "group/core/thread_pool.h"
#include "group/plan/operation.h"
#include "group/plan/plan.h"

namespace nvx {

/// How long the operations of a group wait, and whether they spin. Any thread may call it.
class Waits {
 public:
  /// `timeout`: for operations without their own, unless `NVX_TIMEOUT_S` is set; 0: none. `watch`: ends waits early.
  Waits(const PlanFacts& facts, std::chrono::milliseconds timeout, Watch& watch);

  void set_timeout(std::chrono::milliseconds timeout) { timeout_ms_.store(timeout.count(), std::memory_order_relaxed); }
  std::chrono::milliseconds timeout() const {
    return std::chrono::milliseconds(timeout_ms_.load(std::memory_order_relaxed));
  }
  /// How long an operation with this timeout of its own (0: none) may wait. 0: without limit.
  std::chrono::milliseconds span_of(std::chrono::milliseconds own) const;
  WaitRules rules(std::chrono::milliseconds own, Runner runner);
  WaitRules rules_of(const Operation& operation, Runner runner);

 private:
  Watch& watch_;
  std::atomic<int64_t> timeout_ms_;
  YieldPolicy yields_;
  std::unique_ptr<SpinBudget> spin_;  // null: never spin
};

}  // namespace nvx
