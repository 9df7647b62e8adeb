// The link between the GPUs of a group: what each rank sees, and that all ranks plan for the slowest that one sees.

#include "group/device/gpu_link.h"

#include <gtest/gtest.h>

#include "support/fake_nvml.h"
#include "support/kernel_executors.h"
#include "support/sizes.h"

namespace nvx::test {
namespace {

using kernel::DeviceAlgorithm;

constexpr int kRanks = 3;

/// NVML's GPUs of the ranks, with this many links up to a switch.
FakeNvml with_lanes(int up) {
  FakeNvml nvml;
  for (int gpu = 0; gpu < kRanks; ++gpu) {
    std::array<uint8_t, 16> uuid;
    uuid.fill(uint8_t(gpu + 1));  // as the fake driver reports
    nvml.add("H100", up, 18).uuid = text_of_uuid(uuid);
  }
  return nvml;
}

/// `seen`: of each rank. Expects that all ranks have this link, and plan for it.
void expect_link(GpuLink link, const std::vector<std::function<std::vector<GpuProperties>()>>& seen,
                 DeviceWorld::Shape shape = {}, const std::function<void(DeviceWorld&)>& change = {}) {
  shape.ranks = kRanks;
  shape.processes = true;
  shape.resident = 512;
  DeviceWorld world(shape);
  for (int r = 0; r < kRanks; ++r) world.process(r).driver->lacks(ShareKind::kFabric);
  if (change) change(world);
  with_executors(
      world,
      [&](DeviceRank& one) {
        EXPECT_EQ(one.executor->resources().link(), link) << one.rank;
        EXPECT_EQ(one.executor->shape().blocks, Tuning().of(Tune::kBlocks, kRanks, link)) << one.rank;
        std::vector<int32_t> data(32 * K / sizeof(int32_t), one.rank + 1);
        std::vector<Operation> operations;
        operations.push_back(all_reduce(data));
        EXPECT_EQ(one.executor->choose(operations[0]).algorithm,
                  link == GpuLink::kPcie ? DeviceAlgorithm::kReducePacketsTwoShot : DeviceAlgorithm::kReducePackets)
            << one.rank;
        EXPECT_TRUE(one.launch(operations).ok());
        EXPECT_TRUE(one.await().ok());
        EXPECT_EQ(data, std::vector<int32_t>(data.size(), 6));
      },
      [&](ChannelOptions& options) {
        options.blocks = 0;
        options.gpus = seen[size_t(options.rank) % seen.size()];
      });
}

std::function<std::vector<GpuProperties>()> of(const FakeNvml& nvml) {
  return [all = nvml.all] { return all; };
}

TEST(GpuLink, AllRanksPlanForTheirLink) {
  expect_link(GpuLink::kNvlink, {of(with_lanes(18))});
  expect_link(GpuLink::kPcie, {of(with_lanes(0))});
  expect_link(GpuLink::kOneGpu, {[]() -> std::vector<GpuProperties> {
                ADD_FAILURE() << "one GPU needs no query of NVML";
                return {};
              }},
              {.gpus = 1});
}

/// If each rank planned for the link that it sees, they would launch different algorithms.
TEST(GpuLink, AllRanksPlanForTheSlowestLinkThatOneSees) {
  FakeNvml bridged = with_lanes(0);
  bridged.bridge(0, 1, 4);
  expect_link(GpuLink::kPcie, {of(bridged)});
  FakeNvml own = with_lanes(18);
  own.all.resize(1);  // in its container
  expect_link(GpuLink::kPcie, {of(own), of(with_lanes(18)), of(with_lanes(0))});
  expect_link(GpuLink::kNvlink, {of(own), of(with_lanes(18)), of(with_lanes(18))});
}

TEST(GpuLink, PairsInHostMemoryCountAsPcie) {
  expect_link(GpuLink::kPcie, {of(with_lanes(18))}, {}, [](DeviceWorld& world) {
    for (int r = 0; r < kRanks; ++r) world.process(r).driver->pairs(0, 2, FakeDriver::PeerAccess::kRefuses);
  });
}

TEST(GpuLink, WithoutAnAnswerOfNvmlItIsNvlink) {
  const std::vector<std::function<std::vector<GpuProperties>()>> silent = {
      []() -> std::vector<GpuProperties> { throw Error(Code::kSystem, "nvx: no NVIDIA driver here"); },
      [] { return std::vector<GpuProperties>(); }, of(with_lanes(18))};
  expect_link(GpuLink::kNvlink, silent);
}

TEST(GpuLink, NvlinkJoinsByLanesSwitchesAndDomains) {
  FakeNvml nvml;
  for (const int up : {18, 1, 0, 0}) nvml.add("H100", up, up);
  nvml.bridge(2, 3, 2);
  const auto joined = [&](size_t a, size_t b) { return joined_by_nvlink(nvml.all[a], nvml.all[b]); };
  EXPECT_TRUE(joined(0, 1));
  EXPECT_TRUE(joined(2, 3));
  EXPECT_FALSE(joined(1, 2));
  nvml.all[1].domain = NvlinkDomain{{1}, 7};
  EXPECT_FALSE(joined(1, 2));
  nvml.all[2].domain = NvlinkDomain{{1}, 7};
  EXPECT_TRUE(joined(1, 2));
  nvml.all[2].domain->clique = 8;
  EXPECT_FALSE(joined(1, 2));
}

TEST(GpuLink, AUuidIsThatOfNvml) {
  std::array<uint8_t, 16> uuid;
  for (size_t i = 0; i < uuid.size(); ++i) uuid[i] = uint8_t(17 * i);
  EXPECT_EQ(text_of_uuid(uuid), "GPU-00112233-4455-6677-8899-aabbccddeeff");
}

}  // namespace
}  // namespace nvx::test
