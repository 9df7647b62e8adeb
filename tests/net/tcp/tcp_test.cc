// Links over TCP with a job key, and those who have none.

#include <fcntl.h>
#include <netinet/in.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <algorithm>
#include <atomic>
#include <fstream>
#include <new>

#include "net/child.h"
#include "net/group_port.h"
#include "net/messenger.h"
#include "net/tcp/tcp_wire.h"
#include "support/ranks.h"

namespace nvx::net::test {
namespace {

constexpr char kOtherKey[] = "the key of another job";

std::string why_refused(const std::string& setting) {
  try {
    const JobKey key(setting);
    return "";
  } catch (const Error& error) {
    return error.what();
  }
}

TEST(JobKey, SignsAsHmacSha256) {
  const std::string data = "abcdef", hex = "4f01be1ee64e8004d799dd781f250a9ff1da7a7e75337980672d0ff7c8c60c18";
  const auto bytes = std::as_bytes(std::span(data));
  const Mac mac = some_key().sign("purpose", {bytes.first(2), bytes.subspan(2)});
  std::string text;
  for (const std::byte b : mac) text += "0123456789abcdef"[int(b) >> 4], text += "0123456789abcdef"[int(b) & 15];
  EXPECT_EQ(text, hex);
  EXPECT_TRUE(JobKey::same(mac, mac));
  for (size_t i = 0; i < mac.size(); ++i) {
    Mac other = mac;
    other[i] ^= std::byte(1);
    EXPECT_FALSE(JobKey::same(mac, other));
  }
  EXPECT_NE(mac, some_key().sign("purposes", {bytes.first(2), bytes.subspan(2)}));
  EXPECT_NE(some_key().tag(), JobKey(kOtherKey).tag());
}

TEST(JobKey, IsReadFromAFile) {
  const std::string path = testing::TempDir() + "nvx_job_key" + std::to_string(getpid());
  std::ofstream(path) << "sixteen characters or more\n";
  ASSERT_EQ(chmod(path.c_str(), 0600), 0);
  EXPECT_EQ(JobKey("@" + path).tag(), some_key().tag());
  std::ofstream(path) << "secret\n";
  const std::string why = why_refused("@" + path);
  EXPECT_NE(why.find("has 6 characters; nvx takes 16 to 4096"), why.npos) << why;
  EXPECT_NE(why.find("openssl rand -hex 32"), why.npos) << why;
  std::ofstream(path) << std::string(5000, 'x');
  EXPECT_NE(why_refused("@" + path).find("has 4097 characters"), why.npos);
  std::remove(path.c_str());
  EXPECT_NE(why_refused("@" + path).find(path + " (NVX_JOB_KEY), cannot be read: No such file"), why.npos);
  EXPECT_NE(why_refused("@/").find("is not a file"), why.npos);
}

TEST(JobKey, IsInNoError) {
  for (const std::string key : {"short secret", "0123456"}) EXPECT_EQ(why_refused(key).find(key), std::string::npos);
}

TEST(TcpAddress, IsRefusedUnlessAHolderOfTheKeyHasWrittenAllOfIt) {
  const TcpAddress address{{5, 7}, {HostAddress{4, 80, {10, 0, 0, 7}, {}}, HostAddress{6, 81, {1}, {}}}};
  const std::vector<std::byte> bytes = encode_address(address, some_key());
  const auto back = decode_address(bytes, some_key());
  ASSERT_TRUE(back);
  EXPECT_EQ(back->nonce, address.nonce);
  ASSERT_EQ(back->listeners.size(), 2u);
  EXPECT_EQ(back->listeners[1].port, 81);
  EXPECT_EQ(back->listeners[0].address, address.listeners[0].address);
  EXPECT_FALSE(decode_address(bytes, JobKey(kOtherKey)));
  for (size_t i = 0; i < bytes.size(); ++i) {
    std::vector<std::byte> damaged = bytes;
    damaged[i] ^= std::byte(1);
    EXPECT_FALSE(decode_address(damaged, some_key())) << i;
    EXPECT_FALSE(decode_address(std::span(bytes).first(i), some_key())) << i;
  }
  for (const size_t count : {0, 17})
    EXPECT_FALSE(decode_address(encode_address({{5, 7}, std::vector<HostAddress>(count)}, some_key()), some_key()));
}

/// A connection to a link that does not come from a link.
class RawClient {
 public:
  explicit RawClient(const Link& link) : there_(*decode_address(link.address(), some_key())) {
    fd_ = Fd(socket(there_.listeners[0].family == 4 ? AF_INET : AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0));
    const auto [at, bytes] = sockaddr_of(there_.listeners[0]);
    EXPECT_EQ(connect(fd_.get(), reinterpret_cast<const sockaddr*>(&at), bytes), 0);
  }
  const LinkNonce& nonce() const { return there_.nonce; }
  template <class T>
  void send(const T& value) {
    (void)!::send(fd_.get(), &value, sizeof value, MSG_NOSIGNAL);
  }
  /// Reads from the link, which is driven meanwhile. False if it closes the connection.
  template <class T>
  bool receive(Link& link, T& value) {
    size_t got = 0;
    const auto bytes = std::as_writable_bytes(std::span(&value, 1));
    return test::drive({&link},
                       [&] {
                         const ssize_t n = recv(fd_.get(), bytes.data() + got, bytes.size() - got, MSG_DONTWAIT);
                         ended_ |= n == 0 || (n < 0 && errno != EAGAIN);
                         got += size_t(std::max<ssize_t>(n, 0));
                         return ended_ || got == bytes.size();
                       }) &&
           got == bytes.size();
  }
  bool is_rejected(Link& link) {
    std::byte none;
    return !receive(link, none) && ended_;
  }
  /// A holder's handshake, then one message without a body. Returns the bytes that it has sent.
  std::vector<std::byte> enter(Link& link, const LinkNonce& from, const JobKey& key = some_key()) {
    const ClientHello hello{.from = from, .to = nonce(), .challenge = {}};
    Answer answer;
    send(hello);
    if (!receive(link, answer)) return {};
    EXPECT_EQ(JobKey::same(answer.mac, mac_of(Role::kAccepts, hello, answer.challenge, key)), &key == &some_key());
    const struct {
      Proof proof;
      Frame frame;
    } rest{{mac_of(Role::kConnects, hello, answer.challenge, key)}, {}};
    send(rest);
    std::vector<std::byte> all(sizeof hello + sizeof rest);
    std::memcpy(all.data(), &hello, sizeof hello);
    std::memcpy(all.data() + sizeof hello, &rest, sizeof rest);
    return all;
  }

 private:
  const TcpAddress there_;
  Fd fd_;
  bool ended_ = false;
};

class Tcp : public testing::Test {
 protected:
  bool drive_all(const std::function<bool()>& until, milliseconds timeout = std::chrono::seconds(10)) {
    return drive({a.link.get(), b.link.get()}, timeout, until);
  }
  void SetUp() override {
    a.link->add(b.link->address());
    b.link->add(a.link->address());
  }
  /// Both still exchange messages, and b has received none from others.
  void expect_only_messages_of_a() {
    const size_t had = a.log.messages.size();
    a.send(0, 100, 77);
    b.send(0, 50'000, 78);
    EXPECT_TRUE(drive_all([&] { return a.log.messages.size() == had + 1 && a.all_done_once() && b.all_done_once(); }));
    EXPECT_TRUE(drive_all([&] { return !b.log.messages.empty() && b.log.messages.back().body.size() == 100; }));
    EXPECT_TRUE(std::ranges::all_of(b.log.messages, [](const auto& m) { return m.body.size() == 100; }));
    EXPECT_TRUE(a.log.losses.empty() && b.log.losses.empty());
  }

  End a{open_tcp(some_key())}, b{open_tcp(some_key())};
};

TEST_F(Tcp, AHolderOfTheKeyGetsIn) {
  RawClient client(*b.link);
  ASSERT_FALSE(client.enter(*b.link, {1, 2}).empty());
  EXPECT_TRUE(drive_all([&] { return b.log.messages.size() == 1; })) << "the tests below test nothing";
}

TEST_F(Tcp, ARecordedHandshakeIsWorthNothing) {
  RawClient first(*b.link);
  const std::vector<std::byte> recorded = first.enter(*b.link, {1, 2});
  ASSERT_TRUE(drive_all([&] { return b.log.messages.size() == 1; }));
  b.log.messages.clear();
  RawClient again(*b.link);
  for (const std::byte& one : recorded) again.send(one);
  Answer answer;
  EXPECT_TRUE(again.receive(*b.link, answer)) << "it names the right links";
  EXPECT_TRUE(again.is_rejected(*b.link));
  expect_only_messages_of_a();
}

TEST_F(Tcp, ClientsWithoutTheKeyAreRejected) {
  struct {
    ClientHello hello;
    std::array<std::byte, 100> more;
  } forged{};
  const auto tries = [&](const ClientHello& hello, const char* what) {
    RawClient client(*b.link);
    forged.hello = hello;
    client.send(forged);
    EXPECT_TRUE(client.is_rejected(*b.link)) << what;
  };
  const LinkNonce of_b = RawClient(*b.link).nonce(), of_a = RawClient(*a.link).nonce();
  tries({.magic = 1, .from = {1, 2}, .to = of_b}, "another protocol");
  tries({.from = {1, 2}, .to = of_a}, "a hello for another link, as one that is relayed");
  tries({.from = of_b, .to = of_b}, "a link's own hello");
  tries({}, "nothing known");
  RawClient holder(*b.link);
  holder.enter(*b.link, of_a, JobKey(kOtherKey));
  EXPECT_TRUE(holder.is_rejected(*b.link)) << "another key";
  expect_only_messages_of_a();
}

/// The code that a link shows is no proof for itself, nor for another link.
TEST_F(Tcp, AReflectedCodeIsRefused) {
  const LinkNonce of_a = RawClient(*a.link).nonce();
  for (Link* const peer : {b.link.get(), a.link.get()}) {
    RawClient client(*b.link), oracle(*peer);
    const ClientHello hello{.from = of_a, .to = client.nonce(), .challenge = {}};
    Answer answer, other;
    client.send(hello);
    ASSERT_TRUE(client.receive(*b.link, answer));
    oracle.send(ClientHello{.from = of_a, .to = oracle.nonce(), .challenge = answer.challenge});
    if (oracle.receive(*peer, other))
      client.send(Proof{other.mac});
    else
      client.send(Proof{answer.mac});
    EXPECT_TRUE(client.is_rejected(*b.link));
  }
  expect_only_messages_of_a();
}

TEST_F(Tcp, HalfOpenConnectionsAreBounded) {
  const auto descriptors = [] {
    int count = 0;
    for (int fd = 0; fd < 4096; ++fd) count += fcntl(fd, F_GETFD) >= 0;
    return count;
  };
  const int before = descriptors();
  constexpr int kMany = 300, kMostPending = 128;
  std::deque<RawClient> clients;
  for (int i = 0; i < kMany; ++i) {
    clients.emplace_back(*b.link).send('x');
    b.link->progress();
  }
  while (b.link->progress()) continue;
  const auto asleep = Clock::now();
  b.link->sleep(milliseconds(50));
  EXPECT_GT(Clock::now() - asleep, milliseconds(25)) << "those who wait in the kernel's queue keep the link awake";
  expect_only_messages_of_a();
  EXPECT_LE(descriptors(), before + kMany + kMostPending + 4);
}

/// Each peer may be in its handshake at the same time, and clients that have not authenticated make way first.
TEST_F(Tcp, PeersThatConnectAtOnceAllGetIn) {
  constexpr int kPeers = 160, kUnauthenticated = 200;
  for (int i = 0; i < kPeers; ++i) b.link->add(a.link->address());
  std::deque<RawClient> peers, unauthenticated;
  std::vector<Proof> proofs;
  for (uint64_t i = 0; i < kPeers; ++i) {
    RawClient& peer = peers.emplace_back(*b.link);
    const ClientHello hello{.from = {7, i}, .to = peer.nonce(), .challenge = {}};
    Answer answer;
    peer.send(hello);
    ASSERT_TRUE(peer.receive(*b.link, answer));
    proofs.push_back({mac_of(Role::kConnects, hello, answer.challenge, some_key())});
  }
  for (int i = 0; i < kUnauthenticated; ++i) unauthenticated.emplace_back(*b.link);
  drive_for(milliseconds(300), {b.link.get()});
  for (int i = 0; i < kPeers; ++i) {
    Accepted accepted;
    peers[size_t(i)].send(proofs[size_t(i)]);
    EXPECT_TRUE(peers[size_t(i)].receive(*b.link, accepted)) << i;
  }
}

/// Listens at an address, where it takes a port unless there is one.
Fd impostor_at(HostAddress& address) {
  Fd fd(socket(address.family == 4 ? AF_INET : AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0));
  auto [at, bytes] = sockaddr_of(address);
  EXPECT_EQ(bind(fd.get(), reinterpret_cast<const sockaddr*>(&at), bytes), 0);
  EXPECT_EQ(listen(fd.get(), 1), 0);
  EXPECT_EQ(getsockname(fd.get(), reinterpret_cast<sockaddr*>(&at), &bytes), 0);
  static_assert(offsetof(sockaddr_in, sin_port) == offsetof(sockaddr_in6, sin6_port));
  address.port = ntohs(reinterpret_cast<const sockaddr_in&>(at).sin_port);
  return fd;
}

TEST_F(Tcp, AnImpostorAtOneAddressDoesNotHideThePeerAtAnother) {
  TcpAddress of_b = *decode_address(b.link->address(), some_key());
  HostAddress other = of_b.listeners[0];
  other.port = 0;
  const Fd impostor = impostor_at(other);
  of_b.listeners = {other, of_b.listeners[0]};
  const PeerId to_b = a.link->add(encode_address(of_b, some_key()));
  a.send(to_b, 100);
  a.link->progress();
  const Fd received(accept(impostor.get(), nullptr, nullptr));
  const Answer forged{};
  ASSERT_EQ(::send(received.get(), &forged, sizeof forged, MSG_NOSIGNAL), ssize_t(sizeof forged));
  EXPECT_TRUE(drive_all([&] { return b.log.messages.size() == 1; }));
  EXPECT_TRUE(a.log.losses.empty());
}

/// The kernel sends the next SYN 7 s after the first.
TEST_F(Tcp, ConnectsSoonAfterThePeerAdmitsIt) {
  EventLog log;
  const std::unique_ptr<Link> late = open_tcp(some_key());
  late->listen(log);
  a.send(a.link->add(late->address()), 100);
  const std::vector<Link*> both = {a.link.get(), late.get()};
  drive_for(milliseconds(5200), both);
  EXPECT_TRUE(log.messages.empty());
  late->admit(this_machine());
  EXPECT_TRUE(drive(both, milliseconds(1300), [&] { return log.messages.size() == 1; }));
}

/// The receiver cannot distinguish a connection that is cut from a process that has ended, unless it connects itself.
TEST_F(Tcp, APeerThatGivesUpAMessageIsNotLost) {
  a.send(0, 1);
  ASSERT_TRUE(drive_all([&] { return b.log.messages.size() == 1; }));
  for (int i = 0; i < 4; ++i) a.send(0, 16 << 20);
  a.link->forget(0);
  ASSERT_TRUE(drive({a.link.get()}, [&] { return a.all_done_once(); }));
  EXPECT_NE(a.log.failures, 0u);
  drive_all([] { return false; }, milliseconds(300));
  EXPECT_TRUE(b.log.losses.empty());
  a.link->close();
  EXPECT_TRUE(drive({b.link.get()}, [&] { return b.log.losses[0] == 1; }));
}

TEST_F(Tcp, APeerThatRefusesIsLostBehindItsLastMessages) {
  a.send(0, 1);
  ASSERT_TRUE(drive_all([&] { return b.log.messages.size() == 1; }));
  a.send(0, 2 << 20);
  ASSERT_TRUE(drive({a.link.get()}, [&] { return a.all_done_once(); })) << "the kernel takes less than 2 MiB";
  a.link->close();
  b.send(0, 1);
  ASSERT_TRUE(drive({b.link.get()}, [&] { return b.log.losses[0] == 1; }));
  EXPECT_EQ(b.log.messages.size(), 2u);
  EXPECT_EQ(b.link->obstacle(0), "") << "a filter does not refuse";
}

TEST_F(Tcp, APostByACallbackOfCloseEnds) {
  a.send(0, 100);
  a.log.on_done = [&] { a.send(0, 100); };
  a.link->close();
  EXPECT_TRUE(a.all_done_once());
  EXPECT_EQ(a.log.failures, 2u);
}

TEST_F(Tcp, AProcessThatDoesNotProveItsKeyIsNoPeer) {
  TcpAddress of_b = *decode_address(b.link->address(), some_key());
  b.link->close();
  const Fd impostor = impostor_at(of_b.listeners[0]);
  a.send(0, 100);
  a.link->progress();
  const Fd received(accept(impostor.get(), nullptr, nullptr));
  const Answer forged{};
  ASSERT_EQ(::send(received.get(), &forged, sizeof forged, MSG_NOSIGNAL), ssize_t(sizeof forged));
  EXPECT_TRUE(drive({a.link.get()}, [&] { return a.log.losses[0] == 1 && a.log.failures == 1; }));
  std::array<std::byte, 1000> reported;
  EXPECT_EQ(recv(received.get(), reported.data(), reported.size(), 0), ssize_t(sizeof(ClientHello)))
      << "and is sent nothing";
}

TEST_F(Tcp, ALinkWithAnotherKeyIsRefused) {
  const JobKey other(kOtherKey);
  End c(open_tcp(other));
  try {
    a.link->add(c.link->address());
    FAIL() << "added";
  } catch (const Error& error) {
    EXPECT_NE(std::string(error.what()).find("set NVX_JOB_KEY to the same key"), std::string::npos) << error.what();
  }
}

TEST_F(Tcp, IdentifiesTheSenderOfAMessage) {
  End c(open_tcp(some_key()));
  const PeerId to_c = b.link->add(c.link->address());
  c.link->add(b.link->address());
  size_t checked = 0;
  b.log.on_arrival = [&](const EventLog::Message& message) {
    const bool from_a = message.body.size() == 100;
    EXPECT_EQ(b.link->sent_by(0), from_a);
    EXPECT_EQ(b.link->sent_by(to_c), !from_a);
    ++checked;
  };
  a.send(0, 100);
  c.send(0, 20'000);
  EXPECT_TRUE(drive({a.link.get(), b.link.get(), c.link.get()}, [&] { return checked == 2; }));
}

/// A process's address, as Messenger has it.
std::vector<std::byte> address_of(uint64_t process, const Link& link) {
  std::vector<std::byte> address(sizeof process);
  std::memcpy(address.data(), &process, sizeof process);
  const std::vector<std::byte> behind = link.address();
  address.insert(address.end(), behind.begin(), behind.end());
  return address;
}

/// A process sends messages of its own ranks only.
TEST_F(Tcp, AMessageInTheNameOfAnotherProcessIsDropped) {
  const auto messenger = std::make_shared<Messenger>(open_tcp(some_key()), std::chrono::seconds(10));
  messenger->admit(this_machine());
  GroupPort port(messenger, /*group=*/9, /*rank=*/0, /*size=*/3);
  std::vector<int> failed;
  {
    MutexLock lock(port.mutex());
    port.connect(1, address_of(1, *a.link));
    port.connect(2, address_of(2, *b.link));
    port.on_failure([&](const GroupPort::ReportedFailure& reported) { failed.push_back(reported.by); });
  }
  const std::vector<std::byte> of_messenger = messenger->address();
  const auto poison = [&](End& end, uint32_t rank) {
    MessageHeader header(Kind::kPoison);
    header.group = 9;
    header.from = rank;
    Post& post = end.posts.emplace_back();
    post.to = end.link->add(std::span(of_messenger).subspan(sizeof(ProcessId)));
    post.header_bytes = sizeof header;
    std::memcpy(post.header, &header, sizeof header);
    end.link->post(post);
    EXPECT_TRUE(drive({end.link.get()}, [&] { return end.all_done_once(); }));
  };
  const auto has_failed = [&] {
    MutexLock lock(port.mutex());
    return !failed.empty();
  };
  poison(b, 1);
  std::this_thread::sleep_for(milliseconds(100));
  EXPECT_FALSE(has_failed()) << "rank 2's process has sent as rank 1";
  poison(a, 1);
  EXPECT_TRUE(drive({a.link.get()}, has_failed));
  MutexLock lock(port.mutex());
  EXPECT_EQ(failed, std::vector{1});
}

/// The progress thread, which nobody waits for, goes on.
TEST_F(Tcp, AnExceptionOfASenderIsContained) {
  struct Throws final : Sender {
    void sent(uint64_t, const Status&) override {
      if (++calls == 1) throw std::bad_alloc();
    }
    std::atomic<int> calls{0};
  } sender;
  Messenger messenger(open_tcp(some_key()), std::chrono::seconds(10));
  {
    MutexLock lock(messenger.mutex());
    const PeerId peer = messenger.connect(address_of(1, *a.link));
    for (int i = 0; i < 3; ++i) messenger.send(peer, MessageHeader(Kind::kPing), {}, {}, &sender);
  }
  EXPECT_TRUE(drive({a.link.get()}, [&] { return sender.calls == 3; }));
}

TEST_F(Tcp, ConnectionsWaitForAFreeDescriptor) {
  if (const char* why = nvx::test::why_no_processes()) GTEST_SKIP() << why;
  Child child("tcp", [](End& end, Line& line) {
    const Fd lowest(dup(STDIN_FILENO));
    rlimit limit{};
    ASSERT_EQ(getrlimit(RLIMIT_NOFILE, &limit), 0);
    const rlim_t before = std::exchange(limit.rlim_cur, rlim_t(lowest.get()));
    ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);
    EXPECT_EQ(end.link->obstacle(0), "");
    line.send(1);
    EXPECT_TRUE(drive(end, [&] { return end.link->obstacle(0).find("(ulimit -n)") != std::string::npos; }));
    EXPECT_TRUE(end.log.messages.empty());
    limit.rlim_cur = before;
    ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &limit), 0);
    EXPECT_TRUE(drive(end, [&] { return end.log.messages.size() == 1; }));
    line.send(2);
  });
  const PeerId peer = child.exchange_addresses(a);
  EXPECT_EQ(child.line.receive_number(), 1u);
  a.send(peer, 100);
  EXPECT_TRUE(drive(a, [&] { return a.all_done_once(); }));
  EXPECT_EQ(child.line.receive_number(), 2u);
  EXPECT_EQ(child.wait_for_end(), 0);
}

}  // namespace
}  // namespace nvx::net::test
