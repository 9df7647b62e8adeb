#include "rules.h"

#include <array>
#include <atomic>

namespace fake {

namespace {

std::array<std::atomic<bool>, size_t(Rule::kRules)> broken_rules{};

}  // namespace

bool is_broken(Rule rule) { return broken_rules[size_t(rule)]; }

void break_rule(Rule rule, bool broken) { broken_rules[size_t(rule)] = broken; }

}  // namespace fake
