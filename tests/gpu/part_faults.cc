// A rank that never comes, and a host that aborts: kernels end with a verdict, no output is half written, and the
// device remains usable.

#include <atomic>
#include <thread>

#include "gpu/parts.h"
#include "gpu/rank_program.h"

namespace nvx::gpu {
namespace {

using kernel::Collective;
using kernel::DeviceAlgorithm;

constexpr uint32_t kRanks = 3, kAbsent = 2;

/// Whether a rank can finish without data from the absent one. The root is rank 0.
bool ends_well(const Case& test_case, uint32_t rank) {
  const Collective c = test_case.spec.collective;
  if (test_case.algorithm == DeviceAlgorithm::kReduceChunks) return false;
  if (c == Collective::kReduce || c == Collective::kGather) return rank != 0;
  return c == Collective::kBroadcast || c == Collective::kScatter;
}

double ms_since(Clock::time_point began) {
  return std::chrono::duration<double, std::milli>(Clock::now() - began).count();
}

/// Empty: the verdicts of ranks 0 and 1 name the absent rank and the expected reason.
std::string judge(const World& world, const Case& test_case, Waited how) {
  for (uint32_t r = 0; r < kAbsent; ++r) {
    const kernel::DeviceVerdict& v = world.control(r).verdict;
    const std::string complaint =
        "rank " + std::to_string(r) + ", " + describe(test_case) + ": " + verdict_of(world.control(r));
    if (ends_well(test_case, r)) {
      if (v.state != 0) return complaint + ", though it waits for nobody";
      continue;
    }
    if (v.state == 0) return complaint + "no verdict";
    const bool names = v.peer == int(kAbsent) || how == Waited::kAlarmed;  // an abort may name a rank before the others
    if (v.cause != kernel::Verdict::Cause::kWait || v.how != how || !names) return complaint;
  }
  return "";
}

/// Empty: a fresh channel on this device still gives correct results.
std::string works_on(World::How how) {
  World fresh({{kRanks, 2, 256, 2048}, 0, 0}, how);
  return fresh.perform(some_cases(kRanks, fresh.shape(), 900));
}

std::vector<Case> acts_to_miss() {
  std::vector<Case> cases;
  for (const auto& [algorithm, collective] : test::kWays)
    cases.push_back({algorithm, test::spec_of(collective, 33, int(kRanks), 0)});
  return cases;
}

constexpr World::How kHows[] = {World::How::kFused, World::How::kStreams};
const char* name(World::How how) { return how == World::How::kFused ? "fused" : "streams"; }

/// Runs one operation without the last rank, and then one on the failed channel, which must write nothing.
std::string miss(World& world, const Case& test_case, uint64_t timeout_ns, Waited how, double* ms,
                 const std::function<void()>& meanwhile) {
  std::vector<RankProgram> programs = world.write({test_case}, timeout_ns);
  const auto began = Clock::now();
  world.launch(programs, kAbsent);
  if (meanwhile) meanwhile();
  if (std::string wrong = world.wait(std::chrono::seconds(20)); !wrong.empty())
    return describe(test_case) + ": " + wrong;
  *ms = ms_since(began);
  if (std::string wrong = judge(world, test_case, how); !wrong.empty()) return wrong;
  for (uint32_t r = 0; r < kAbsent; ++r) {
    if (ends_well(test_case, r)) continue;
    if (std::string wrong = programs[r].untouched(); !wrong.empty()) return wrong;
  }
  if (ends_well(test_case, 0) || ends_well(test_case, 1)) return "";
  const Case next{DeviceAlgorithm::kReducePackets, test::spec_of(Collective::kAllReduce, 29, int(kRanks), 1)};
  programs = world.write({next}, timeout_ns);
  world.launch(programs, kAbsent);
  if (std::string wrong = world.wait(std::chrono::seconds(20)); !wrong.empty()) return describe(next) + ": " + wrong;
  for (uint32_t r = 0; r < kAbsent; ++r) {
    if (std::string wrong = programs[r].untouched(); !wrong.empty()) return "after a failure: " + wrong;
  }
  return "";
}

/// Aborts each operation, and reports how long the last of its kernels went on.
void abort_all(Report& report, World::How how, const kernel::DeviceShape& shape, const std::vector<Case>& cases) {
  double longest = 0;
  for (const Case& test_case : cases) {
    if (ends_well(test_case, 0) || ends_well(test_case, 1)) continue;
    if (!report.has_time()) {
      report.cut_short(describe(test_case));
      continue;
    }
    World world({shape, 0, 0}, how);
    double ms = 0;
    const auto raise = [&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(30));
      for (uint32_t r = 0; r < kAbsent; ++r) std::atomic_ref(world.control(r).abort).store(1);
    };
    // The timeout is zero, so only the abort ends the kernel.
    report.check(std::string(name(how)) + ", " + std::to_string(shape.blocks) + " blocks: " + describe(test_case),
                 miss(world, test_case, 0, Waited::kAlarmed, &ms, raise));
    longest = std::max(longest, ms - 30);
  }
  report.print(Line().add("how", name(how)).add("blocks", shape.blocks).add("longest_ms", longest));
}

}  // namespace

int absent(const PartOptions& options) {
  const auto timeout = uint64_t(std::chrono::nanoseconds(options.patience).count());
  Report report("absent", options.span);
  resident_blocks();  // loads the kernels, so that loading is not timed
  for (const World::How how : kHows) {
    double longest = 0;
    for (const Case& test_case : acts_to_miss()) {
      if (!report.has_time()) {
        report.cut_short(describe(test_case));
        continue;
      }
      World world({{kRanks, 2, 256, 2048}, uint32_t(-2), 0}, how);
      double ms = 0;
      report.check(std::string(name(how)) + ": " + describe(test_case),
                   miss(world, test_case, timeout, Waited::kTimedOut, &ms, {}));
      longest = std::max(longest, ms);
    }
    report.print(
        Line().add("how", name(how)).add("patience_ms", uint64_t(options.patience.count())).add("longest_ms", longest));
    report.check(std::string(name(how)) + ": the verdict comes in time",
                 longest < 2000 ? "" : "it took " + std::to_string(longest) + " ms");
    report.check(std::string(name(how)) + ": the device works on", works_on(how));
  }
  return report.finish();
}

int abort_word(const PartOptions& options) {
  Report report("abort", options.span);
  const kernel::DeviceShape own = product_shape(kRanks);  // loads the kernels, so that loading is not timed
  for (const World::How how : kHows) {
    abort_all(report, how, {kRanks, 2, 256, 2048}, acts_to_miss());
    report.check(std::string(name(how)) + ": the device works on", works_on(how));
  }
  abort_all(report, World::How::kStreams, own,
            {{DeviceAlgorithm::kReducePackets, test::spec_of(Collective::kAllReduce, 1000, int(kRanks), 0)},
             {DeviceAlgorithm::kReduceChunks, test::spec_of(Collective::kAllReduce, 1 << 18, int(kRanks), 0)}});
  return report.finish();
}

}  // namespace nvx::gpu
