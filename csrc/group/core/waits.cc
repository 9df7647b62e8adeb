#include "group/core/waits.h"

#include <algorithm>

#include "base/config.h"

namespace nvx {
namespace {

/// If ranks outnumber cores, a rank that spins takes the core from the rank for which it waits.
std::chrono::microseconds spin_of(const PlanFacts& facts) {
  constexpr std::chrono::microseconds kDefault{200}, kMost = kWatchInterval;  // a waiter that spins checks for nothing
  if (config().spin_us >= 0) return std::min(std::chrono::microseconds(config().spin_us), kMost);
  return facts.ranks > facts.cores ? std::chrono::microseconds(0) : kDefault;
}

}  // namespace

Waits::Waits(const PlanFacts& facts, std::chrono::milliseconds timeout, Watch& watch)
    : watch_(watch), timeout_ms_((config().timeout.count() > 0 ? config().timeout : timeout).count()) {
  if (const auto spin = spin_of(facts); spin.count() > 0) spin_ = std::make_unique<SpinBudget>(spin);
}

std::chrono::milliseconds Waits::span_of(std::chrono::milliseconds own) const {
  return std::min(own.count() > 0 ? own : timeout(), Deadline::kForever);  // devices count it in nanoseconds
}

WaitRules Waits::rules(std::chrono::milliseconds own, Runner runner) {
  WaitRules rules;
  rules.deadline = Deadline::after(span_of(own));
  if (runner == Runner::kCaller) {
    rules.spin = spin_.get();
    rules.yields = &yields_;
  }
  rules.watch = &watch_;
  return rules;
}

WaitRules Waits::rules_of(const Operation& operation, Runner runner) {
  WaitRules rules = this->rules(operation.timeout, runner);
  if (operation.whole) rules.deadline = operation.whole->deadline;
  return rules;
}

}  // namespace nvx
