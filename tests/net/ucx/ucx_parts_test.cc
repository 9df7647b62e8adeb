// The decisions of a UCX link before it uses UCX: library, interfaces, reachable peers.

#include <net/if.h>
#include <netinet/in.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <fstream>
#include <set>

#include "base/handle.h"
#include "gtest/gtest.h"
#include "net/interfaces.h"
#include "net/ucx/ucx_address.h"
#include "net/ucx/ucx_search.h"
#include "support/ranks.h"

namespace nvx::net::test {
namespace {

std::vector<std::byte> some_bytes(size_t count) {
  std::vector<std::byte> made(count);
  for (size_t i = 0; i < count; ++i) made[i] = std::byte(i * 37);
  return made;
}

TEST(UcxAddress, ComesBackAsItWent) {
  const std::vector<std::byte> worker = some_bytes(79);
  const std::vector<std::byte> bytes = encode_address({{1, 13, 1}, {5, 7}, worker});
  const UcxAddress back = decode_address(bytes).value();
  EXPECT_EQ(back.version, (UcxVersion{1, 13, 1}));
  EXPECT_EQ(back.nonce, (LinkNonce{5, 7}));
  EXPECT_TRUE(std::equal(back.worker.begin(), back.worker.end(), worker.begin(), worker.end()));
}

HostAddress address_of(uint16_t family, std::array<uint8_t, 16> address, const std::string& interface) {
  HostAddress host{family, 0, address, {}};
  std::copy_n(interface.begin(), std::min<size_t>(interface.size(), 16), host.interface.begin());
  return host;
}

TEST(UcxAddress, ContainsTheHostsAddresses) {
  const std::vector<std::byte> worker = some_bytes(79);
  const HostAddress there = address_of(4, {10, 0, 0, 7}, "eth0");
  const auto encoded = encode_address(
      {{1, 13, 1}, {5, 7}, worker, {there, HostAddress{}}});  // the decoded address refers to this memory
  const UcxAddress back = decode_address(encoded).value();
  ASSERT_EQ(back.reached_at.size(), 2u);
  EXPECT_EQ(back.reached_at[0].text(), "10.0.0.7 (eth0)");
  EXPECT_TRUE(std::equal(back.worker.begin(), back.worker.end(), worker.begin(), worker.end()));
  EXPECT_FALSE(decode_address(encode_address({{1, 13, 1}, {5, 7}, worker, std::vector<HostAddress>(17)})));
  EXPECT_EQ(address_of(6, {0x20, 1}, "\x1b\xff whatever it says").text(), "2001:: ( ? whatever it s)");
  EXPECT_EQ(address_of(9, {}, "").text(), "? ()");
}

TEST(Places, TheKernelReportsWhetherARouteExists) {
  const HostAddress here = address_of(4, {127, 0, 0, 1}, "lo");
  const HostAddress nowhere = address_of(4, {255, 255, 255, 255}, "eth0");  // broadcast datagrams need permission
  const HostAddress neither = address_of(9, {}, "eth0");
  EXPECT_EQ(why_out_of_reach(std::vector{here}), "");
  EXPECT_EQ(why_out_of_reach(std::vector{neither, here}), "");
  EXPECT_EQ(why_out_of_reach(std::vector{nowhere}), "") << "an unrelated message is no answer of the route";
  EXPECT_EQ(why_out_of_reach({}), "");
  EXPECT_EQ(describe_route(std::vector{here}), "between 127.0.0.1 (lo) here and 127.0.0.1 (lo) there");
}

TEST(Places, OfTheLoopbackOnlyIfThereIsNothingElse) {
  const std::vector<std::string> lo{"lo"}, none;
  const std::vector<HostAddress> found = host_addresses(lo);
  ASSERT_FALSE(found.empty());
  EXPECT_EQ(found[0].text(), "127.0.0.1 (lo)");
  EXPECT_TRUE(host_addresses(none).empty());
}

/// In a network namespace of its own: gives its loopback an address with a label.
bool label_an_address() {
  if (unshare(CLONE_NEWUSER | CLONE_NEWNET) != 0) return false;
  const Fd fd(socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  ifreq labelled{.ifr_ifrn = {.ifrn_name = "lo:1"}, .ifr_ifru = {}},
      lo{.ifr_ifrn = {.ifrn_name = "lo"}, .ifr_ifru = {}};
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(0x0a000007);
  std::memcpy(&labelled.ifr_addr, &address, sizeof address);
  lo.ifr_flags = IFF_UP;
  return ioctl(fd.get(), SIOCSIFADDR, &labelled) == 0 && ioctl(fd.get(), SIOCSIFFLAGS, &lo) == 0;
}

TEST(Places, OfALabelledAddressIsItsInterface) {
  if (const char* why = nvx::test::why_no_processes()) GTEST_SKIP() << why;
  const pid_t child = fork();
  if (child == 0) {
    if (!label_an_address()) _exit(1);
    const std::vector<std::string> lo{"lo"};
    const auto labelled = [](const HostAddress& host) { return host.text() == "10.0.0.7 (lo)"; };
    _exit(std::ranges::any_of(host_addresses(lo), labelled) ? 0 : 2);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  if (status == 1 << 8) GTEST_SKIP() << "this user cannot make a network namespace";
  EXPECT_EQ(status, 0);
}

TEST(UcxAddress, RefusesEveryDamage) {
  const std::vector<std::byte> worker = some_bytes(79);
  const std::vector<std::byte> bytes = encode_address({{1, 13, 1}, {5, 7}, worker});
  for (size_t i = 0; i < bytes.size(); ++i) {
    EXPECT_FALSE(decode_address(std::span(bytes).first(i))) << i;
    std::vector<std::byte> damaged = bytes;
    damaged[i] ^= std::byte(0x10);
    const bool in_version_or_nonce = (i >= 8 && i < 20) || (i >= 24 && i < 40);
    EXPECT_EQ(decode_address(damaged).has_value(), in_version_or_nonce) << i;
  }
  EXPECT_FALSE(decode_address(encode_address({{1, 13, 1}, {5, 7}, {}})));
  EXPECT_FALSE(decode_address(encode_address({{1, 13, 1}, {5, 7}, some_bytes(70'000)})));
}

TEST(UcxAddress, MixesVersionsOnOneSideOf116Only) {
  struct Row {
    UcxVersion mine, theirs;
    bool together;
  };
  constexpr Row kRows[] = {
      {{1, 13, 1}, {1, 13, 1}, true},  {{1, 13, 0}, {1, 15, 0}, true},  {{1, 16, 0}, {1, 22, 0}, true},
      {{1, 15, 0}, {1, 16, 0}, false}, {{1, 22, 0}, {1, 13, 1}, false}, {{2, 0, 0}, {1, 20, 1}, true},
  };
  for (const Row& row : kRows) {
    EXPECT_EQ(why_not_together(row.mine, row.theirs).empty(), row.together)
        << row.mine.text() << " with " << row.theirs.text();
  }
}

TEST(UcxSearch, PrefersRdmaWhereThereIsRdmaThenTheNewer) {
  const UcxCandidate old{"/old", {1, 12, 1}, true}, system{"/system", {1, 16, 0}, true},
      wheel{"/wheel", {1, 22, 0}, false}, nameless{"/nameless", {}, false};
  const auto paths = [&](bool rdma) {
    std::vector<std::string> found;
    for (const UcxCandidate& candidate : in_order({nameless, old, system, wheel}, rdma))
      found.push_back(candidate.path);
    return found;
  };
  EXPECT_EQ(paths(true), (std::vector<std::string>{"/system", "/wheel", "/nameless"}));
  EXPECT_EQ(paths(false), (std::vector<std::string>{"/wheel", "/system", "/nameless"}));
}

TEST(UcxSearch, ReadsTheVersionFromAFile) {
  const std::string folder = testing::TempDir() + "nvx_ucx_search";
  ASSERT_EQ(system(("mkdir -p " + folder + "/ucx").c_str()), 0);
  const std::string path = folder + "/libucp.so.0";
  const auto write = [&](const std::string& bytes) { std::ofstream(path, std::ios::binary) << bytes; };
  const auto version = [&] { return candidates_at(folder).at(0).version; };
  std::string file = "ELF|GLIBC_2.2.5|xx1.2|q1.22.0| 1.19.0 |";
  std::replace(file.begin(), file.end(), '|', '\0');
  write(file);
  EXPECT_EQ(version(), (UcxVersion{1, 22, 0}));
  write("nothing of the kind 1.2.3.4.");
  EXPECT_EQ(version(), UcxVersion());
  write("");
  EXPECT_EQ(version(), UcxVersion());
  EXPECT_FALSE(candidates_at(path).at(0).rdma);
  std::ofstream(folder + "/ucx/libuct_ib.so.0") << "x";
  EXPECT_TRUE(candidates_at(path).at(0).rdma);
  EXPECT_TRUE(candidates_at(folder + "/nowhere").empty());
  EXPECT_TRUE(candidates_at(folder + "/ucx").empty());
  ASSERT_EQ(system(("rm -r " + folder).c_str()), 0);
}

TEST(UcxSearch, FindsWhatItIsPointedToOnce) {
  const std::string folder = testing::TempDir() + "nvx_ucx_place_" + std::to_string(getpid());
  ASSERT_EQ(mkdir(folder.c_str(), 0700), 0);
  std::ofstream(folder + "/libucp.so.0") << "no library";
  add_ucx_place(folder);
  add_ucx_place(folder + "/libucp.so.0");
  std::set<std::string> paths;
  for (const UcxCandidate& candidate : find_ucx()) {
    EXPECT_TRUE(paths.insert(candidate.path).second) << candidate.path;
  }
  EXPECT_EQ(paths.count(folder + "/libucp.so.0"), 1u);
  unlink((folder + "/libucp.so.0").c_str());
  rmdir(folder.c_str());
}

TEST(Interfaces, AreChosenByNcclsAndGloosVariables) {
  const std::vector<Interface> present = {{"lo", true, false},
                                          {"eth0", false, false},
                                          {"eth1", false, false},
                                          {"ib0", false, false},
                                          {"docker0", false, true}};
  struct Row {
    const char* variable;
    const char* text;
    const char* chosen;
  };
  constexpr Row kRows[] = {
      {nullptr, "", "eth0 eth1 ib0 "},
      {"NVX_SOCKET_IFNAME", "eth", "eth0 eth1 "},
      {"NVX_SOCKET_IFNAME", "=eth", ""},
      {"NVX_SOCKET_IFNAME", "=eth1", "eth1 "},
      {"NVX_SOCKET_IFNAME", "eth0,ib", "eth0 ib0 "},
      {"NVX_SOCKET_IFNAME", "^eth0,ib", "eth1 "},
      {"NVX_SOCKET_IFNAME", "^=eth", "eth0 eth1 ib0 "},
      {"NVX_SOCKET_IFNAME", "lo", "lo "},
      {"NVX_SOCKET_IFNAME", "docker0", "docker0 "},
      {"GLOO_SOCKET_IFNAME", "eth", ""},
      {"GLOO_SOCKET_IFNAME", "eth1,eth0", "eth0 eth1 "},
  };
  for (const Row& row : kRows) {
    const bool exact = row.variable && row.variable[0] == 'G';
    std::string chosen;
    for (const std::string& name : choose({row.variable, row.text, exact}, present)) chosen += name + " ";
    EXPECT_EQ(chosen, row.chosen) << row.text;
  }
  const std::vector<Interface> alone = {{"lo", true, false}};
  EXPECT_EQ(choose({}, alone), std::vector<std::string>{"lo"});
  EXPECT_EQ(choose({}, present, "eth1"), std::vector<std::string>{"eth1"}) << "which is known to lead to the others";
  EXPECT_EQ(choose({}, present, "lo").size(), 3u) << "which leads to this host only";
  EXPECT_EQ(choose({}, present, "gone0").size(), 3u);
  EXPECT_EQ(choose({"NVX_SOCKET_IFNAME", "ib0", false, true}, present, "eth1"), std::vector<std::string>{"ib0"});
}

TEST(Interfaces, OfRailsAreTheWayToTheOthersAndCardsThatAreNoSlower) {
  const std::vector<Interface> present = {{"lo", true, false, false, 0},        {"eth0", false, false, true, 1000},
                                          {"ib0", false, false, true, 200'000}, {"ib1", false, false, true, 200'000},
                                          {"docker0", false, true, false, 0},   {"veth7", false, false, false, 10'000},
                                          {"br0", false, true, true, 200'000},  {"wg0", false, false, false, 0, true}};
  using Names = std::vector<std::string>;
  EXPECT_EQ(with_rails("eth0", present), (Names{"eth0", "ib0", "ib1"}));
  EXPECT_EQ(with_rails("ib0", present), (Names{"ib0", "ib1"}));
  EXPECT_EQ(with_rails("veth7", present), (Names{"ib0", "ib1", "veth7"})) << "a container's second network";
  EXPECT_EQ(with_rails("wg0", present), Names{"wg0"}) << "what is to be encrypted must not leave by a card";
  EXPECT_EQ(with_rails("gone0", present), Names());
  const std::vector<Interface> clouds = {{"ens5", false, false, true, 0}, {"ens6", false, false, true, 0}};
  EXPECT_EQ(with_rails("ens5", clouds), (Names{"ens5", "ens6"})) << "which do not report their speed";
}

TEST(Interfaces, AreTriedFromTheFastestOn) {
  const std::vector<Interface> present = {{"bad0", false, false, true, 1000},
                                          {"eth0", false, false, true, 1000},
                                          {"eth1", false, false, true, 100'000},
                                          {"new0", false, false, true, 0}};
  using Names = std::vector<std::string>;
  const Names all = {"bad0", "eth0", "eth1", "new0"};
  EXPECT_EQ(fast_first(all, present, "eth0"), (Names{"eth1", "eth0", "bad0", "new0"}));
  EXPECT_EQ(fast_first(all, present, "new0"), (Names{"new0", "eth1", "bad0", "eth0"})) << "it may be the fastest";
  EXPECT_EQ(fast_first(all, present, ""), (Names{"eth1", "bad0", "eth0", "new0"}));
}

TEST(Interfaces, ThatAreNotThereAreNamedBesideThoseThatAre) {
  const std::vector<Interface> present = {{"lo", true, false}, {"eth0", false, false}};
  EXPECT_EQ(
      text_of(none_named({"NVX_SOCKET_IFNAME", "etth0", false, true}, present)),
      "nvx: NVX_SOCKET_IFNAME=etth0 names no interface that is up on this host, where there are lo, eth0. Next: name "
      "one of them, or unset it");
  EXPECT_EQ(text_of(none_named({"GLOO_SOCKET_IFNAME", "etth0", true}, std::span(present).first(1))),
            "nvx: GLOO_SOCKET_IFNAME=etth0 names no interface that is up on this host, where there is lo; any may be "
            "used (NVX_DEBUG=info logs which), unless NVX_SOCKET_IFNAME names one");
  const std::string nothing = text_of(none_named({"NVX_SOCKET_IFNAME", "x", false, true}, {}));
  EXPECT_NE(nothing.find("there is none. Next"), std::string::npos) << nothing;
}

TEST(Interfaces, ThatLeadToThisHostItselfOrToNobodyAreNone) {
  for (const char* host : {"", "127.0.0.1", "localhost", "no.such.host.invalid"})
    EXPECT_EQ(interface_to(host), "") << host;
}

TEST(Interfaces, AreThere) {
  const std::vector<Interface> present = interfaces();
  EXPECT_TRUE(std::any_of(present.begin(), present.end(), [](const Interface& i) { return !i.name.empty(); }));
}

}  // namespace
}  // namespace nvx::net::test
