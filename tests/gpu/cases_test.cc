// Tests of the GPU tests' own code on a machine without a GPU: threads run the cases, and the tests check the JSON
// lines and the hub over which processes communicate.

#include <gtest/gtest.h>

#include <cmath>
#include <set>
#include <thread>

#include "base/error.h"
#include "gpu/cases.h"
#include "gpu/hub.h"
#include "support/pushes.h"
#include "support/ranks.h"

namespace nvx::gpu {
namespace {

using kernel::Collective;
using kernel::DeviceAlgorithm;

/// Threads run the cases. A spoiled channel drops the memory order of one lane's signals.
class HostChannel : public TestChannel {
 public:
  HostChannel(const ChannelShape& shape, std::set<std::string>* seen)
      : devices_({shape.device, 2, shape.first_epoch, shape.first_chunk}), seen_(seen) {}

  std::string perform(const std::vector<Case>& cases) override {
    std::vector<std::string> wrong(size_t(devices_.ranks()));
    test::as_threads(devices_.ranks(), [&](int rank) {
      test::Batch batch(devices_, rank);
      for (const Case& test_case : cases) batch.add(test_case.algorithm, test_case.spec);
      wrong[size_t(rank)] = batch.run();
    });
    for (const Case& test_case : cases) {
      seen_->insert(kernel::name(test_case.algorithm) + std::string(" ") +
                    std::to_string(int(test_case.spec.collective)));
      seen_->insert(std::string(nvx::name(test_case.spec.dtype)) + " " + nvx::name(test_case.spec.op));
    }
    for (const std::string& w : wrong) {
      if (!w.empty()) return w;
    }
    return devices_.guards_are_whole() ? "" : "a kernel wrote outside its memory";
  }

 private:
  test::SimulatedDevices devices_;
  std::set<std::string>* seen_;
};

std::string output_of(const std::function<void()>& body) {
  testing::internal::CaptureStdout();
  body();
  return testing::internal::GetCapturedStdout();
}

TEST(GpuCases, AllAreRightOnSimulatedDevices) {
  std::set<std::string> seen;
  const MakeChannel make = [&](const ChannelShape& shape) { return std::make_unique<HostChannel>(shape, &seen); };
  Report report("correct", std::chrono::seconds(240));
  run_cases(make, {.ranks = {1, 3}, .lean = test::as_fast(0, 1) == 1}, report);
  EXPECT_EQ(report.failed(), 0u);
  EXPECT_GT(report.tried(), 20u);
  for (const auto& [algorithm, collective] : test::kWays)
    EXPECT_TRUE(seen.count(kernel::name(algorithm) + std::string(" ") + std::to_string(int(collective))));
  for (size_t t = 0; t < kernel::kDTypeCount; ++t) {
    if (!kernel::level().reduce(DType(t), ReduceOp::kMax)) continue;
    EXPECT_TRUE(seen.count(nvx::name(DType(t)) + std::string(" max")));
  }
}

/// A channel that reports an error for every seventh kernel.
class WrongChannel : public TestChannel {
 public:
  explicit WrongChannel(int* kernels) : kernels_(kernels) {}
  std::string perform(const std::vector<Case>&) override { return ++*kernels_ % 7 == 0 ? "wrong output" : ""; }

 private:
  int* kernels_;
};

TEST(GpuCases, WrongResultsAreCountedAndReported) {
  int kernels = 0, channels = 0;
  Report report("correct", std::chrono::seconds(60));
  const std::string output = output_of([&] {
    run_cases([&](const ChannelShape&) { return ++channels, std::make_unique<WrongChannel>(&kernels); }, {.ranks = {2}},
              report);
    EXPECT_EQ(report.finish(), 1);
  });
  EXPECT_EQ(report.failed(), uint64_t(kernels / 7));
  EXPECT_GT(channels, kernels / 7);  // a fresh channel follows each failure
  EXPECT_NE(output.find("\"why\": \"wrong output\""), std::string::npos);
  EXPECT_NE(output.find("\"end\": \"failed\""), std::string::npos);
}

TEST(GpuCases, ATimeLimitIsReported) {
  int kernels = 0;
  Report report("correct", std::chrono::milliseconds(0));
  const std::string output = output_of([&] {
    run_cases([&](const ChannelShape&) { return std::make_unique<WrongChannel>(&kernels); }, {.ranks = {2}}, report);
  });
  EXPECT_EQ(kernels, 0);
  EXPECT_NE(output.find("\"why\": \"time ran out\""), std::string::npos);
}

TEST(GpuCases, ChannelsTooWideForTheDeviceAreLeftOut) {
  uint32_t most = 0, fewest = 99;
  int kernels = 0;
  Report report("correct", std::chrono::seconds(60));
  const MakeChannel make = [&](const ChannelShape& shape) {
    most = std::max(most, shape.device.ranks * shape.device.blocks), fewest = std::min(fewest, shape.device.ranks);
    return std::make_unique<WrongChannel>(&kernels);
  };
  (void)output_of([&] { run_cases(make, {.ranks = {2, 8}, .most_blocks = 4}, report); });
  EXPECT_EQ(most, 4u);
  EXPECT_EQ(fewest, 2u);
}

TEST(GpuCases, TheCpusPathAgrees) {
  Report report("correct", std::chrono::seconds(60));
  run_cpu_path({.ranks = test::is_sanitized() ? std::vector{3u} : std::vector{2u, 3u}, .lean = true}, report);
  EXPECT_EQ(report.failed(), 0u);
  EXPECT_GT(report.tried(), 20u);
}

/// Some sums of tiny values must be subnormal; otherwise the case tests nothing.
TEST(GpuCases, TinyValuesAreNotNormal) {
  size_t subnormal = 0;
  const test::Bytes bytes = test::input(DType::kF32, 64, 0, 1, test::Nature::kTiny);
  for (size_t i = 0; i < 64; ++i) {
    float x;
    std::memcpy(&x, bytes.data() + 4 * i, sizeof x);
    subnormal += std::fpclassify(x) == FP_SUBNORMAL;
  }
  EXPECT_GT(subnormal, 10u);
}

TEST(GpuReport, LinesAreJson) {
  EXPECT_EQ(Line().add("a", "x\"\\\n").add("n", 3).add("f", 0.5).add("b", true).text(),
            "{\"a\": \"x\\\"\\\\\\u000a\", \"n\": 3, \"f\": 0.5, \"b\": true}");
  EXPECT_EQ(Line().add("f", 0.0 / 0.0).text(), "{\"f\": null}");
}

TEST(GpuReport, NothingTriedIsNoSuccess) {
  Report report("x", std::chrono::seconds(1));
  const std::string output = output_of([&] { EXPECT_EQ(report.finish(), 1); });
  EXPECT_NE(output.find("nothing was tried"), std::string::npos);
}

std::vector<std::byte> bytes_of(const std::string& text) {
  const auto* at = reinterpret_cast<const std::byte*>(text.data());
  return {at, at + text.size()};
}

/// Threads run the processes of a part, which communicate over a hub.
std::vector<std::string> run_members(uint32_t members, const Hub::Rules& rules,
                                     const std::function<void(Member&)>& body) {
  Hub hub(members);
  std::vector<std::thread> threads;
  std::vector<std::string> ended(members);
  for (uint32_t m = 0; m < members; ++m) {
    threads.emplace_back([&, m, fd = std::make_shared<Fd>(hub.take(m))] {
      Member member(std::move(*fd), m, members);
      try {
        body(member);
      } catch (const Error& error) {
        ended[m] = error.what();
      }
    });
  }
  EXPECT_TRUE(hub.serve(rules, Deadline::after(std::chrono::seconds(20))));
  for (std::thread& t : threads) t.join();
  return ended;
}

TEST(GpuHub, AllReceiveTheMessagesOfAll) {
  std::vector<std::string> received(3);
  const Hub::Rules rules{[&](uint32_t m, const std::string& text) { received[m] += text; }, 0, {}};
  const std::vector<std::string> ended = run_members(3, rules, [](Member& member) {
    for (int round = 0; round < 50; ++round) {
      const auto all = member.all_gather(bytes_of(std::string(size_t(round * 40), char('a' + member.number()))));
      ASSERT_EQ(all.size(), 3u);
      for (uint32_t m = 0; m < 3; ++m) ASSERT_EQ(all[m], bytes_of(std::string(size_t(round * 40), char('a' + m))));
    }
    member.send("done");
  });
  EXPECT_EQ(received, std::vector<std::string>(3, "done"));
  EXPECT_EQ(ended, std::vector<std::string>(3));
}

TEST(GpuHub, MemberThatLeavesEarlyFailsTheBarrier) {
  const Hub::Rules rules{[](uint32_t, const std::string&) {}, 0, {}};
  const std::vector<std::string> ended = run_members(3, rules, [](Member& member) {
    member.barrier();
    if (member.number() != 1) member.barrier();
  });
  EXPECT_EQ(ended[1], "");
  EXPECT_NE(ended[0].find("has gone"), std::string::npos) << ended[0];
  EXPECT_EQ(ended[0], ended[2]);
}

TEST(GpuHub, TheOthersGoOnWhenOneIsKilled) {
  int kills = 0;
  const Hub::Rules rules{[](uint32_t, const std::string&) {}, 2, [&] { ++kills; }};
  const std::vector<std::string> ended = run_members(3, rules, [](Member& member) {
    member.await_killing();
    EXPECT_NE(member.number(), 2u);
    EXPECT_EQ(member.members(), 2u);
    member.barrier();
  });
  EXPECT_EQ(kills, 1);
  EXPECT_EQ(ended[0] + ended[1], "");
  EXPECT_NE(ended[2], "");  // a process would be gone; a thread loses the hub
}

}  // namespace
}  // namespace nvx::gpu
