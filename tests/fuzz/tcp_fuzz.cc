// Both ends of a TCP connection receive anything: a stranger's bytes never become a message, a peer's bytes are written
// only where the receiver places them, and memory stays bounded.

#include <arpa/inet.h>
#include <fuzzer/FuzzedDataProvider.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/socket.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "frames.h"
#include "net/tcp/tcp_incoming.h"
#include "net/tcp/tcp_outgoing.h"

namespace nvx::net {
namespace {

constexpr size_t kMostPlaced = 1 << 20;
constexpr LinkNonce kSelf{0x11, 0x22}, kPeer{0x33, 0x44};

void require(bool holds) {
  if (!holds) std::abort();
}

const JobKey& key() {
  static const JobKey& key = *new JobKey("a key of some length for the fuzzer");
  return key;
}

void send_all(int fd, const void* bytes, size_t size) {
  for (size_t sent = 0; sent < size;) {
    const ssize_t n = send(fd, static_cast<const std::byte*>(bytes) + sent, size - sent, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n <= 0) return;
    sent += size_t(n);
  }
}

template <class Message>
bool receive_whole(int fd, Message& message) {
  return recv(fd, &message, sizeof message, MSG_DONTWAIT) == ssize_t(sizeof message);
}

/// Gives each body that it places an allocation of its own, for AddressSanitizer.
class Taker final : public Receiver {
 public:
  explicit Taker(bool places) : places_(places) {}
  ~Taker() override { require(placed_.empty()); }

  std::byte* place(std::span<const std::byte> header, size_t bytes) override {
    require(header.size() <= kMostHeader);
    if (!places_ || bytes > kMostPlaced) return nullptr;
    auto memory = std::make_unique<std::byte[]>(bytes);
    std::byte* const at = memory.get();
    placed_.emplace(at, std::move(memory));
    return at;
  }
  void arrived(std::span<const std::byte> header, std::span<const std::byte> body) override {
    ++arrivals;
    require(header.size() <= kMostHeader);
    for (const std::span<const std::byte> part : {header, body}) {
      for (const std::byte byte : part) sum_ = sum_ + unsigned(byte);  // all of it is accessible
    }
    placed_.erase(body.data());
  }
  void dropped(std::span<const std::byte>, std::byte* where) override { require(placed_.erase(where) == 1); }
  void done(Post&, const Status&) override {}
  void lost(PeerId, const std::string&) override {}

  int arrivals = 0;

 private:
  const bool places_;
  volatile unsigned sum_ = 0;
  std::map<const std::byte*, std::unique_ptr<std::byte[]>> placed_;
};

/// A message, well-formed or damaged.
std::string make_up(FuzzedDataProvider& from) {
  if (from.ConsumeIntegralInRange(0, 3) == 0) return from.ConsumeRandomLengthString(100);
  return framed(from);
}

/// A process connects to this one.
void receive_messages(FuzzedDataProvider& from) {
  int ends[2];
  require(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends) == 0);
  const Fd epoll(epoll_create1(EPOLL_CLOEXEC)), theirs(ends[1]);
  Taker taker(from.ConsumeBool());
  Unplaced spare;
  Incoming incoming(epoll.get(), Fd(ends[0]), "somewhere", key(), kSelf, spare);
  std::vector<std::byte> scratch(from.ConsumeIntegralInRange<size_t>(1, 8192));
  const bool holds_key = from.ConsumeBool();
  if (holds_key) {
    const ClientHello hello{.from = kPeer, .to = kSelf};
    Answer answer;
    Accepted accepted;
    send_all(theirs.get(), &hello, sizeof hello);
    require(incoming.read(taker, scratch) && receive_whole(theirs.get(), answer));
    const Proof proof{mac_of(Role::kConnects, hello, answer.challenge, key())};
    send_all(theirs.get(), &proof, sizeof proof);
    require(incoming.read(taker, scratch) && receive_whole(theirs.get(), accepted) && incoming.authenticated());
  }
  for (int step = 0; step < 40 && from.remaining_bytes() > 0; ++step) {
    std::string text = make_up(from);
    if (!holds_key && from.ConsumeBool()) {
      ClientHello hello{.from = kPeer, .to = kSelf};
      hello.challenge[0] = std::byte(step);
      text.insert(0, reinterpret_cast<const char*>(&hello), sizeof hello);
    }
    if (from.ConsumeIntegralInRange(0, 9) == 0) text.resize(from.ConsumeIntegralInRange<size_t>(0, text.size()));
    send_all(theirs.get(), text.data(), text.size());
    for (int reads = 0; reads < 100 && incoming.read(taker, scratch); ++reads) {
      if (from.ConsumeIntegralInRange(0, 30) == 0) incoming.discard(taker);
    }
  }
  require(holds_key || (taker.arrivals == 0 && !incoming.authenticated()));
  if (from.ConsumeBool()) shutdown(theirs.get(), SHUT_RDWR);
  (void)incoming.read(taker, scratch);
  incoming.drop(taker);
}

/// A listener on loopback.
struct Listener {
  Listener() : fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0)) {
    sockaddr_in at{};
    at.sin_family = AF_INET;
    at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t bytes = sizeof at;
    require(bind(fd.get(), reinterpret_cast<sockaddr*>(&at), bytes) == 0 && listen(fd.get(), 8) == 0);
    require(getsockname(fd.get(), reinterpret_cast<sockaddr*>(&at), &bytes) == 0);
    address.family = 4;
    address.port = ntohs(at.sin_port);
    std::memcpy(address.address.data(), &at.sin_addr, sizeof at.sin_addr);
  }
  const Fd fd;
  HostAddress address;
};

/// This process connects to another one.
void receive_answers(FuzzedDataProvider& from) {
  static const Listener& listener = *new Listener;
  const Fd epoll(epoll_create1(EPOLL_CLOEXEC));
  LinkEvents events;
  Outgoing outgoing(epoll.get(), key(), kSelf, kPeer, events);
  outgoing.connect(listener.address);
  pollfd client{listener.fd.get(), POLLIN, 0};
  (void)poll(&client, 1, outgoing.state() == Outgoing::State::kConnecting ? 1000 : 0);
  const Fd theirs(accept(listener.fd.get(), nullptr, nullptr));
  if (!theirs) return;  // this machine has no port left
  const std::string body = from.ConsumeRandomLengthString(50);
  Post post;
  post.body = reinterpret_cast<const std::byte*>(body.data());
  post.bytes = body.size();
  outgoing.post(post);
  (void)outgoing.advance(EPOLLOUT);
  ClientHello hello;
  const bool holds_key = from.ConsumeBool();
  if (holds_key && receive_whole(theirs.get(), hello)) {
    Answer answer;
    answer.mac = mac_of(Role::kAccepts, hello, answer.challenge, key());
    if (from.ConsumeIntegralInRange(0, 3) == 0) answer.mac[from.ConsumeIntegralInRange(0, 31)] ^= std::byte(1);
    send_all(theirs.get(), &answer, sizeof answer);
  }
  for (int step = 0; step < 10 && from.remaining_bytes() > 0; ++step) {
    const std::string text = from.ConsumeRandomLengthString(100);
    send_all(theirs.get(), text.data(), text.size());
    (void)outgoing.advance(EPOLLIN);
    if (from.ConsumeIntegralInRange(0, 20) == 0) outgoing.leave(Frame::kLeave);
  }
  require(holds_key || (!outgoing.was_open() && events.empty()));
  (void)outgoing.take_posts();
}

/// Without the key no address passes. With it the addresses may be invalid.
void read_address(FuzzedDataProvider& from) {
  TcpAddress address{.nonce = kPeer, .listeners = {}};
  address.listeners.resize(from.ConsumeIntegralInRange<size_t>(0, kMostAddresses + 1));
  for (HostAddress& listener : address.listeners) listener.family = from.ConsumeIntegral<uint16_t>();
  const std::vector<std::byte> real = encode_address(address, key());
  const bool fits = !address.listeners.empty() && address.listeners.size() <= kMostAddresses;
  const auto read = decode_address(real, key());
  require(read.has_value() == fits && (!fits || encode_address(*read, key()) == real));
  const auto bytes = from.ConsumeRemainingBytes<uint8_t>();
  std::vector<std::byte> forged(real);
  for (size_t i = 0; i < bytes.size(); ++i) forged[bytes[i] % forged.size()] ^= std::byte(i + 1);
  require(forged == real || !decode_address(forged, key()));
  require(!decode_address(std::as_bytes(std::span(bytes)), key()));
}

}  // namespace
}  // namespace nvx::net

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  FuzzedDataProvider from(data, size);
  switch (from.ConsumeIntegralInRange(0, 7)) {
    case 0: nvx::net::read_address(from); break;
    case 1:
    case 2: nvx::net::receive_answers(from); break;
    default: nvx::net::receive_messages(from); break;
  }
  return 0;
}
