// GPUDirect RDMA is used only if messages of device memory have shown on every rank that it works and pays.

#include "group/device/rdma_trial.h"

#include <gtest/gtest.h>

#include <atomic>
#include <set>

#include "group/setup/store_bootstrap.h"
#include "memory/gpu/device_pool.h"
#include "support/gpu_processes.h"
#include "support/loopback.h"
#include "support/stores.h"

namespace nvx::test {
namespace {

using std::chrono::milliseconds;

net::LoopbackNet::Options moves_device_memory() {
  net::LoopbackNet::Options options;
  options.no_device_memory = "";
  return options;
}

/// Ranks of as many hosts, each with a GPU.
class Trials {
 public:
  explicit Trials(int ranks, const net::LoopbackNet::Options& options = moves_device_memory()) : net(options) {
    for (int rank = 0; rank < ranks; ++rank) processes.push_back(std::make_unique<Process>(1));
  }

  /// The ranks' reason, which has to be the same on all. `change`: of a rank's setting.
  std::string reason(const std::function<void(int rank, RdmaTrialSetting&)>& change = [](int, RdmaTrialSetting&) {}) {
    MemoryStore store;
    std::vector<std::string> reported(processes.size());
    const int ranks = int(processes.size());
    as_threads(ranks, [&](int rank) {
      RdmaTrialSetting setting;
      setting.next = (rank + 1) % ranks;
      setting.registry = processes[size_t(rank)]->registry.get();
      setting.open_link = [this] { return ++links, net.open(); };
      setting.timeout = std::chrono::seconds(30), setting.slack = setting.timeout;  // on busy processors
      change(rank, setting);
      StoreBootstrap bootstrap(store, {.prefix = "rdma", .rank = rank, .ranks = ranks});
      reported[size_t(rank)] = why_no_rdma(bootstrap, setting);
    });
    EXPECT_EQ(std::set(reported.begin(), reported.end()).size(), 1u);
    return reported[0];
  }
  FakeDriver& driver(int rank) { return *processes[size_t(rank)]->driver; }

  net::LoopbackNet net;
  std::vector<std::unique_ptr<Process>> processes;
  std::atomic<int> links{0};
};

void expect_about(const std::string& reason, const std::string& who, const std::string& why) {
  EXPECT_TRUE(reason.starts_with(who + ": ")) << reason;
  EXPECT_NE(reason.find(why), std::string::npos) << reason;
}

TEST(RdmaTrial, PassesWhereBytesGoFromDeviceToDevice) {
  for (const int ranks : {2, 3}) {
    Trials trials(ranks);
    EXPECT_EQ(trials.reason(), "");
    const net::LoopbackNet::Counts counts = trials.net.counts();
    EXPECT_EQ(counts.device_bytes, uint64_t(ranks) * 3 * (1 + 3 + 24 + 257 + 2048 + 16384 + 32 * 65536));
    EXPECT_EQ(counts.host_copies, 0u);
    for (int rank = 0; rank < ranks; ++rank) {
      EXPECT_EQ(trials.processes[size_t(rank)]->registry->pool(0).used(), 0u) << "its memory is free again";
      EXPECT_EQ(trials.driver(rank).calls_of("unpin"), 0);
    }
  }
}

TEST(RdmaTrial, DoesNotBeginIfARankHasAnObstacle) {
  Trials trials(3);
  const std::string why = "UCX's context reports host memory alone";
  expect_about(trials.reason([&](int rank, RdmaTrialSetting& setting) { setting.obstacle = rank == 1 ? why : ""; }),
               "rank 1", why);
  EXPECT_EQ(trials.net.counts().posted, 0u);
  const auto all = [&](int, RdmaTrialSetting& setting) { setting.obstacle = why; };
  Trials others(2);
  expect_about(others.reason(all), "rank 0", why);
  EXPECT_EQ(others.links, 0);
}

TEST(RdmaTrial, DoesNotBeginWhereAGpuNeedsAFlush) {
  Trials trials(2);
  trials.driver(1).refuse("orders_rdma", 801);
  expect_about(trials.reason(), "rank 1", "this GPU needs a flush");
  EXPECT_EQ(trials.net.counts().posted, 0u);
}

TEST(RdmaTrial, RefusesWrongBytesOfOneRankOnAll) {
  Trials trials(3);
  std::atomic<int> opened{0};
  const auto ordered = [&](int rank, RdmaTrialSetting& setting) {  // links are numbered as they are opened
    setting.open_link = [&, rank] {
      while (opened != rank) std::this_thread::yield();
      auto link = trials.net.open();
      net::Faults faults;
      faults.corrupt = rank == 2;
      if (rank == 2) trials.net.set_faults(1, 2, faults);
      return ++opened, std::move(link);
    };
  };
  const auto began = Clock::now();
  expect_about(trials.reason(ordered), "rank 2", "a network card has written wrong bytes to device memory");
  EXPECT_LT(Clock::now() - began, std::chrono::seconds(20)) << "the others do not wait for it";
}

/// The pool gives the second trial the memory of the first one, with its bytes.
TEST(RdmaTrial, RefusesACardThatWritesNothingWhereAnEarlierTrialHasPassed) {
  Trials trials(2);
  EXPECT_EQ(trials.reason(), "");
  net::LoopbackNet::Options options = moves_device_memory();
  options.faults.unwritten = 1;
  net::LoopbackNet blind(options);
  expect_about(trials.reason([&](int, RdmaTrialSetting& setting) { setting.open_link = [&] { return blind.open(); }; }),
               "rank 0", "a network card has written wrong bytes to device memory");
}

TEST(RdmaTrial, EndsWhereMessagesDoNotArrive) {
  net::LoopbackNet::Options options = moves_device_memory();
  options.faults.lose = 1;
  Trials trials(2, options);
  const auto began = Clock::now();
  const auto change = [](int rank, RdmaTrialSetting& setting) { setting.timeout = milliseconds(1000 + 3000 * rank); };
  expect_about(trials.reason(change), "rank 0", "messages of device memory did not arrive within 1000 ms");
  EXPECT_LT(Clock::now() - began, std::chrono::seconds(20));
}

/// The thread of a call that does not return keeps all that the call uses.
TEST(RdmaTrial, EndsWhereACallHangs) {
  Trials trials(2);
  trials.driver(1).block("copy");
  expect_about(trials.reason([](int, RdmaTrialSetting& setting) { setting.timeout = milliseconds(500); }), "rank 1",
               "a trial of GPUDirect did not return within");
  trials.driver(1).unblock();
  for (const auto& process : trials.processes) {  // on a busy processor, rank 0 may have given up its thread too
    DevicePool& pool = process->registry->pool(0);
    const Deadline deadline = Deadline::after(std::chrono::seconds(20));
    while (pool.used() != 0 && !deadline.passed(Clock::now())) std::this_thread::sleep_for(milliseconds(1));
    EXPECT_EQ(pool.used(), 0u);
    EXPECT_TRUE(pool.free(pool.allocate(1))) << "it takes the lock, so the thread has returned it";
  }
}

/// As where UCX copies to host memory by itself, or where the card and the GPU are far apart.
TEST(RdmaTrial, RefusesMessagesThatAreSlowerThanThoseOfHostMemory) {
  net::LoopbackNet::Options options = moves_device_memory();
  options.device_latency = std::chrono::milliseconds(as_fast(200, 1000));
  Trials trials(2, options);
  expect_about(trials.reason([](int, RdmaTrialSetting& setting) { setting.slack = milliseconds(5); }), "rank 0",
               "messages of device memory take ");
}

}  // namespace
}  // namespace nvx::test
