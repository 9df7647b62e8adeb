// Properties of links over UCX alone: its settings, its versions, and what it does without descriptors.

#include <sys/resource.h>
#include <sys/wait.h>

#include <cstdlib>
#include <future>
#include <thread>

#include "net/child.h"
#include "net/ucx/ucx_address.h"
#include "net/ucx/ucx_search.h"
#include "support/ranks.h"

namespace nvx::net::test {
namespace {

class Ucx : public testing::Test {
 protected:
  void SetUp() override {
    if (!why_no_ucx().empty()) GTEST_SKIP() << why_no_ucx();
    if (const char* why = nvx::test::why_no_processes()) GTEST_SKIP() << why;
  }
};

/// Without a name in the environment, the library that was found is tested.
TEST_F(Ucx, IsTheOneThatIsNamed) {
  const char* named = std::getenv("NVX_LIBUCP");
  if (!named) GTEST_SKIP() << "NVX_LIBUCP names none";
  ASSERT_EQ(candidates_at(named).size(), 1u) << named;
  EXPECT_EQ(candidates_at(loaded_ucx().at(0)).at(0).path, candidates_at(named)[0].path);
  const std::string description = open_ucx()->describe();
  EXPECT_NE(description.find(candidates_at(named)[0].version.text()), std::string::npos) << description;
}

/// Libraries without CUDA, which is what tests have, refuse device memory before any is passed to them.
TEST_F(Ucx, ReportsWhyItMovesNoDeviceMemory) {
  const auto link = open_ucx();
  const bool host_alone = link->describe().ends_with(", host memory");
  EXPECT_EQ(link->use_device_memory({}) == "UCX's context reports host memory alone", host_alone) << link->describe();
  EXPECT_EQ(open_tcp(some_key())->use_device_memory({}), "the link to other hosts reads and writes host memory alone");
}

/// UCX closes its listener for good when a rank connects and no descriptor is free.
TEST_F(Ucx, NoFreeDescriptorForAConnectionIsReported) {
  Child child("ucx", [](End& end, Line& line) {
    const Fd lowest(dup(STDIN_FILENO));
    rlimit limit{};
    ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &limit), 0);
    const rlim_t before = std::exchange(limit.rlim_cur, rlim_t(lowest.get()) + 1);
    ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);
    EXPECT_EQ(end.link->obstacle(0), "");
    line.send(1);
    EXPECT_TRUE(drive(end, [&] { return end.link->obstacle(0).find("(ulimit -n)") != std::string::npos; }));
    limit.rlim_cur = before;
    ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);
    line.send(2);
  });
  End end(open_ucx());
  const PeerId peer = child.exchange_addresses(end);
  EXPECT_EQ(child.line.receive_number(), 1u);
  end.send(peer, 100);
  auto answer = std::async(std::launch::async, [&] { return child.line.receive_number(); });
  EXPECT_TRUE(drive(end, std::chrono::seconds(20),
                    [&] { return answer.wait_for(milliseconds(0)) == std::future_status::ready; }));
  EXPECT_EQ(answer.get(), 2u);
  EXPECT_EQ(child.wait_for_end(), 0);
}

/// Closing an endpoint that the peer has not accepted would pair the next one with a closed one.
TEST_F(Ucx, APeerThatIsForgottenBeforeItAcceptsIsReachedWhenItIsAddedAgain) {
  constexpr size_t kBytes[] = {100, 20'000, 3'000'000};
  const auto exchange = [&](End& end, PeerId peer) {
    const size_t before = end.log.messages.size();
    for (const size_t bytes : kBytes) end.send(peer, bytes, uint32_t(bytes));
    EXPECT_TRUE(drive(end, [&] { return end.log.messages.size() == before + 3 && end.all_done_once(); }));
    for (size_t i = before; i < end.log.messages.size(); ++i) {
      const std::vector<std::byte>& body = end.log.messages[i].body;
      EXPECT_TRUE(body == pattern(body.size(), uint32_t(body.size()))) << body.size();
    }
  };
  Child child("ucx", [&](End& end, Line& line) {
    end.link->forget(0);
    exchange(end, end.link->add(line.receive()));
    line.receive();
  });
  End end(open_ucx());
  const std::vector<std::byte> address = child.line.receive();
  child.line.send(end.link->address());
  child.send_signal(SIGSTOP);
  std::this_thread::sleep_for(milliseconds(50));
  const PeerId first = end.link->add(address);
  end.send(first, 100);
  drive_for(milliseconds(100), {end.link.get()});
  end.link->forget(first);
  EXPECT_TRUE(drive(end, [&] { return end.all_done_once(); }));
  drive_for(milliseconds(2500), {end.link.get()});
  const PeerId second = end.link->add(address);
  child.line.send(end.link->address());
  child.send_signal(SIGCONT);
  exchange(end, second);
  EXPECT_EQ(end.log.losses[second], 0);
  child.line.send(1);
  EXPECT_EQ(child.wait_for_end(), 0);
}

TEST_F(Ucx, AForkedChildGetsAnError) {
  End end(open_ucx());
  const pid_t fork_of_us = fork();
  if (fork_of_us == 0) {
    try {
      open_ucx();
    } catch (const Error& error) {
      _exit(std::string(error.what()).find("forked") == std::string::npos);
    }
    _exit(1);
  }
  int status = -1;
  waitpid(fork_of_us, &status, 0);
  EXPECT_EQ(status, 0);
}

/// Sets an environment variable for its lifetime.
class Set {
 public:
  Set(const char* name, const char* value) : name_(name) { setenv(name, value, /*overwrite=*/1); }
  ~Set() { unsetenv(name_); }
  Set(const Set&) = delete;
  Set& operator=(const Set&) = delete;

 private:
  const char* const name_;
};

TEST_F(Ucx, ReportsThatSettingsLeaveNoTransport) {
  for (const auto& [variable, value] :
       {std::pair("NVX_UCX_TLS", "sm"), std::pair("NVX_UCX_TLS", "nonsense"), std::pair("UCX_TLS", "sm"),
        std::pair("UCX_NET_DEVICES", "nowhere"), std::pair("NVX_UCX_NET_DEVICES", "nowhere")}) {
    std::string what;
    try {
      const Set set(variable, value);
      open_ucx();
    } catch (const Error& error) {
      what = error.what();
    }
    EXPECT_NE(what.find(std::string("no transport to other hosts with ") + variable + "=" + value), what.npos) << what;
    EXPECT_NE(what.find("; this host has "), what.npos) << what;
  }
}

TEST_F(Ucx, UserSettingsOverrideOwnDefaults) {
  const auto described = [] { return open_ucx()->describe(); };
  const Set of_all("UCX_NET_DEVICES", "lo");
  EXPECT_NE(described().find("tcp on lo, host memory"), std::string::npos) << described();
  EXPECT_STREQ(std::getenv("UCX_NET_DEVICES"), "lo");
  const Set of_nvx("NVX_UCX_NET_DEVICES", "nowhere");
  EXPECT_THROW(described(), Error);
}

TEST_F(Ucx, RefusesAPeerWithAnotherUcx) {
  End end(open_ucx());
  const std::vector<std::byte> bytes = end.link->address();
  UcxAddress other = decode_address(bytes).value();
  const UcxVersion mine = other.version;
  other.version = mine < UcxVersion{1, 16, 0} ? UcxVersion{1, 20, 1} : UcxVersion{1, 15, 0};
  try {
    end.link->add(encode_address(other));
    FAIL() << "added";
  } catch (const Error& error) {
    const std::string what = error.what();
    EXPECT_NE(what.find(mine.text()), what.npos) << what;
    EXPECT_NE(what.find(other.version.text()), what.npos) << what;
    EXPECT_NE(what.find("NVX_LIBUCP"), what.npos) << what;
  }
}

}  // namespace
}  // namespace nvx::net::test
