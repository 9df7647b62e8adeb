// The Unix sockets of a rank, and the rank as a client at those of others, receive anything: packets with and without
// the tokens, of any length, with descriptors of any number and kind, in any order. Nobody is admitted without the
// tokens, a passed descriptor is refused or can be read in full, no descriptor stays, and the sockets still serve a
// rank afterwards.

#include <fcntl.h>
#include <fuzzer/FuzzedDataProvider.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <thread>

#include "base/error.h"
#include "memory/gpu/pool_server.h"
#include "memory/shm/host_relay.h"
#include "memory/shm/shm_registry.h"

namespace nvx {
namespace {

using std::chrono::milliseconds;

constexpr ArenaId kWanted{0x1111, 0x2222};
constexpr size_t kMostFds = 5;

void require(bool holds) {
  if (!holds) std::abort();
}

Deadline in_time() { return Deadline::after(std::chrono::seconds(30)); }

/// The number that the next descriptor gets.
int next_fd() { return Fd(dup(STDIN_FILENO)).get(); }

Fd memory(size_t bytes, int seals) {
  Fd fd(memfd_create("fuzz", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  require(fd && ftruncate(fd.get(), off_t(bytes)) == 0 && fcntl(fd.get(), F_ADD_SEALS, seals) == 0);
  return fd;
}

/// Descriptors of all kinds. The first is of an arena, the second of a record.
std::vector<Fd> make_fds() {
  constexpr int kFixed = F_SEAL_SHRINK | F_SEAL_GROW, kRecord = kFixed | F_SEAL_WRITE;
  std::vector<Fd> fds;
  fds.push_back(memory(Arena::kBytes, kFixed));
  fds.push_back(memory(100, kRecord));
  fds.push_back(memory(100, kFixed));
  fds.push_back(memory(Arena::kBytes, F_SEAL_GROW));
  fds.push_back(memory((size_t(1) << 30) + 1, kRecord));
  fds.push_back(memory(0, kRecord));
  fds.emplace_back(open("/", O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  fds.emplace_back(open("/dev/null", O_RDWR | O_CLOEXEC));
  fds.emplace_back(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  fds.emplace_back(eventfd(0, EFD_CLOEXEC));
  fds.emplace_back(int(syscall(SYS_pidfd_open, getpid(), 0)));
  std::erase_if(fds, [](const Fd& fd) { return !fd; });
  return fds;
}

template <class T>
std::string bytes_of(const T& value) {
  return {reinterpret_cast<const char*>(&value), sizeof value};
}

/// The content of a packet: a well-formed one of some kind, or any bytes.
std::string make_up(FuzzedDataProvider& from) {
  struct SegmentInfo {
    uint32_t magic = 0x4e565832, reserved = 0;
    ArenaId id = kWanted;
  };
  switch (from.ConsumeIntegralInRange(0, 8)) {
    case 0: return {};  // requests the memory of an IPC socket
    case 1: return bytes_of(PeerInfo::of(from.ConsumeIntegralInRange(-1, 3), from.ConsumeRandomLengthString(200)));
    case 2: return bytes_of(uint64_t(0x746565687378766e));  // comes with a record
    case 3: return bytes_of(uint64_t(0x6e6f73616572786e));  // comes with a reason
    case 4: return bytes_of(SegmentInfo());
    case 5: return bytes_of(PoolRequest{.device = from.ConsumeIntegral<int>(), .process = {}});
    case 6: {
      PoolReply reply;
      reply.state = from.ConsumeIntegralInRange<uint32_t>(0, 2);
      std::ranges::fill(reply.why_not, 'x');  // without an end
      return bytes_of(reply);
    }
    default: return from.ConsumeRandomLengthString(300);
  }
}

/// Sends a packet, whole or cut, with the token or another one.
void send_any(FuzzedDataProvider& from, const LocalSocket& socket) {
  static const std::vector<Fd>& fds = *new std::vector<Fd>(make_fds());
  std::string text(socket.own_token.begin(), socket.own_token.end());
  if (from.ConsumeIntegralInRange(0, 7) == 0) text = from.ConsumeRandomLengthString(sizeof(Token) + 1);
  text += make_up(from);
  if (from.ConsumeIntegralInRange(0, 9) == 0) text.resize(from.ConsumeIntegralInRange<size_t>(0, 2 * text.size()));
  const size_t count = from.ConsumeIntegralInRange<size_t>(0, kMostFds);
  int passed[kMostFds] = {};
  for (size_t i = 0; i < count; ++i) passed[i] = fds[from.ConsumeIntegralInRange<size_t>(0, fds.size() - 1)].get();
  const ucred who{getpid(), getuid(), getgid()};
  alignas(cmsghdr) char control[CMSG_SPACE(sizeof passed) + CMSG_SPACE(sizeof who)] = {};
  iovec part{text.data(), text.size()};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control;
  message.msg_controllen = sizeof control;
  cmsghdr* head = CMSG_FIRSTHDR(&message);
  size_t used = 0;
  const auto attach = [&](int type, const void* data, size_t bytes) {
    *head = {};
    head->cmsg_level = SOL_SOCKET;
    head->cmsg_type = type;
    head->cmsg_len = CMSG_LEN(bytes);
    std::memcpy(CMSG_DATA(head), data, bytes);
    used += CMSG_SPACE(bytes);
    head = reinterpret_cast<cmsghdr*>(control + used);
  };
  if (from.ConsumeIntegralInRange(0, 7) == 0) attach(SCM_CREDENTIALS, &who, sizeof who);
  if (count != 0) attach(SCM_RIGHTS, passed, count * sizeof(int));
  message.msg_controllen = used;
  (void)sendmsg(socket.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
}

LocalSocket visit(FuzzedDataProvider& from, const std::string& name) {
  return connect_to(from.ConsumeIntegralInRange(0, 3) == 0 ? name.substr(0, name.find('.')) : name);
}

/// Clients come, send and go in any order. `turn`: what the rank does meanwhile.
void come_and_go(FuzzedDataProvider& from, const std::vector<std::string>& names, const std::function<void()>& turn) {
  std::vector<LocalSocket> clients;
  for (int step = 0; step < 40 && from.remaining_bytes() > 0; ++step) {
    const size_t one = clients.empty() ? 0 : from.ConsumeIntegralInRange<size_t>(0, clients.size() - 1);
    switch (from.ConsumeIntegralInRange(0, clients.empty() ? 0 : 7)) {
      case 0: clients.push_back(visit(from, names[from.ConsumeIntegralInRange<size_t>(0, names.size() - 1)])); break;
      case 1: clients.erase(clients.begin() + ptrdiff_t(one)); break;
      case 2: shutdown(clients[one].get(), from.ConsumeBool() ? SHUT_WR : SHUT_RD); break;
      case 3: turn(); break;
      default: send_any(from, clients[one]); break;
    }
  }
  turn();
}

/// A rank serves the others during set-up.
void serve(FuzzedDataProvider& from, ShmRegistry& here) {
  IpcSocket ipc(here);
  HostRelay relay(PeerInfo::of(0, "the first rank"));
  ipc.serve_with(&relay);
  const std::vector<uint8_t> record(from.ConsumeIntegralInRange<size_t>(0, 40), 7);
  come_and_go(from, {ipc.name(), relay.name()}, [&] {
    ipc.serve(std::chrono::microseconds(0));
    relay.publish(record);
  });
  for (const LocalPeer& client : relay.peers())
    require(client.info.description[sizeof client.info.description - 1] == '\0');
  const auto got = ipc.fetch({{here.arena().id(), ipc.name(), getpid()}}, in_time());
  require(got.at(here.arena().id())->size() == Arena::kBytes);
  require(got.at(here.arena().id())->tensors() != nullptr);
  RelayClient client(relay.name(), PeerInfo::of(1, "another rank"));
  relay.serve();
  require(client.next(std::chrono::seconds(30)) == record && client.introduced());
}

/// A rank fetches memory from a process that sends anything.
void fetch(FuzzedDataProvider& from, ShmRegistry& here) {
  const std::string name = unique_socket_name();
  LocalSocket listener = listen_on(name);
  if (from.ConsumeIntegralInRange(0, 15) == 0) listener = {};  // it has ended
  IpcSocket mine(here);
  bool replied = false;
  const auto answer = [&] {
    accept_clients(listener, [&](const LocalSocket& client) {
      for (int i = from.ConsumeIntegralInRange(0, 2); i > 0; --i) send_any(from, client);
      replied = true;
    });
    require(replied);  // no other process connects
  };
  try {
    const auto got = mine.fetch({{kWanted, name, getpid()}}, in_time(), answer);
    const auto& there = got.at(kWanted);
    const volatile std::byte last = *there->at(Arena::kBytes - 1);  // all of it is accessible
    (void)last;
    (void)there->tensors();
    (void)there->dead();
    require(here.find(kWanted) == there);
  } catch (const Error& error) {
    require(error.code() == Code::kPeerDied);
  }
}

/// A rank takes records from a process that sends anything.
void take_records(FuzzedDataProvider& from) {
  const std::string name = unique_socket_name();
  const LocalSocket listener = listen_on(name);
  RelayClient client(name, PeerInfo::of(1, "a rank"));
  LocalSocket host;
  accept_clients(listener, [&](LocalSocket client) { host = std::move(client); });
  require(bool(host));
  for (int step = 0; step < 20 && from.remaining_bytes() > 0; ++step) {
    if (host) send_any(from, host);
    if (from.ConsumeIntegralInRange(0, 9) == 0) host = {};
    if (from.ConsumeBool()) (void)client.next(milliseconds(0));
  }
  host = {};
  while (client.open()) (void)client.next(milliseconds(0));
  (void)client.process().ended();
}

/// A process passes the memory of its pools on.
void serve_pools(FuzzedDataProvider& from) {
  const std::string name = unique_socket_name();
  const PoolServer server(name, [](const PoolRequest& request, Fd*) {
    if (request.device < 0) throw Error(Code::kSystem, "nvx: it has no such device");
    return PoolReply{.state = PoolReply::kHere, .pool = {}};
  });
  come_and_go(from, {name}, [] { std::this_thread::yield(); });
  Fd fd;
  require(request_from_pool(name, {.device = 3, .process = {}}, &fd, in_time()).state == PoolReply::kHere);
}

/// A process requests such memory where the reply may be anything.
void request_pools(FuzzedDataProvider& from) {
  const std::string name = unique_socket_name();
  const LocalSocket listener = listen_on(name);
  std::thread host([&] {
    for (bool replied = false; !replied; std::this_thread::yield()) {
      accept_clients(listener, [&](const LocalSocket& client) { send_any(from, client), replied = true; });
    }
  });
  Fd fd;
  try {
    require(request_from_pool(name, {.device = 3, .process = {}}, &fd, in_time()).state == PoolReply::kHere);
  } catch (const Error& error) {
    require(error.code() != Code::kTimeout);
  }
  host.join();
}

void receive_any(FuzzedDataProvider& from) {
  static const auto& here = *new std::shared_ptr<ShmRegistry>(ShmRegistry::instance());
  switch (from.ConsumeIntegralInRange(0, 7)) {
    case 0:
    case 1: return fetch(from, *here);
    case 2: return take_records(from);
    case 3: return serve_pools(from);
    case 4: return request_pools(from);
    default: return serve(from, *here);
  }
}

}  // namespace
}  // namespace nvx

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace nvx;
  static const int kOnce = [] {
    FuzzedDataProvider nothing(nullptr, 0);
    receive_any(nothing);  // opens what stays open
    int ends[2];
    require(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) == 0);
    send_any(nothing, {Fd(ends[0])});
    return close(ends[1]);
  }();
  (void)kOnce;
  const int before = next_fd();
  FuzzedDataProvider from(data, size);
  receive_any(from);
  require(next_fd() == before);
  return 0;
}
