// Which addresses a filter lets in, and that nothing else reaches a socket that has it.
#include "net/source_filter.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>

#include <chrono>
#include <cstring>
#include <exception>
#include <memory>
#include <thread>

#include "base/error.h"
#include "base/handle.h"
#include "net/host_address.h"
#include "net/ucx/ucx_listeners.h"

namespace nvx::net::test {
namespace {

std::vector<AddressPrefix> prefixes(const std::string& list) { return parse_prefixes(list).value(); }

/// Runs a program as the kernel does, on a packet from this address: what it returns.
uint32_t run(const std::vector<sock_filter>& program, const std::string& from) {
  const AddressPrefix source = AddressPrefix::parse(from).value();
  uint8_t packet[64] = {uint8_t(source.family << 4)};
  const size_t at = source.family == 4 ? 12 : 8;
  std::memcpy(packet + at, source.address.data() + source.begin() / 8, source.family == 4 ? 4 : 16);
  uint32_t a = 0, memory[BPF_MEMWORDS] = {};
  for (size_t pc = 0; pc < program.size(); ++pc) {
    const sock_filter& f = program[pc];
    const size_t offset = f.k - uint32_t(SKF_NET_OFF);
    switch (f.code) {
      case BPF_LD | BPF_B | BPF_ABS: a = packet[offset]; break;
      case BPF_LD | BPF_W | BPF_ABS:
        std::memcpy(&a, packet + offset, 4);
        a = ntohl(a);
        break;
      case BPF_ST: memory[f.k] = a; break;
      case BPF_LD | BPF_MEM: a = memory[f.k]; break;
      case BPF_ALU | BPF_RSH | BPF_K: a >>= f.k; break;
      case BPF_ALU | BPF_AND | BPF_K: a &= f.k; break;
      case BPF_JMP | BPF_JA: pc += f.k; break;
      case BPF_JMP | BPF_JEQ | BPF_K: pc += a == f.k ? f.jt : f.jf; break;
      case BPF_RET | BPF_K: return f.k;
      default: ADD_FAILURE() << "an instruction that no filter needs: " << f.code; return 0;
    }
  }
  ADD_FAILURE() << "a filter that ends without a verdict";
  return 0;
}

bool lets_in(const std::string& admitted, const std::string& from) {
  return run(source_filter(prefixes(admitted)), from) != 0;
}

TEST(SourceFilter, LetsInTheseAddressesAlone) {
  struct Row {
    const char* admitted;
    const char* from;
    bool in;
  };
  constexpr Row kRows[] = {
      {"", "10.0.0.1", false},
      {"", "::1", false},
      {"10.0.0.1", "10.0.0.1", true},
      {"10.0.0.1", "10.0.0.2", false},
      {"10.0.0.1", "::ffff:10.0.0.1", true},
      {"10.0.0.1", "a00:1::", false},
      {"10.0.0.1,10.0.0.3,192.168.7.9", "192.168.7.9", true},
      {"10.1.0.0/16", "10.1.255.3", true},
      {"10.1.0.0/16", "10.2.0.0", false},
      {"10.0.0.0/31", "10.0.0.1", true},
      {"10.0.0.0/31", "10.0.0.2", false},
      {"fd00::1", "fd00::1", true},
      {"fd00::1", "fd00::2", false},
      {"fd00::1", "fd00::1:0:0:1", false},
      {"fd00::1", "10.0.0.1", false},
      {"fd00:1:2:3::/64", "fd00:1:2:3:4:5:6:7", true},
      {"fd00:1:2:3::/64", "fd00:1:2:4::", false},
      {"fd00::/9", "fd7f::1", true},
      {"fd00::/9", "fd80::1", false},
      {"10.0.0.1,fd00::1,fd00::2", "fd00::2", true},
      {"0.0.0.0/0", "8.8.8.8", true},
      {"0.0.0.0/0", "::1", false},
      {"::/0", "2001:db8::1", true},
      {"::/0", "8.8.8.8", false},
  };
  for (const Row& row : kRows) EXPECT_EQ(lets_in(row.admitted, row.from), row.in) << row.admitted << " " << row.from;
}

TEST(SourceFilter, OfManyAddressesLetsInEachOfThem) {
  std::string list;
  for (int i = 0; i < 400; ++i) list += "10.0." + std::to_string(i / 4) + "." + std::to_string(3 * (i % 4)) + ",";
  for (int i = 0; i < 100; ++i) list += "fd00::" + std::to_string(2 * i) + ",";
  const std::vector<sock_filter> program = source_filter(prefixes(list));
  EXPECT_LE(program.size(), size_t(BPF_MAXINSNS));
  for (const AddressPrefix& prefix : prefixes(list)) EXPECT_NE(run(program, prefix.text()), 0u) << prefix.text();
  for (const char* other : {"10.0.0.1", "10.0.99.10", "10.1.0.0", "fd00::1", "fd00::200"})
    EXPECT_EQ(run(program, other), 0u) << other;
}

sockaddr_storage address_of(const std::string& text, uint16_t port, socklen_t& bytes) {
  sockaddr_storage storage{};
  auto& in = reinterpret_cast<sockaddr_in&>(storage);
  auto& in6 = reinterpret_cast<sockaddr_in6&>(storage);
  if (inet_pton(AF_INET, text.c_str(), &in.sin_addr) == 1) {
    in.sin_family = AF_INET, in.sin_port = htons(port), bytes = sizeof in;
  } else {
    inet_pton(AF_INET6, text.c_str(), &in6.sin6_addr);
    in6.sin6_family = AF_INET6, in6.sin6_port = htons(port), bytes = sizeof in6;
  }
  return storage;
}

Fd socket_at(const std::string& own, uint16_t port) {
  socklen_t bytes = 0;
  const sockaddr_storage address = address_of(own, port, bytes);
  Fd fd(socket(address.ss_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (bind(fd.get(), reinterpret_cast<const sockaddr*>(&address), bytes) != 0) fd.reset();
  return fd;
}

/// As UCX's: bound to one address, and never waited for.
struct Listening {
  explicit Listening(const std::string& own) : at(own), fd(socket_at(own, 0)) {
    sockaddr_storage bound{};
    socklen_t bytes = sizeof bound;
    if (!fd || listen(fd.get(), 16) != 0 || getsockname(fd.get(), reinterpret_cast<sockaddr*>(&bound), &bytes) != 0)
      return;
    port = ntohs(reinterpret_cast<const sockaddr_in&>(bound).sin_port);  // at the same place in both
  }
  /// As a worker's address contains it.
  std::vector<std::byte> address() const { return {std::byte(1), std::byte(port >> 8), std::byte(port), std::byte(2)}; }
  Fd accept() const { return Fd(accept4(fd.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK)); }
  std::string at;
  Fd fd;
  uint16_t port = 0;
};

bool comes_true(int fd, short event, int ms) {
  pollfd what{fd, event, 0};
  return poll(&what, 1, ms) == 1;
}

/// A connection from that address, once it is made; none if it is not within a moment.
Fd connected(const Listening& to, const std::string& from) {
  Fd fd = socket_at(from, 0);
  socklen_t bytes = 0;
  const sockaddr_storage there = address_of(to.at, to.port, bytes);
  if (fd && connect(fd.get(), reinterpret_cast<const sockaddr*>(&there), bytes) != 0 && errno != EINPROGRESS)
    fd.reset();
  if (fd && !comes_true(fd.get(), POLLOUT, 200)) fd.reset();
  return fd;
}

TEST(SourceFilter, AcceptsConnectionsOfPeersOnly) {
  Listening listening("127.0.0.1");
  ASSERT_NE(listening.port, 0);
  ASSERT_EQ(attach_source_filter(listening.fd.get(), {}), 0u);
  EXPECT_FALSE(connected(listening, "127.0.0.2"));
  EXPECT_GT(dropped_by(listening.fd.get()), 0u);
  ASSERT_EQ(attach_source_filter(listening.fd.get(), prefixes("127.0.0.2,127.0.0.4")), 2u);
  const Fd peer = connected(listening, "127.0.0.2");
  EXPECT_TRUE(peer);
  EXPECT_FALSE(connected(listening, "127.0.0.3"));
  const Fd accepted = listening.accept();
  ASSERT_TRUE(accepted);
  sock_filter inherited[BPF_MAXINSNS];
  socklen_t instructions = BPF_MAXINSNS;
  ASSERT_EQ(getsockopt(accepted.get(), SOL_SOCKET, SO_GET_FILTER, inherited, &instructions), 0);
  EXPECT_EQ(instructions, source_filter(prefixes("127.0.0.2,127.0.0.4")).size());
  EXPECT_EQ(send(peer.get(), "x", 1, 0), 1);
  EXPECT_TRUE(comes_true(accepted.get(), POLLIN, 1000));
  detach_source_filter(accepted.get());
  detach_source_filter(listening.fd.get());
  instructions = BPF_MAXINSNS;
  EXPECT_EQ(getsockopt(accepted.get(), SOL_SOCKET, SO_GET_FILTER, inherited, &instructions), 0);
  EXPECT_EQ(instructions, 0u);
  EXPECT_FALSE(connected(listening, "127.0.0.3")) << "the listener keeps it";
}

TEST(SourceFilter, WorksOverIPv6) {
  Listening listening("::1");
  if (listening.port == 0) GTEST_SKIP() << "no IPv6 here";
  ASSERT_TRUE(attach_source_filter(listening.fd.get(), prefixes("fd00::1,127.0.0.1")));
  EXPECT_FALSE(connected(listening, "::1"));
  ASSERT_TRUE(attach_source_filter(listening.fd.get(), prefixes("fd00::1,::1")));
  EXPECT_TRUE(connected(listening, "::1"));
}

TEST(SourceFilter, OfMoreThanAKernelTakesIsMadeShorter) {
  Listening listening("127.0.0.1");
  std::vector<AddressPrefix> many = prefixes("127.0.0.2");
  for (int i = 0; i < 60'000; ++i) {
    AddressBytes bytes{0xfd};
    bytes[6] = uint8_t(i >> 8), bytes[9] = uint8_t(i), bytes[15] = 1;
    many.push_back(AddressPrefix::of(bytes));
  }
  for (int times = 0; times < 3; ++times) {
    const auto kept = attach_source_filter(listening.fd.get(), many);
    ASSERT_TRUE(kept);
    EXPECT_LT(*kept, many.size());
  }
  EXPECT_TRUE(connected(listening, "127.0.0.2"));
  EXPECT_FALSE(connected(listening, "127.0.0.3"));
}

TEST(UcxListeners, TakeAwayWhatConnectedBeforeTheyWereShut) {
  Listening others("127.0.0.1");
  UcxListeners listeners;
  Listening listening("127.0.0.1");
  ASSERT_TRUE(listening.port != 0 && others.port != 0);
  const Fd first = connected(listening, "127.0.0.2"), second = connected(listening, "127.0.0.2");
  const Fd elsewhere = connected(others, "127.0.0.2");
  ASSERT_TRUE(first && second && elsewhere);
  const Fd accepted = listening.accept();  // as UCX's thread does
  ASSERT_TRUE(accepted);
  ASSERT_EQ(send(first.get(), "first", 5, 0), 5);
  ASSERT_TRUE(comes_true(accepted.get(), POLLIN, 1000));
  listeners.restrict_to_admitted(listening.address(), 1);
  char bytes[8];
  EXPECT_EQ(recv(accepted.get(), bytes, sizeof bytes, 0), 0) << "what had arrived is thrown away";
  EXPECT_FALSE(listening.accept());
  EXPECT_FALSE(connected(listening, "127.0.0.2"));
  EXPECT_GT(listeners.dropped(), 0u);
  EXPECT_TRUE(others.accept()) << "a listener of another owner stays as it is";
  EXPECT_TRUE(connected(others, "127.0.0.2"));
  listeners.admit(prefixes("127.0.0.3"));
  listeners.admit(prefixes("127.0.0.4"));
  EXPECT_TRUE(connected(listening, "127.0.0.3"));
  EXPECT_TRUE(connected(listening, "127.0.0.4"));
  EXPECT_FALSE(connected(listening, "127.0.0.2"));
}

TEST(UcxListeners, DoNotCountTheResetsOfAConnectionThatWasLost) {
  UcxListeners listeners;
  Listening listening("127.0.0.1");
  listeners.restrict_to_admitted(listening.address(), 1);
  listeners.connection_lost();
  EXPECT_FALSE(connected(listening, "127.0.0.2"));
  EXPECT_EQ(listeners.dropped(), 0u);
  std::this_thread::sleep_for(std::chrono::milliseconds(1100));
  EXPECT_EQ(listeners.dropped(), 0u);
  EXPECT_FALSE(connected(listening, "127.0.0.2"));
  EXPECT_GT(listeners.dropped(), 0u) << "a second later they are of others";
}

TEST(UcxListeners, LeaveAloneWhatHasTakenTheNumberOfAClosedOne) {
  UcxListeners listeners;
  auto listening = std::make_unique<Listening>("127.0.0.1");
  listeners.restrict_to_admitted(listening->address(), 1);
  const int number = listening->fd.get();
  listening.reset();
  Listening next("127.0.0.1");
  ASSERT_EQ(next.fd.get(), number);
  listeners.admit(prefixes("127.0.0.3"));
  EXPECT_TRUE(connected(next, "127.0.0.2"));
  EXPECT_EQ(listeners.dropped(), 0u);
}

TEST(UcxListeners, AdmitAgainAfterAFailure) {
  UcxListeners listeners;
  Listening listening("127.0.0.1");
  listeners.restrict_to_admitted(listening.address(), 1);
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &before), 0);
  const rlimit none{.rlim_cur = 1, .rlim_max = before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &none), 0);
  std::exception_ptr failure;
  try {
    listeners.admit(prefixes("127.0.0.2"));
  } catch (...) {
    failure = std::current_exception();
  }
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &before), 0);  // UBSan needs a descriptor for a look at the error
  ASSERT_TRUE(failure) << "no descriptor is free";
  try {
    std::rethrow_exception(failure);
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("nvx gets no descriptor for a socket"), std::string::npos) << error.what();
  }
  EXPECT_FALSE(connected(listening, "127.0.0.2"));
  listeners.admit(prefixes("127.0.0.2"));
  EXPECT_TRUE(connected(listening, "127.0.0.2"));
}

TEST(UcxListeners, AreAllTheNewOnesWhereTheAddressNamesTooFew) {
  UcxListeners listeners;
  Listening one("127.0.0.1"), two("127.0.0.1");
  listeners.restrict_to_admitted(one.address(), 2);
  EXPECT_FALSE(connected(one, "127.0.0.2"));
  EXPECT_FALSE(connected(two, "127.0.0.2"));
}

}  // namespace
}  // namespace nvx::net::test
