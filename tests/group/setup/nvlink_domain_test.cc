#include "group/setup/nvlink_domain.h"

#include <gtest/gtest.h>

#include <cctype>
#include <future>

#include "memory/driver/gpu_info.h"
#include "support/fake_driver.h"
#include "support/fake_nvml.h"

namespace nvx::test {
namespace {

using std::chrono::milliseconds;

NvlinkDomain domain(uint8_t cluster, uint32_t clique) {
  NvlinkDomain made{{}, clique};
  made.cluster.fill(cluster);
  return made;
}

DomainInfo info(int rank, uint8_t cluster, uint32_t clique) {
  return domain_info(
      rank, [=] { return domain(cluster, clique); }, milliseconds(10'000));
}

std::string verdict(const std::vector<DomainInfo>& infos) {
  std::vector<std::vector<std::byte>> messages;
  for (const DomainInfo& one : infos) messages.emplace_back(bytes_of(one).begin(), bytes_of(one).end());
  return why_no_domain(messages, of_rank);
}

TEST(NvlinkDomain, IsOfOneClusterAndClique) {
  EXPECT_EQ(verdict({info(0, 7, 2), info(1, 7, 2), info(2, 7, 2)}), "");
  EXPECT_EQ(verdict({info(0, 7, 2), info(1, 8, 2)}), "rank 1 and rank 0 are in different NVLink clusters");
  EXPECT_EQ(verdict({info(0, 7, 2), info(1, 7, 2), info(2, 7, 3)}),
            "rank 2 and rank 0 are in different cliques of their NVLink cluster");
}

TEST(NvlinkDomain, ARankWithoutOneHasTheReason) {
  const auto none = [](int rank) {
    return domain_info(
        rank, []() -> NvlinkDomain { throw Error(Code::kSystem, "nvx: no NVIDIA driver here"); }, milliseconds(10'000));
  };
  EXPECT_EQ(verdict({info(0, 7, 2), none(1), none(2)}), "rank 1: no NVIDIA driver here");
  EXPECT_EQ(verdict({none(0), none(1)}), "rank 0: no NVIDIA driver here") << "two ranks without one share none";
}

TEST(NvlinkDomain, NvmlMayHang) {
  auto never = std::make_shared<std::promise<NvlinkDomain>>();
  const DomainInfo late = domain_info(
      1, [never] { return never->get_future().get(); }, milliseconds(50));
  EXPECT_EQ(verdict({info(0, 7, 2), late}), "rank 1: querying NVML for the NVLink fabric did not return within 50 ms");
  never->set_value({});
}

TEST(NvlinkDomain, CardsOfOthersAreChecked) {
  DomainInfo bent = info(1, 7, 2), moved = info(0, 7, 2);
  bent.magic ^= 1;
  EXPECT_THROW((void)verdict({info(0, 7, 2), bent}), Error);
  EXPECT_THROW((void)verdict({info(0, 7, 2), moved}), Error);
  EXPECT_THROW((void)why_no_domain({std::vector<std::byte>(3)}, of_rank), Error);
}

TEST(NvlinkDomain, IsThatOfTheGpuOnTheSameBus) {
  FakeDriver driver(2);
  FakeNvml nvml;
  DeviceProperties properties;
  ASSERT_EQ(driver.describe(1, &properties), 0);
  nvml.add("other").domain = domain(1, 1);
  GpuProperties& gpu = nvml.add("this one");
  gpu.bus = "0000" + properties.bus;
  for (char& c : gpu.bus) c = char(std::toupper(c));
  const auto reason = [&] {
    try {
      return domain_of(driver, 1, nvml) == domain(7, 2) ? std::string("it") : std::string("another");
    } catch (const Error& error) {
      return error.reason();
    }
  };
  EXPECT_NE(reason().find("has joined no NVLink fabric beyond its host"), std::string::npos) << reason();
  gpu.domain = domain(7, 2);
  EXPECT_EQ(reason(), "it");
  gpu.bus = "0000:ff:00.0";
  EXPECT_NE(reason().find("NVML does not list GPU " + properties.bus), std::string::npos) << reason();
}

}  // namespace
}  // namespace nvx::test
