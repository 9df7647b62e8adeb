// GPU memory that is allocated to users and grows, and how other processes map it: every error, every false reply and
// every death, over a fake driver with several GPUs.

#include "memory/gpu/device_pool.h"

#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstring>
#include <functional>
#include <thread>

#include "base/log.h"
#include "memory/driver/gpu_info.h"
#include "memory/shm/unix_socket.h"
#include "support/fake_driver.h"
#include "support/gpu_processes.h"
#include "support/sizes.h"

namespace nvx::test {
namespace {

using std::chrono::milliseconds;
using PeerAccess = FakeDriver::PeerAccess;

Deadline soon(int ms = 10'000) { return Deadline::after(milliseconds(ms)); }

PoolOwner owner_of(DeviceRegistry& registry, int device) { return {registry.id(), device, registry.pool_socket()}; }

/// The error that it throws, and its code.
std::pair<Code, std::string> refusal_of(const std::function<void()>& act) {
  try {
    act();
  } catch (const Error& error) {
    return {error.code(), error.what()};
  }
  return {Code::kInvalid, "nothing was thrown"};
}

void write_at(DevicePtr at, size_t bytes, int value) { std::memset(memory(at), value, bytes); }
int at(DevicePtr place) { return int(*memory(place)); }

TEST(DevicePool, GrowsInARowAndKeepsWhatItHas) {
  Process process(1);
  DevicePool& pool = process.registry->pool(0);
  EXPECT_EQ(pool.grown(), 0u);
  EXPECT_EQ(pool.offset_of(memory(pool.base()), 1), std::nullopt);
  const DevicePtr one = pool.allocate(1), two = pool.allocate(3 * M);
  EXPECT_EQ(one, pool.base());
  EXPECT_EQ(two, one + 65536) << "it begins in what the first one left over, and goes on in the next segment";
  EXPECT_EQ(pool.grown(), 6 * M);
  write_at(two, 3 * M, 7);
  EXPECT_EQ(pool.used(), 65536 + 3 * M);
  EXPECT_FALSE(pool.free(two + 65536));
  EXPECT_TRUE(pool.free(one));
  EXPECT_FALSE(pool.free(one)) << "twice";
  EXPECT_EQ(pool.allocate(65536), one);
  EXPECT_TRUE(pool.free(two) && pool.free(one));
  EXPECT_EQ(pool.allocate(6 * M), one) << "pieces that touch are one again";
  EXPECT_EQ(pool.grown(), 6 * M);
  EXPECT_EQ(pool.allocate(2 * M), one + 6 * M);
  EXPECT_EQ(&process.registry->pool(0), &pool);
  EXPECT_EQ(process.registry->made_pool(0).load(), &pool);
}

TEST(DevicePool, FindsAddressesInIt) {
  Process process(1);
  DevicePool& pool = process.registry->pool(0);
  const DevicePtr base = pool.allocate(2 * M);
  const struct {
    int64_t from;
    uint64_t bytes;
    bool inside;
  } kTable[] = {{0, 1, true},          {0, 2 * M, true},     {0, 2 * M + 1, false}, {5, 2 * M - 5, true},
                {5, 2 * M - 4, false}, {2 * M - 1, 1, true}, {2 * M, 1, false},     {-1, 1, false},
                {-1, 2, false},        {0, 0, false},        {3, UINT64_MAX, false}};
  for (const auto& row : kTable) {
    const auto offset = pool.offset_of(memory(base + uint64_t(row.from)), row.bytes);
    EXPECT_EQ(offset.has_value(), row.inside) << row.from << " " << row.bytes;
    if (offset) {
      EXPECT_EQ(*offset, uint64_t(row.from));
    }
  }
  (void)pool.allocate(2 * M);
  EXPECT_EQ(pool.offset_of(memory(base), 2 * M + 1), 0u) << "it has grown";
}

TEST(DevicePool, ADeviceThatIsFullRefusesAndGoesOn) {
  Process process(1);
  DevicePool& pool = process.registry->pool(0);
  const DevicePtr one = pool.allocate(2 * M);
  process.driver->refuse("create", 2);
  const auto [code, text] = refusal_of([&] { (void)pool.allocate(2 * M); });
  EXPECT_EQ(code, Code::kSystem);
  EXPECT_NE(text.find("cuMemCreate on GPU 0: fake refusal 2"), std::string::npos) << text;
  EXPECT_TRUE(pool.free(one));
  EXPECT_EQ(pool.allocate(2 * M), one) << "freed memory is allocated again";
  process.driver->refuse("create", 0);
  EXPECT_EQ(pool.allocate(2 * M), pool.base() + 2 * M);
  const auto [too_much, why] = refusal_of([&] { (void)pool.allocate(size_t(1) << 40); });
  EXPECT_EQ(too_much, Code::kInvalid);
  EXPECT_NE(why.find("GPU 0 has less memory than 1048576 MiB"), std::string::npos) << why;
}

TEST(DevicePool, ADriverThatFailsAnywhereLeavesNothingBehind) {
  for (int n = 0;; ++n) {
    const int before = open_fds();
    bool faulted = false;
    auto driver = std::make_shared<FakeDriver>(1);
    {
      DevicePool pool(driver, 0, {.timeout = milliseconds(10'000)});
      (void)pool.allocate(2 * M);
      driver->fail_call(n);
      (void)refusal_of([&] { (void)pool.allocate(4 * M); });
      faulted = !driver->faulted_call().empty();
      driver->fail_call(-1);
      const bool grew = !faulted || driver->faulted_call() == "count";  // which only other devices need
      EXPECT_EQ(pool.grown(), grew ? 6 * M : 2 * M) << driver->faulted_call();
      EXPECT_EQ(pool.allocate(4 * M), pool.base() + (grew ? 6 * M : 2 * M)) << driver->faulted_call();
    }
    EXPECT_EQ(driver->unreleased(), "") << driver->faulted_call();
    EXPECT_EQ(open_fds(), before) << driver->faulted_call();
    if (!faulted) {
      EXPECT_GE(n, 3) << "create, map and allow at least";
      break;
    }
  }
}

TEST(DevicePool, ADriverThatHangsIsLeftToItself) {
  auto driver = std::make_shared<FakeDriver>(1);
  DevicePool pool(driver, 0, {.timeout = milliseconds(50)});
  driver->block("create");
  EXPECT_EQ(refusal_of([&] { (void)pool.allocate(M); }).first, Code::kTimeout);
  const auto [code, text] = refusal_of([&] { (void)pool.allocate(M); });
  EXPECT_EQ(code, Code::kTimeout);
  EXPECT_NE(text.find("the driver has not returned from an earlier call"), std::string::npos) << text;
  EXPECT_EQ(driver->calls_of("create"), 1) << "it is not called again";
  driver->unblock();
}

TEST(DevicePool, NoneWhereMemoryCannotBeMappedAsItGrows) {
  Process process(1);
  process.driver->lacks(ShareKind::kFd);
  process.driver->lacks(ShareKind::kFabric);
  const auto [code, text] = refusal_of([&] { (void)process.registry->pool(0); });
  EXPECT_EQ(code, Code::kSystem);
  EXPECT_NE(text.find("GPU 0 has no growing memory that other processes can map: GPU 0 does not support it"),
            std::string::npos)
      << text;
  const int calls = process.driver->calls();
  EXPECT_EQ(refusal_of([&] { (void)process.registry->pool(0); }).second, text);
  EXPECT_EQ(process.driver->calls(), calls) << "the driver is not called twice";
  EXPECT_EQ(process.registry->made_pool(0).load(), nullptr);
}

TEST(DevicePool, IsMadeLaterWhereThereWasNoMemoryToTryItWith) {
  Process process(1);
  process.driver->refuse("create", 2);
  EXPECT_NE(refusal_of([&] { (void)process.registry->pool(0); }).second.find("fake refusal 2"), std::string::npos);
  process.driver->refuse("create", 0);
  EXPECT_GT(process.registry->pool(0).allocate(2 * M), 0u);
}

/// In a process of its own, which has not read the log level yet.
TEST(DevicePool, IsLoggedOnceWhileThereIsNone) {
  if (const char* why = why_no_processes()) GTEST_SKIP() << why;
  all_end_well(1, [&](int) {
    setenv("NVX_DEBUG", "info", 1);
    if (!logs(LogLevel::kInfo)) return;  // an earlier test has read the log level
    Process process(1);
    process.driver->refuse("create", 2);
    testing::internal::CaptureStderr();
    for (int i = 0; i < 3; ++i) EXPECT_NE(refusal_of([&] { (void)process.registry->pool(0); }).second, "");
    process.driver->refuse("create", 3);
    (void)refusal_of([&] { (void)process.registry->pool(0); });
    const std::string text = testing::internal::GetCapturedStderr();
    int lines = 0;
    for (size_t at = 0; (at = text.find("no growing memory that other processes can map", at)) != std::string::npos;
         ++at)
      ++lines;
    EXPECT_EQ(lines, 2) << text;
  });
}

TEST(DevicePool, AForkedChildGetsNone) {
  if (const char* why = why_no_processes()) GTEST_SKIP() << why;
  Process process(1);
  DevicePool& pool = process.registry->pool(0);
  (void)pool.allocate(M);
  all_end_well(1, [&](int) {
    EXPECT_NE(refusal_of([&] { (void)pool.allocate(M); }).second.find("forked child"), std::string::npos);
  });
}

// --- as others see it -----------------------------------------------------------------------------------------------

TEST(PeerPool, FollowsAPoolThatGrows) {
  for (const ShareKind kind : {ShareKind::kFd, ShareKind::kFabric}) {
    Process mine(2), theirs(2);
    if (kind == ShareKind::kFabric) theirs.driver->lacks(ShareKind::kFd);
    DevicePool& pool = theirs.registry->pool(1);
    EXPECT_EQ(pool.kind(), kind);
    const DevicePtr first = pool.allocate(2 * M);
    const auto seen = mine.registry->peer_pool(0, owner_of(*theirs.registry, 1));
    EXPECT_EQ(seen->base(), 0u);
    EXPECT_EQ(seen->mapped(), 0u);
    seen->map_up_to(pool.grown(), soon());
    EXPECT_EQ(seen->mapped(), 2 * M);
    (void)pool.allocate(6 * M);
    const DevicePtr last = pool.allocate(4 * M);
    EXPECT_EQ(seen->mapped(), 2 * M) << "not by itself";
    seen->map_up_to(pool.grown(), soon());
    EXPECT_EQ(seen->mapped(), 12 * M);
    const int calls = mine.driver->calls();
    seen->map_up_to(pool.grown(), soon());
    EXPECT_EQ(mine.driver->calls(), calls);
    for (const DevicePtr place : {first, last, last + 4 * M - 1}) {
      write_at(place, 1, 42);
      EXPECT_EQ(at(seen->base() + *pool.offset_of(memory(place), 1)), 42);
    }
    EXPECT_EQ(mine.registry->peer_pool(0, owner_of(*theirs.registry, 1)), seen) << "one for all groups";
    EXPECT_NE(mine.registry->peer_pool(1, owner_of(*theirs.registry, 1)), seen) << "each device its own";
  }
}

TEST(PeerPool, IsUnmappedByItsLastUser) {
  const int before = open_fds();
  {
    Process mine(1), theirs(1);
    {
      (void)theirs.registry->pool(0).allocate(2 * M);
      (void)theirs.registry->pool(0).allocate(2 * M);
      const auto seen = mine.registry->peer_pool(0, owner_of(*theirs.registry, 0));
      seen->map_up_to(4 * M, soon());
      EXPECT_NE(mine.driver->unreleased(), "");
    }
    EXPECT_EQ(mine.driver->unreleased(), "");
    const auto again = mine.registry->peer_pool(0, owner_of(*theirs.registry, 0));
    again->map_up_to(4 * M, soon());
    EXPECT_EQ(again->mapped(), 4 * M);
  }
  EXPECT_EQ(open_fds(), before);
}

TEST(PeerPool, OfTheSameProcessNeedsNoServer) {
  Process process(2);
  const auto other = process.registry->peer_pool(0, owner_of(*process.registry, 1));
  const auto same = process.registry->peer_pool(1, owner_of(*process.registry, 1));
  EXPECT_EQ(other->base(), 0u);
  DevicePool& pool = process.registry->pool(1);
  const DevicePtr place = pool.allocate(2 * M);
  const auto copies = [&](int device) {
    DeviceStream stream = 0;
    EXPECT_EQ(process.driver->create_stream(device, &stream), 0);
    const DriverCode code = process.driver->fill(device, stream, place, 5, M);
    bool done = false;
    EXPECT_EQ(process.driver->drained(device, stream, &done), 0);
    EXPECT_EQ(process.driver->destroy_stream(device, stream), 0);
    return code == 0;
  };
  EXPECT_TRUE(copies(0)) << "torch copies between GPUs of a process that have no rank in common";
  for (const auto& seen : {other, same}) {
    seen->map_up_to(pool.grown(), soon());
    EXPECT_EQ(seen->base(), pool.base());
    EXPECT_EQ(seen->mapped(), 2 * M);
  }
  EXPECT_TRUE(copies(0) && copies(1));
  process.driver->pair(0, 1, PeerAccess::kRefuses);
  (void)pool.allocate(2 * M);
  EXPECT_NE(refusal_of([&] { other->map_up_to(4 * M, soon()); }).second.find("cuMemSetAccess"), std::string::npos);
  EXPECT_EQ(other->mapped(), 2 * M);
  same->map_up_to(4 * M, soon());
  EXPECT_EQ(same->mapped(), 4 * M);
}

TEST(PeerPool, ARefusalLeavesWhatIsMappedAndIsNotForEver) {
  for (const char* call : {"import_fd", "reserve", "map", "allow"}) {
    Process mine(1), theirs(1);
    DevicePool& pool = theirs.registry->pool(0);
    (void)pool.allocate(2 * M);
    const auto seen = mine.registry->peer_pool(0, owner_of(*theirs.registry, 0));
    if (std::string(call) != "reserve") seen->map_up_to(2 * M, soon());
    const uint64_t before = seen->mapped();
    (void)pool.allocate(2 * M);
    mine.driver->refuse(call, 2);
    const auto [code, text] = refusal_of([&] { seen->map_up_to(4 * M, soon()); });
    EXPECT_EQ(code, Code::kSystem) << call;
    EXPECT_NE(text.find("fake refusal 2"), std::string::npos) << text;
    EXPECT_EQ(seen->mapped(), before) << call;
    mine.driver->refuse(call, 0);
    seen->map_up_to(4 * M, soon());
    EXPECT_EQ(seen->mapped(), 4 * M) << call;
  }
}

TEST(PeerPool, AnOwnerThatCannotExportReportsWhy) {
  Process mine(1), theirs(1);
  (void)theirs.registry->pool(0).allocate(2 * M);
  theirs.driver->refuse("export_fd", 5);
  const auto seen = mine.registry->peer_pool(0, owner_of(*theirs.registry, 0));
  const auto [code, text] = refusal_of([&] { seen->map_up_to(2 * M, soon()); });
  EXPECT_EQ(code, Code::kPeerFailed);
  EXPECT_NE(text.find("it refused: cuMemExportToShareableHandle on GPU 0: fake refusal 5"), std::string::npos) << text;
  theirs.driver->refuse("export_fd", 0);
  EXPECT_NE(
      refusal_of([&] { seen->map_up_to(100 * M, soon()); }).second.find("it refused: its pool has no such segment"),
      std::string::npos);
  EXPECT_EQ(seen->mapped(), 2 * M) << "what there is";
}

/// A socket that replies as a test defines.
struct FalseOwner {
  explicit FalseOwner(PoolServer::Serve serve) : server(name, std::move(serve)) {}
  PoolOwner owner() const { return {process, 0, name}; }
  const std::string name = unique_socket_name();
  const ArenaId process = random_arena_id();
  PoolServer server;
};

TEST(PeerPool, ChecksTheRepliesOfAServer) {
  FakeDriver elsewhere(1);
  DeviceMemory made = 0;
  ASSERT_EQ(elsewhere.create(0, ShareKind::kFd, 2 * M, &made), 0);
  const auto honest = [&](Fd* fd) {
    PoolReply reply;
    reply.state = PoolReply::kHere;
    reply.kind = uint32_t(ShareKind::kFd);
    reply.pool = {1, 2};
    reply.room = 64 * M;
    reply.bytes = 2 * M;
    EXPECT_EQ(elsewhere.export_fd(made, fd), 0);
    return reply;
  };
  const struct {
    std::function<void(PoolReply&)> spoil;
    const char* reason;
  } kTable[] = {
      {[](PoolReply& a) { a.magic = 1; }, "another version"},
      {[](PoolReply& a) { a.kind = uint32_t(ShareKind::kIpc); }, "an invalid segment"},
      {[](PoolReply& a) { a.kind = 77; }, "an invalid segment"},
      {[](PoolReply& a) { a.offset = 2 * M; }, "an invalid segment"},
      {[](PoolReply& a) { a.bytes = 0; }, "an invalid segment"},
      {[](PoolReply& a) { a.bytes = M; }, "an invalid segment"},
      {[](PoolReply& a) { a.bytes = 66 * M; }, "an invalid segment"},
      {[](PoolReply& a) { a.bytes = UINT64_MAX - 2 * M + 1; }, "an invalid segment"},
      {[](PoolReply& a) { a.room = uint64_t(1) << 50; }, "an invalid segment"},
      {[](PoolReply& a) { a.room = 64 * M + 1; }, "an invalid segment"},
      {[](PoolReply& a) { a.bytes = 4 * M; }, "cuMemMap"},  // the memory is smaller
  };
  for (const auto& row : kTable) {
    Process mine(1);
    FalseOwner false_owner([&](const PoolRequest&, Fd* fd) {
      PoolReply reply = honest(fd);
      row.spoil(reply);
      return reply;
    });
    const auto seen = mine.registry->peer_pool(0, false_owner.owner());
    const std::string text = refusal_of([&] { seen->map_up_to(2 * M, soon()); }).second;
    EXPECT_NE(text.find(row.reason), std::string::npos) << text;
    EXPECT_EQ(seen->mapped(), 0u);
  }
  Process mine(1);
  FalseOwner changing([&](const PoolRequest& request, Fd* fd) {
    PoolReply reply = honest(fd);
    reply.offset = 2 * M * request.segment;
    reply.pool.low += request.segment;
    return reply;
  });
  const auto seen = mine.registry->peer_pool(0, changing.owner());
  EXPECT_NE(refusal_of([&] { seen->map_up_to(4 * M, soon()); }).second.find("an invalid segment"), std::string::npos)
      << "another pool all of a sudden";
  EXPECT_EQ(seen->mapped(), 2 * M);
  ASSERT_EQ(elsewhere.release(made), 0);
}

TEST(PeerPool, AServerThatNeverAnswersIsNotWaitedForLong) {
  Process mine(1);
  const std::string name = unique_socket_name();
  const LocalSocket nobody =
      listen_on(name);  // like that of a process that hangs, or of a forked child that survives it
  const auto seen = mine.registry->peer_pool(0, {random_arena_id(), 0, name});
  const auto [code, text] = refusal_of([&] { seen->map_up_to(2 * M, soon(50)); });
  EXPECT_EQ(code, Code::kTimeout);
  EXPECT_NE(text.find("it did not answer within 50 ms"), std::string::npos) << text;
}

TEST(PeerPool, OfAProcessThatHasEndedOrIsAnother) {
  Process mine(1), theirs(1);
  const auto gone = mine.registry->peer_pool(0, {random_arena_id(), 0, unique_socket_name()});
  EXPECT_EQ(refusal_of([&] { gone->map_up_to(2 * M, soon()); }).first, Code::kPeerDied);
  (void)theirs.registry->pool(0).allocate(M);
  const auto other = mine.registry->peer_pool(0, {random_arena_id(), 0, theirs.registry->pool_socket()});
  EXPECT_NE(refusal_of([&] { other->map_up_to(2 * M, soon()); }).second.find("for another process"), std::string::npos);
  const auto none = mine.registry->peer_pool(0, {theirs.registry->id(), 7, theirs.registry->pool_socket()});
  EXPECT_NE(refusal_of([&] { none->map_up_to(2 * M, soon()); }).second.find("has no such segment"), std::string::npos);
}

// --- the server ----------------------------------------------------------------------------------------------------

TEST(PoolServer, OpensWithTheFirstMemory) {
  Process process(1);
  DevicePool& pool = process.registry->pool(0);
  EXPECT_FALSE(connect_to(process.registry->pool_socket()));
  (void)pool.allocate(M);
  EXPECT_TRUE(connect_to(process.registry->pool_socket()));
}

TEST(PoolServer, SilentOrMalformedClientsBlockNoOtherClient) {
  Process mine(1), theirs(1);
  (void)theirs.registry->pool(0).allocate(2 * M);
  std::vector<LocalSocket> silent;
  for (int i = 0; i < 200; ++i) {
    silent.push_back(connect_to(theirs.registry->pool_socket()));
    ASSERT_TRUE(silent.back());
  }
  const LocalSocket nonsense = connect_to(theirs.registry->pool_socket()),
                    wrong = connect_to(theirs.registry->pool_socket());
  ASSERT_TRUE(send_packet(nonsense, "?", 1, {}));
  const PoolRequest other{0, 0, theirs.registry->id(), 0};
  ASSERT_TRUE(send_packet(wrong, &other, sizeof other, {}));
  {
    const LocalSocket hasty = connect_to(theirs.registry->pool_socket());
    const PoolRequest request{PoolRequest::kMagic, 0, theirs.registry->id(), 0};
    ASSERT_TRUE(send_packet(hasty, &request, sizeof request, {}));
  }
  const auto seen = mine.registry->peer_pool(0, owner_of(*theirs.registry, 0));
  seen->map_up_to(2 * M, soon());
  EXPECT_EQ(seen->mapped(), 2 * M);
  for (const LocalSocket* shown_out : std::initializer_list<const LocalSocket*>{&nonsense, &wrong, &silent.front()}) {
    char byte = 0;
    pollfd request{shown_out->get(), POLLIN, 0};
    ASSERT_EQ(poll(&request, 1, 10'000), 1);
    EXPECT_EQ(read(shown_out->get(), &byte, 1), 0) << "no reply";
  }
}

TEST(PoolServer, CostsNothingWhileNobodyComes) {
  Process process(1);
  (void)process.registry->pool(0).allocate(M);
  std::this_thread::sleep_for(milliseconds(20));
  const auto cpu = [] {
    timespec now{};
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    return double(now.tv_sec) + double(now.tv_nsec) / 1e9;
  };
  const LocalSocket silent = connect_to(process.registry->pool_socket());
  const double before = cpu();
  std::this_thread::sleep_for(milliseconds(400));
  EXPECT_LT(cpu() - before, 0.1);
}

// --- between processes ----------------------------------------------------------------------------------------------

TEST(PeerPool, OutlivesItsOwner) {
  if (const char* why = why_no_processes()) GTEST_SKIP() << why;
  const SharedTable table(2);
  const auto endings = as_processes(2, [&](int rank) {
    Process process(2);
    SharedBootstrap bootstrap(table, rank);
    struct Info {
      ArenaId process;
      char socket[48];
      uint64_t grown;
    } info{process.registry->id(), {}, 0};
    put(info.socket, process.registry->pool_socket());
    DevicePtr place = 0;
    if (rank == 1) {
      place = process.registry->pool(1).allocate(4 * M);
      write_at(place, 4 * M, 9);
      info.grown = process.registry->pool(1).grown();
    }
    const Info theirs = read_infos<Info>(bootstrap.all_gather(bytes_of(info)), 1, of_rank)[1];
    if (rank == 0) {
      const auto seen = process.registry->peer_pool(0, {theirs.process, 1, text_of(theirs.socket)});
      seen->map_up_to(theirs.grown, soon());
      write_at(seen->base() + M, 1, 3);
      (void)bootstrap.all_gather({});
      const auto reaches_no_more = [&] {
        return refusal_of([&] { seen->map_up_to(theirs.grown + 2 * M, soon(500)); }).first == Code::kPeerDied;
      };
      for (int i = 0; i < 1000 && !reaches_no_more(); ++i) std::this_thread::sleep_for(milliseconds(10));
      EXPECT_TRUE(reaches_no_more());
      EXPECT_EQ(at(seen->base() + 4 * M - 1), 9) << "the memory stays for a process that has it mapped";
      EXPECT_EQ(at(seen->base() + M), 3);
    } else {
      (void)bootstrap.all_gather({});
      EXPECT_EQ(at(place + M), 3);
      kill(getpid(), SIGKILL);
    }
  });
  EXPECT_TRUE(endings[0].well());
  EXPECT_EQ(endings[1].signal, SIGKILL);
}

TEST(PoolServer, StaysOpenAfterAClientDies) {
  if (const char* why = why_no_processes()) GTEST_SKIP() << why;
  Process theirs(1);
  (void)theirs.registry->pool(0).allocate(2 * M);
  theirs.driver->block("export_fd");  // so that it is in the middle of the call
  const auto endings = as_processes(1, [&](int) {
    const LocalSocket client = connect_to(theirs.registry->pool_socket());
    const PoolRequest request{PoolRequest::kMagic, 0, theirs.registry->id(), 0};
    EXPECT_TRUE(send_packet(client, &request, sizeof request, {}));
    kill(getpid(), SIGKILL);
  });
  EXPECT_EQ(endings[0].signal, SIGKILL);
  for (int i = 0; i < 1000 && theirs.driver->calls_of("export_fd") < 2; ++i)  // the probe has made one before
    std::this_thread::sleep_for(milliseconds(5));
  theirs.driver->unblock();
  Process mine(1);
  const auto seen = mine.registry->peer_pool(0, owner_of(*theirs.registry, 0));
  seen->map_up_to(2 * M, soon());
  EXPECT_EQ(seen->mapped(), 2 * M);
}

}  // namespace
}  // namespace nvx::test
