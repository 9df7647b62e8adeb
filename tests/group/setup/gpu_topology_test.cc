// The GPU topology derived from NVML: the path between two GPUs, its expected bandwidth, and warnings.

#include "group/setup/gpu_topology.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <future>

#include "base/error.h"
#include "support/fake_driver.h"
#include "support/fake_nvml.h"

namespace nvx::test {
namespace {

using std::chrono::milliseconds;

std::vector<std::string> names(const GpuTopology& topology) {
  std::vector<std::string> all;
  for (const GpuWarning& warning : topology.warnings) all.push_back(warning.name);
  return all;
}

/// The pair of two GPUs, a < b.
const GpuPair& between(const GpuTopology& topology, int a, int b) {
  const auto same = [&](const GpuPair& pair) { return pair.a == a && pair.b == b; };
  return *std::find_if(topology.pairs.begin(), topology.pairs.end(), same);
}

TEST(GpuTopology, ASwitchThatAVmDoesNotShowIsOne) {
  FakeNvml nvml;
  for (int i = 0; i < 2; ++i) {
    for (NvLinkLane& lane : nvml.add("Fake H100", 18, 18).lanes) lane.to_switch = false, lane.bus = "ffff:ff:ff.f";
  }
  const GpuTopology topology = query_gpus(nvml);
  ASSERT_EQ(topology.pairs.size(), 1u);
  EXPECT_EQ(topology.pairs[0].label(), "NV18");
  EXPECT_TRUE(topology.pairs[0].through_switch);
  EXPECT_TRUE(joined_by_nvlink(topology.gpus[0], topology.gpus[1]));
}

TEST(GpuTopology, ASwitchJoinsAllPairsAlike) {
  FakeNvml nvml;
  for (int gpu = 0; gpu < 8; ++gpu) nvml.add("H100", 18, 18);
  const GpuTopology topology = query_gpus(nvml);
  ASSERT_EQ(topology.pairs.size(), 28u);
  for (const GpuPair& pair : topology.pairs) {
    EXPECT_EQ(pair.label(), "NV18");
    EXPECT_TRUE(pair.through_switch);
    EXPECT_EQ(pair.expected_gb_s, 450);
    EXPECT_EQ(pair.transport, "GPU memory over NVLink");
    EXPECT_EQ(pair.why_not_better, "");
  }
  EXPECT_EQ(names(topology), std::vector<std::string>());
}

/// Two NVLink-bridged pairs on two sockets.
TEST(GpuTopology, BridgesJoinSomeAndPcieTheRest) {
  FakeNvml nvml;
  for (int gpu = 0; gpu < 4; ++gpu) nvml.add("A100");
  nvml.bridge(0, 1, 12);
  nvml.bridge(2, 3, 12);
  nvml.paths[{0, 1}] = GpuPath::kPix;
  nvml.paths[{0, 2}] = GpuPath::kPxb;
  nvml.paths[{0, 3}] = GpuPath::kPhb;
  nvml.paths[{1, 2}] = GpuPath::kSys;
  nvml.refused[{1, 2}] = "the chipset does not support peer access";
  const GpuTopology topology = query_gpus(nvml);
  const struct {
    int a, b;
    const char *label, *transport, *why;
    double expected;
  } kTable[] = {
      {0, 1, "NV12", "GPU memory over NVLink", "", 300},
      {0, 2, "PXB", "GPU memory over PCIe", "no NVLink is up between them", 63.008},
      {0, 3, "PHB", "GPU memory over PCIe", "no NVLink is up between them", 63.008},
      {1, 2, "SYS", "pinned host memory", "no GPU memory over PCIe: the chipset does not support peer access", 63.008},
      {1, 3, "NODE", "GPU memory over PCIe", "no NVLink is up between them", 63.008},
      {2, 3, "NV12", "GPU memory over NVLink", "", 300},
  };
  for (const auto& row : kTable) {
    const GpuPair& pair = between(topology, row.a, row.b);
    EXPECT_EQ(pair.label(), row.label);
    EXPECT_EQ(pair.transport, row.transport) << row.a << row.b;
    EXPECT_EQ(pair.why_not_better, row.why);
    EXPECT_NEAR(pair.expected_gb_s, row.expected, 1e-6);
  }
  EXPECT_EQ(names(topology), std::vector<std::string>());
}

TEST(GpuTopology, HalfOfTheExpectedRateIsAWarning) {
  FakeNvml nvml;
  for (int gpu = 0; gpu < 4; ++gpu) nvml.add("H100", 18, 18);
  nvml.add("H100", 9, 18);
  nvml.add("H100", 17, 18).pcie_now.width = 8;
  const GpuTopology topology = query_gpus(nvml);
  ASSERT_GE(topology.warnings.size(), 3u);
  EXPECT_EQ(topology.warnings[0].name, "nvlink-half");
  EXPECT_EQ(topology.warnings[0].text, "GPU 4 (H100) has 9 of 18 NVLinks up, another GPU of this model 18");
  EXPECT_EQ(topology.warnings[0].command, "nvidia-smi nvlink -s -i 4");
  EXPECT_EQ(topology.warnings[1].name, "nvlink-lanes-down");
  EXPECT_EQ(topology.warnings[2].name, "nvlink-pair-half");
  EXPECT_EQ(topology.warnings[2].text, "GPU 0 and GPU 4 are joined by 9 NVLinks, other pairs here by 18");
  EXPECT_EQ(topology.warnings.back().name, "pcie-width-half");
  EXPECT_EQ(topology.warnings.back().text, "GPU 5 (H100) has a PCIe link of x8 instead of x16");
}

TEST(GpuTopology, LanesThatTrainedAtHalfTheirRateAreNamed) {
  FakeNvml nvml;
  for (int gpu = 0; gpu < 2; ++gpu) nvml.add("H100", 18, 18);
  for (NvLinkLane& lane : nvml.all[0].lanes) lane.gb_s = 26.562;
  nvml.all[0].lane_gb_s = 26.562;
  for (const size_t slow : {2u, 17u}) nvml.all[0].lanes[slow].gb_s = 13.281;
  nvml.all[0].lanes[17].number = 20;                              // a board may lack some numbers in between
  for (NvLinkLane& lane : nvml.all[1].lanes) lane.gb_s = 13.281;  // no other lane of the GPU shows the expected speed
  const GpuTopology topology = query_gpus(nvml);
  ASSERT_EQ(names(topology), (std::vector<std::string>{"nvlink-rate-half", "nvlink-rate-half"}));
  EXPECT_EQ(topology.warnings[0].text, "GPU 0 (H100) has NVLinks at 13 GB/s instead of 27 GB/s: 2, 20");
  EXPECT_EQ(topology.warnings[0].command, "nvidia-smi nvlink -s -i 0");
  EXPECT_EQ(topology.warnings[1].text.find("GPU 1 (H100) has NVLinks at 13 GB/s instead of 25 GB/s: 0"), 0u);
  EXPECT_EQ(between(topology, 0, 1).expected_gb_s, 18 * 25) << "what it should give, not what it does";
}

TEST(GpuTopology, ExpectedLaneRateFollowsTheGpu) {
  const struct {
    int major, minor;
    double gb_s;
  } kTable[] = {{6, 0, 20}, {7, 0, 25}, {8, 0, 25}, {8, 6, 14.0625}, {9, 0, 25}, {10, 3, 50}, {12, 0, 0}, {0, 0, 0}};
  for (const auto& row : kTable) EXPECT_EQ(nvlink_lane_gb_s(row.major, row.minor), row.gb_s) << row.major;
}

/// An idle GPU lowers its PCIe generation, and a board for bridges without one has no lane up: neither is a warning.
TEST(GpuTopology, NormalLinksRaiseNoWarning) {
  FakeNvml nvml;
  nvml.add("A100", 0, 12);
  nvml.add("A100", 0, 12);
  EXPECT_EQ(names(query_gpus(nvml)), std::vector<std::string>());
}

TEST(GpuTopology, MeasuredPairsAreComparedWithTheExpectedRate) {
  FakeNvml nvml;
  nvml.add("H100", 18, 18).lane_gb_s = 1e6;
  nvml.add("H100", 18, 18).lane_gb_s = 1e6;
  nvml.add("H100", 18, 18).lane_gb_s = 1e6;
  GpuTopology topology = query_gpus(nvml);
  const auto driver = std::make_shared<FakeDriver>(2);  // the third GPU is hidden from CUDA
  measure_pairs(topology, driver, Deadline::after(milliseconds(60'000)), milliseconds(60'000));
  EXPECT_GT(between(topology, 0, 1).measured.gb_s, 0);
  EXPECT_GT(between(topology, 0, 1).measured.us, 0);
  EXPECT_EQ(between(topology, 0, 2).measured.why_not, "CUDA_VISIBLE_DEVICES hides one of them");
  EXPECT_GT(between(topology, 0, 1).measured_back.gb_s, 0);
  EXPECT_GT(between(topology, 0, 1).measured_back.us, 0);
  ASSERT_EQ(names(topology), (std::vector<std::string>{"bandwidth-half", "bandwidth-half"}));
  EXPECT_EQ(topology.warnings[0].text.find("GPU 0 writes to GPU 1 at "), 0u);
  EXPECT_EQ(topology.warnings[1].text.find("GPU 1 writes to GPU 0 at "), 0u);
  EXPECT_NE(topology.warnings[0].text.find("instead of 18000000"), std::string::npos) << topology.warnings[0].text;
  EXPECT_EQ(topology.warnings[0].command, "nvidia-smi nvlink -s");
  EXPECT_EQ(driver->unreleased(), "");
}

TEST(GpuTopology, ASlowLinkIsComparedWithACopyWithinTheGpu) {
  FakeNvml nvml;
  for (int gpu = 0; gpu < 3; ++gpu) nvml.add("L40").pcie_most = {1, 1};  // an idle host copies faster
  nvml.paths[{0, 1}] = GpuPath::kSys;
  GpuTopology topology = query_gpus(nvml);
  EXPECT_EQ(between(topology, 0, 1).expected_us, 0) << "nobody has measured";
  const auto driver = std::make_shared<FakeDriver>(3);
  driver->pair(0, 1, FakeDriver::PeerAccess::kSlow);
  driver->pair(2, 1, FakeDriver::PeerAccess::kSlow);
  measure_pairs(topology, driver, Deadline::after(milliseconds(60'000)), milliseconds(60'000), size_t(4) << 20);
  for (const GpuPair& pair : topology.pairs) EXPECT_EQ(pair.expected_us, pair.measured.own_us + remote_write_us(pair));
  std::erase_if(topology.warnings, [](const GpuWarning& w) { return w.name == "bandwidth-half"; });  // on a busy host
  ASSERT_EQ(names(topology), (std::vector<std::string>{"latency-high", "latency-high"}));
  EXPECT_EQ(topology.warnings[1].text.find("a small write from GPU 2 to GPU 1 takes 3"), 0u)
      << topology.warnings[1].text;
  const GpuWarning& warning = topology.warnings[0];
  EXPECT_EQ(warning.text.find("a small write from GPU 0 to GPU 1 takes 3"), 0u) << warning.text;
  EXPECT_NE(warning.text.find(" us over SYS; within GPU 0 it takes "), std::string::npos) << warning.text;
  EXPECT_EQ(warning.command, "nvidia-smi topo -m");
}

TEST(GpuTopology, LongerPathsMayTakeLonger) {
  GpuPair pair;
  double last = 0;
  for (const GpuPath path : {GpuPath::kPix, GpuPath::kPxb, GpuPath::kPhb, GpuPath::kNode, GpuPath::kSys}) {
    pair.path = path;
    EXPECT_GT(remote_write_us(pair), last) << name(path);
    last = remote_write_us(pair);
  }
  pair.lanes = 4;
  EXPECT_EQ(remote_write_us(pair), 1);
  pair.through_switch = true;
  EXPECT_EQ(remote_write_us(pair), 1.5);
}

/// A pair that hangs costs its own timeout, and at most the total for all pairs.
TEST(GpuTopology, APairThatHangsIsNamedAndTheOthersAreMeasured) {
  FakeNvml nvml;
  for (int gpu = 0; gpu < 3; ++gpu) nvml.add("H100", 18, 18);
  GpuTopology topology = query_gpus(nvml);
  const auto driver = std::make_shared<FakeDriver>(3);
  driver->pair(0, 1, FakeDriver::PeerAccess::kHangs);
  const size_t quickly_copied = size_t(1) << 20;  // a size that the host copies fast under any sanitizer
  measure_pairs(topology, driver, Deadline::after(milliseconds(60'000)), milliseconds(4000), quickly_copied);
  EXPECT_EQ(between(topology, 0, 1).measured.why_not, "GPU 0 to GPU 1: a copy did not end within 4000 ms");
  EXPECT_EQ(between(topology, 0, 1).measured_back.why_not, between(topology, 0, 1).measured.why_not);
  EXPECT_GT(between(topology, 0, 2).measured.gb_s, 0) << between(topology, 0, 2).measured.why_not;
  EXPECT_GT(between(topology, 1, 2).measured.gb_s, 0) << between(topology, 1, 2).measured.why_not;
}

TEST(GpuTopology, TheTimeToMeasureAllPairsIsBounded) {
  FakeNvml nvml;
  for (int gpu = 0; gpu < 4; ++gpu) nvml.add("H100", 18, 18);
  GpuTopology topology = query_gpus(nvml);
  const auto driver = std::make_shared<FakeDriver>(4);
  driver->block("can_reach");
  const auto began = Clock::now();
  measure_pairs(topology, driver, Deadline::after(milliseconds(1000)), milliseconds(600));
  EXPECT_LT(Clock::now() - began, std::chrono::seconds(20));
  EXPECT_EQ(between(topology, 0, 1).measured.why_not, "GPU 0 to GPU 1: a driver call did not return within 600 ms");
  EXPECT_EQ(between(topology, 2, 3).measured.why_not, "not measured, the other pairs used up the time of 1000 ms");
  driver->unblock();
}

TEST(GpuTopology, ADriverThatDoesNotAnswerMeasuresNothing) {
  FakeNvml nvml;
  for (int gpu = 0; gpu < 2; ++gpu) nvml.add("H100", 18, 18);
  GpuTopology topology = query_gpus(nvml);
  const auto driver = std::make_shared<FakeDriver>(2);
  driver->block("count");
  measure_pairs(topology, driver, Deadline::after(milliseconds(60'000)), milliseconds(50));
  EXPECT_EQ(between(topology, 0, 1).measured.why_not, "querying the driver for its GPUs did not return within 50 ms");
  driver->unblock();
}

TEST(GpuTopology, ReportsWhyThereIsNone) {
  FakeNvml nvml;
  EXPECT_EQ(query_gpus(nvml).none, "the NVIDIA driver 580.1 sees no GPU");
  EXPECT_THROW((void)nvml_library("libnvidia-ml-that-is-not-there.so.1"), Error);
  EXPECT_THROW((void)nvml_library("libm.so.6"), Error);
  const GpuTopology here = query_gpus();
  EXPECT_EQ(here.gpus.empty(), !here.none.empty());
}

/// The driver of a GPU that has fallen off its bus may block its callers.
TEST(GpuTopology, WaitsForTheDriverForABoundedTime) {
  std::promise<void> release;
  const std::shared_future<void> released = release.get_future().share();
  const auto open = [released]() -> std::unique_ptr<Nvml> {
    released.wait();
    return std::make_unique<FakeNvml>();
  };
  EXPECT_EQ(query_gpus(open, milliseconds(50)).none, "querying NVML for the GPUs did not return within 50 ms");
  release.set_value();
  EXPECT_EQ(query_gpus(open, milliseconds(10'000)).none, "the NVIDIA driver 580.1 sees no GPU");
}

TEST(GpuTopology, PcieLinksCarryWhatTheirGenerationGives) {
  EXPECT_NEAR(pcie_gb_s({3, 16}), 15.76, 0.01);
  EXPECT_NEAR(pcie_gb_s({4, 16}), 31.5, 0.01);
  EXPECT_NEAR(pcie_gb_s({5, 8}), 31.5, 0.01);
  EXPECT_EQ(pcie_gb_s({}), 0);
  EXPECT_EQ(pcie_gb_s({9, 1}), pcie_gb_s({6, 1}));
}

}  // namespace
}  // namespace nvx::test
