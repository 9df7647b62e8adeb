// The TCP ports of a rank receive anything: UCX's from addresses that are not admitted and from a process with
// UCX, nvx's own from any host. Strangers do not get in, messages are whole, and a transfer between ranks works
// afterwards.

#include <arpa/inet.h>
#include <fuzzer/FuzzedDataProvider.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <filesystem>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/handle.h"
#include "frames.h"
#include "net/tcp/tcp.h"
#include "net/tcp/tcp_wire.h"
#include "net/ucx/ucx.h"
#include "net/ucx/ucx_address.h"
#include "net/ucx/ucx_worker.h"

namespace nvx::net {
namespace {

using std::chrono::seconds;

constexpr LinkNonce kAttacker{0x33, 0x44};
constexpr size_t kMostPlaced = 1 << 20, kMostAttackers = 30;
constexpr uint64_t kRank = 0x6b6e6172;  // begins the headers between the ranks

void require(bool holds) {
  if (!holds) std::abort();
}

const JobKey& key() {
  static const JobKey& key = *new JobKey("a key of some length for the fuzzer");
  return key;
}

/// Gives each body that it places an allocation of its own, for AddressSanitizer.
class Hearer final : public Receiver {
 public:
  std::byte* place(std::span<const std::byte> header, size_t bytes) override {
    require(header.size() <= kMostHeader);
    if (bytes > kMostPlaced || bytes % 2 != 0) return nullptr;
    auto memory = std::make_unique<std::byte[]>(bytes);
    std::byte* const at = memory.get();
    placed_.emplace(at, std::move(memory));
    return at;
  }
  void arrived(std::span<const std::byte> header, std::span<const std::byte> body) override {
    require(header.size() <= kMostHeader);
    for (const std::span<const std::byte> part : {header, body}) {
      for (const std::byte byte : part) sum_ = sum_ + unsigned(byte);  // all of it is accessible
    }
    uint64_t word = 0;
    if (header.size() == sizeof word) std::memcpy(&word, header.data(), sizeof word);
    word == kRank ? void(from_ranks += body.size()) : void(from_others += 1);
    if (word == last_wanted) last_heard = word;
    placed_.erase(body.data());
  }
  void dropped(std::span<const std::byte>, std::byte* where) override { require(placed_.erase(where) == 1); }
  void done(Post&, const Status& status) override { done_well += status.ok(); }
  void lost(PeerId peer, const std::string&) override { last_lost = peer; }

  size_t from_ranks = 0, from_others = 0, done_well = 0;
  uint64_t last_wanted = 0, last_heard = 0;
  std::optional<PeerId> last_lost;

 private:
  volatile unsigned sum_ = 0;
  std::map<const std::byte*, std::unique_ptr<std::byte[]>> placed_;
};

/// Where sockets of this process listen.
std::vector<sockaddr_in> listening() {
  std::vector<sockaddr_in> all;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    const int fd = std::stoi(entry.path().filename());
    int listens = 0;
    sockaddr_in at{};
    socklen_t bytes = sizeof listens, length = sizeof at;
    if (getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &listens, &bytes) != 0 || !listens) continue;
    if (getsockname(fd, reinterpret_cast<sockaddr*>(&at), &length) != 0 || at.sin_family != AF_INET) continue;
    if (at.sin_addr.s_addr == INADDR_ANY) at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    all.push_back(at);
  }
  return all;
}

/// Two ranks, which are connected, and the ports of the first.
struct Ranks {
  explicit Ranks(const std::function<std::unique_ptr<Link>()>& open) : one(open()), ports(listening()), other(open()) {
    std::vector<AddressPrefix> here = *parse_prefixes("127.0.0.1");
    for (const AddressBytes& address : own_addresses()) here.push_back(AddressPrefix::of(address));
    one->listen(at_one);
    other->listen(at_other);
    for (Link* link : {one.get(), other.get()}) link->admit(here);
    of_one = other->add(one->address());
    of_other = one->add(other->address());
  }

  void drive() {
    one->progress();
    other->progress();
  }
  void await(const std::function<bool()>& holds) {
    for (const auto end = Clock::now() + seconds(30); !holds();) {
      drive();
      require(Clock::now() < end);
    }
  }
  /// Both ranks send to each other.
  void transfer(size_t bytes) {
    const std::vector<std::byte> body(bytes, std::byte(7));
    Post posts[2];
    const size_t wanted[] = {at_one.from_ranks + bytes, at_other.from_ranks + bytes};
    const size_t done = at_one.done_well + at_other.done_well + 2;
    for (Post& post : posts) {
      std::memcpy(post.header, &kRank, post.header_bytes = sizeof kRank);
      post.body = body.data();
      post.bytes = bytes;
    }
    posts[0].to = of_other;
    posts[1].to = of_one;
    one->post(posts[0]);
    other->post(posts[1]);
    await([&] {
      return at_one.from_ranks == wanted[0] && at_other.from_ranks == wanted[1] &&
             at_one.done_well + at_other.done_well == done;
    });
  }

  Hearer at_one, at_other;
  const std::unique_ptr<Link> one;
  const std::vector<sockaddr_in> ports;
  const std::unique_ptr<Link> other;
  PeerId of_one, of_other;
};

/// A connection to one of the ports. `own`: the last byte of the source address, 127.0.0.x; 0 for any that is admitted.
Fd connect_to(FuzzedDataProvider& from, const std::vector<sockaddr_in>& ports, uint8_t own) {
  Fd fd(socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  const linger at_once{1, 0};  // ports stay free
  const int one = 1;
  setsockopt(fd.get(), SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
  setsockopt(fd.get(), IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
  sockaddr_in source{};
  source.sin_family = AF_INET;
  source.sin_addr.s_addr = htonl(INADDR_LOOPBACK - 1 + own);
  if (own != 0 && bind(fd.get(), reinterpret_cast<sockaddr*>(&source), sizeof source) != 0) return {};
  const sockaddr_in there = ports[from.ConsumeIntegralInRange<size_t>(0, ports.size() - 1)];
  (void)connect(fd.get(), reinterpret_cast<const sockaddr*>(&there), sizeof there);
  return fd;
}

bool is_connected(int fd) {
  tcp_info info{};
  socklen_t bytes = sizeof info;
  require(getsockopt(fd, IPPROTO_TCP, TCP_INFO, &info, &bytes) == 0);
  return info.tcpi_state == TCP_ESTABLISHED;
}

void send_bytes(int fd, const std::string& text) {
  (void)send(fd, text.data(), text.size(), MSG_NOSIGNAL | MSG_DONTWAIT);
}

template <class T>
std::string bytes_of(const T& value) {
  return {reinterpret_cast<const char*>(&value), sizeof value};
}

// --- UCX

/// A process with UCX that sends messages that no rank sends.
class Attacker {
 public:
  explicit Attacker(Ranks& ranks) : worker_(""), to_(*decode_address(address_ = ranks.one->address())) {
    here_ = encode_address({to_.version, kAttacker, worker_.address()});
    for (const unsigned id : {0u, 1u}) {  // UCX crashes on a message without one
      ucp_am_handler_param_t param{};
      param.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB;
      param.id = id;
      param.cb = [](void*, const void*, size_t, void*, size_t, const ucp_am_recv_param_t*) { return UCS_OK; };
      require(worker_.ucx().worker_set_am_recv_handler(worker_.get(), &param) == UCS_OK);
    }
  }
  const std::vector<std::byte>& address() const { return here_; }

  void send(unsigned id, const std::string& header, const std::string& body, unsigned flags) {
    if (!endpoint_ && !connect()) return;
    ucp_request_param_t param{};
    param.op_attr_mask = UCP_OP_ATTR_FIELD_FLAGS;
    param.flags = flags;
    said_.push_back({header, body, nullptr});
    Said& last = said_.back();
    void* request = worker_.ucx().am_send_nbx(endpoint_, id, last.header.data(), last.header.size(), last.body.data(),
                                              last.body.size(), &param);
    UCS_PTR_IS_PTR(request) ? void(last.request = request) : said_.pop_back();
  }
  void progress() {
    worker_.ucx().worker_progress(worker_.get());
    std::erase_if(said_, [&](const Said& one) {
      if (worker_.ucx().request_check_status(one.request) == UCS_INPROGRESS) return false;
      worker_.ucx().request_free(one.request);
      return true;
    });
  }

 private:
  struct Said {
    std::string header, body;
    void* request;
  };
  bool connect() {
    ucp_ep_params_t params{};
    params.field_mask = UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE;
    params.address = reinterpret_cast<const ucp_address_t*>(to_.worker.data());
    params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
    if (worker_.ucx().ep_create(worker_.get(), &params, &endpoint_) != UCS_OK) endpoint_ = nullptr;
    return endpoint_;
  }

  std::list<Said> said_;
  UcxWorker worker_;
  std::vector<std::byte> address_, here_;
  UcxAddress to_;
  ucp_ep_h endpoint_ = nullptr;
};

void receive_over_ucx(FuzzedDataProvider& from, Ranks& ranks) {
  // They stay: a UCX of 1.13 aborts a process that connects to one which has just ended.
  static std::deque<Attacker>& attackers = *new std::deque<Attacker>;
  static bool& alone = *new bool(true);
  if (alone && attackers.size() == kMostAttackers) return;
  if (std::exchange(alone, false)) attackers.emplace_back(ranks);
  Attacker& attacker = attackers.back();
  const auto drive = [&] {
    for (Attacker& one : attackers) one.progress();
    ranks.drive();
  };
  const bool known = from.ConsumeBool();
  std::vector<PeerId> peers;
  if (known) peers.push_back(ranks.one->add(attacker.address()));
  for (int step = 0; step < 20 && from.remaining_bytes() > 0; ++step) {
    ControlMessage control{ControlMessage::Kind(from.ConsumeIntegralInRange(0, 3)),
                           from.ConsumeIntegralInRange<uint32_t>(0, 3), kAttacker};
    switch (from.ConsumeIntegralInRange(0, 7)) {
      case 0:
      case 1: attacker.send(1, from.ConsumeRandomLengthString(kMostHeader + 20), "", 0); break;
      case 2: control.from[0] = from.ConsumeIntegral<uint8_t>(); [[fallthrough]];
      case 3: attacker.send(1, bytes_of(control), "", 0); break;
      case 4:
        control.kind = from.ConsumeBool() ? ControlMessage::kLeave : ControlMessage::kClose;
        attacker.send(1, bytes_of(control), "", 0);
        break;
      case 5:
        if (peers.size() < 3) peers.push_back(ranks.one->add(attacker.address()));
        break;
      default: {
        const size_t bytes = from.ConsumeIntegralInRange<size_t>(0, from.ConsumeBool() ? 300 : 100'000);
        attacker.send(from.ConsumeIntegralInRange(0, 20) == 0 ? 2 : 0, from.ConsumeRandomLengthString(kMostHeader + 20),
                      std::string(bytes, 'b'), from.ConsumeBool() ? UCP_AM_SEND_FLAG_RNDV : 0u);
        break;
      }
    }
    for (int i = from.ConsumeIntegralInRange(0, 4); i > 0; --i) drive();
  }
  // Most of it has arrived once a last message has. It does not where a connection was closed, and UCX does not let the
  // process connect again then.
  const uint64_t last = ++ranks.at_one.last_wanted;
  attacker.send(0, bytes_of(last), "", 0);
  for (int i = 0; i < 500 && ranks.at_one.last_heard != last; ++i) drive();
  ranks.transfer(from.ConsumeBool() ? 100 : 200'000);
  for (const PeerId peer : peers) ranks.one->forget(peer);
  alone = ranks.at_one.last_heard != last;
}

/// Packets from addresses that are not admitted never reach UCX, which would let them write to any memory.
void keep_out(FuzzedDataProvider& from, Ranks& ranks) {
  std::vector<Fd> clients;
  for (int step = 0; step < 10 && from.remaining_bytes() > 0; ++step) {
    clients.push_back(connect_to(from, ranks.ports, from.ConsumeIntegralInRange<uint8_t>(2, 255)));
    if (!clients.back()) continue;
    send_bytes(clients.back().get(), from.ConsumeRandomLengthString(100));
    ranks.drive();
    require(!is_connected(clients.back().get()));
  }
  ranks.transfer(100);
}

// --- nvx's own TCP, with a key

/// Shakes hands with the first rank as the holder of the key. False if that has closed the connection, which it may
/// always do.
bool handshake(FuzzedDataProvider& from, Ranks& ranks, int fd) {
  ClientHello hello{.from = kAttacker, .to = decode_address(ranks.one->address(), key())->nonce};
  Answer answer;
  send_bytes(fd, bytes_of(hello));
  for (int i = 0; i < 3; ++i) ranks.drive();
  if (recv(fd, &answer, sizeof answer, MSG_DONTWAIT) != ssize_t(sizeof answer)) return false;
  Proof proof{mac_of(Role::kConnects, hello, answer.challenge, key())};
  if (from.ConsumeIntegralInRange(0, 7) == 0) proof.mac[from.ConsumeIntegralInRange(0, 31)] ^= std::byte(1);
  send_bytes(fd, bytes_of(proof));
  return true;
}

void receive_over_tcp(FuzzedDataProvider& from, Ranks& ranks) {
  const bool holds_key = from.ConsumeBool();
  const size_t before = ranks.at_one.from_others;
  std::vector<Fd> clients;
  std::optional<PeerId> known;
  if (holds_key && from.ConsumeBool()) known = ranks.one->add(encode_address(TcpAddress{kAttacker, {{}}}, key()));
  for (int step = 0; step < 30 && from.remaining_bytes() > 0; ++step) {
    const size_t one = clients.empty() ? 0 : from.ConsumeIntegralInRange<size_t>(0, clients.size() - 1);
    switch (from.ConsumeIntegralInRange(0, clients.empty() ? 0 : 9)) {
      case 0:
        clients.push_back(connect_to(from, ranks.ports, from.ConsumeIntegralInRange(0, 7) == 0 ? 9 : 0));
        if (!clients.back()) return;  // this machine has no port left
        if (holds_key && from.ConsumeBool()) (void)handshake(from, ranks, clients.back().get());
        break;
      case 1: clients.erase(clients.begin() + ptrdiff_t(one)); break;
      case 2: shutdown(clients[one].get(), from.ConsumeBool() ? SHUT_WR : SHUT_RD); break;
      case 3: (void)send(clients[one].get(), "!", 1, MSG_NOSIGNAL | MSG_DONTWAIT | MSG_OOB); break;
      case 4: send_bytes(clients[one].get(), bytes_of(ClientHello{.from = kAttacker, .to = {}})); break;
      case 5: send_bytes(clients[one].get(), from.ConsumeRandomLengthString(200)); break;
      default: {
        std::string text = framed(from);
        if (from.ConsumeIntegralInRange(0, 4) == 0) text.resize(from.ConsumeIntegralInRange<size_t>(0, text.size()));
        send_bytes(clients[one].get(), text);
        break;
      }
    }
    ranks.drive();
  }
  require(holds_key || ranks.at_one.from_others == before);
  ranks.transfer(from.ConsumeBool() ? 100 : 100'000);
  if (known) ranks.one->forget(*known);
}

}  // namespace
}  // namespace nvx::net

/// LeakSanitizer crashes beside UCX's threads.
extern "C" int __lsan_is_turned_off();
extern "C" int __lsan_is_turned_off() { return 1; }

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace nvx::net;
  setenv("UCX_LOG_LEVEL", "fatal", /*overwrite=*/0);
  static Ranks& tcp = *new Ranks([] { return open_tcp(key()); });
  static Ranks& ucx = *new Ranks([] { return open_ucx(); });
  FuzzedDataProvider from(data, size);
  switch (from.ConsumeIntegralInRange(0, 7)) {
    case 0: keep_out(from, ucx); break;
    case 1:
    case 2:
    case 3: receive_over_ucx(from, ucx); break;
    default: receive_over_tcp(from, tcp); break;
  }
  return 0;
}
