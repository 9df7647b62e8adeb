#include "group/plan/alternatives.h"

#include "kernel/cpu/pad.h"

namespace nvx {
namespace {

using kernel::Collective;

std::vector<Way> inside(Collective collective, size_t bytes, const PlanFacts& facts) {
  const Choice choice = plan(collective, bytes, facts);
  const std::vector<kernel::Algorithm> algorithms = host_algorithms_of(collective);
  const bool has_choice = algorithms.size() > 1;
  std::vector<Way> ways;
  for (const kernel::Algorithm algorithm : algorithms) {
    const bool is_small = has_choice && algorithm == algorithms.front();
    Way way{"shared memory", kernel::name(algorithm), choice.why, has_choice ? "NVX_ALGO, NVX_TUNE" : "nothing",
            algorithm == choice.algorithm};
    if (!way.runs) way.why = is_small ? "for shorter messages" : "for longer messages";
    if (is_small && bytes > kernel::kSlotBytes) {
      way.why = "a slot holds " + std::to_string(kernel::kSlotBytes) + " bytes";
      way.set_by = "nothing";
    } else {
      way.estimate = estimate_inside(algorithm, collective, bytes, facts);
    }
    ways.push_back(std::move(way));
  }
  return ways;
}

std::vector<Way> between(Collective collective, size_t bytes, const PlanFacts& facts, const Medium& medium) {
  const schedule::Collective what = across(collective);
  const InterHostPlan inter_host = plan_between(what, bytes, facts);
  std::vector<Way> ways;
  for (const schedule::Row& row : schedule::catalog()) {
    if (row.collective != what) continue;
    Way way{"between hosts", row.name, inter_host.why, "NVX_TUNE", &row == inter_host.row};
    if (!way.runs) way.why = "nvx's table of sizes and hosts names " + std::string(inter_host.row->name);
    way.estimate = estimate_between(row, collective, bytes, facts, medium);
    if (way.estimate.basis.empty()) way.why = "not for so many hosts";
    ways.push_back(std::move(way));
  }
  return ways;
}

}  // namespace

std::vector<Way> ways_of(Collective collective, size_t bytes, const PlanFacts& facts, const Medium& medium) {
  return facts.hosts > 1 ? between(collective, bytes, facts, medium) : inside(collective, bytes, facts);
}

}  // namespace nvx
