#include "memory/shm/unix_socket.h"

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <cstring>
#include <fstream>
#include <thread>

#include "base/error.h"
#include "base/random.h"
#include "base/text.h"

namespace nvx {
namespace {

constexpr size_t kMostFds = 2;

union Control {
  cmsghdr header;
  char bytes[CMSG_SPACE(kMostFds * sizeof(int))];
};

/// `name`: with or without its tokens.
sockaddr_un abstract_address(const std::string& name, socklen_t* length) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  const size_t n = std::min(name.find('.'), std::min(name.size(), sizeof(address.sun_path) - 1));
  std::memcpy(address.sun_path + 1, name.data(), n);
  *length = socklen_t(offsetof(sockaddr_un, sun_path) + 1 + n);
  return address;
}

constexpr uid_t kNoUser = uid_t(-1);  ///< no process has it

/// Whether no other user has the number of this process's user. The kernel reports all users that the user namespace
/// does not map by one number (overflowuid), so a peer with that number may be of any user.
bool sees_own_user() {
  constexpr uint64_t kAllUsers = 0xffffffff;
  uint64_t overflow = 0, first = 0, outside = 0, count = 0, mapped = 0;
  if (!(std::ifstream("/proc/sys/kernel/overflowuid") >> overflow)) overflow = 65534;
  if (geteuid() != overflow || access("/proc/self/uid_map", F_OK) != 0) return true;  // no user namespaces
  std::ifstream map("/proc/self/uid_map");
  while (map >> first >> outside >> count) mapped += count;
  return mapped >= kAllUsers;
}

/// Whether a process of this user may receive memory.
bool is_own(uid_t user) { return user == geteuid() && sees_own_user(); }

/// The process at the other end, its pid and user in this process's namespaces.
ucred peer_of(int socket) {
  ucred peer{};
  socklen_t length = sizeof peer;
  if (getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &peer, &length) != 0) return {0, kNoUser, gid_t(-1)};
  return peer;
}

/// The two tokens of a name: the clients' and the listener's. Zeros if it has none.
std::array<Token, 2> tokens_in(const std::string& name) {
  std::array<Token, 2> tokens{};
  const size_t dot = name.find('.');
  if (dot != std::string::npos && name.size() - dot - 1 == sizeof tokens)
    std::memcpy(tokens.data(), name.data() + dot + 1, sizeof tokens);
  return tokens;
}

/// Whether two tokens are equal, in a time that does not depend on their content.
bool same(const Token& a, const Token& b) {
  volatile unsigned differing = 0;
  for (size_t i = 0; i < a.size(); ++i) differing = differing | unsigned(a[i] ^ b[i]);
  return differing == 0;
}

template <size_t N>
std::string random_characters() {
  constexpr char kCharacters[] = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ+_";
  std::string text;
  for (const uint8_t byte : random_value<std::array<uint8_t, N>>()) text += kCharacters[byte % 64];
  return text;
}

/// Whether the last call failed because this process or host lacks a resource, which is no fault of the peer.
bool ran_out() { return errno == EMFILE || errno == ENFILE || errno == ENOMEM || errno == ENOBUFS; }

}  // namespace

/// At most 47 characters, for which messages have room: a pid has at most 7.
std::string unique_socket_name() {
  return "nvx-" + std::to_string(getpid()) + "-" + random_characters<6>() + "." +
         random_characters<2 * sizeof(Token)>();
}

LocalSocket listen_on(const std::string& name) {
  if (!sees_own_user()) {
    throw Error(Code::kSystem,
                "nvx: uid " + std::to_string(geteuid()) +
                    ", that of this process, is also the number of all users that its user namespace does not map, so "
                    "nvx cannot distinguish its own processes from those of other users",
                "run as another user that /proc/self/uid_map maps");
  }
  Fd listener(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!listener) throw system_error("cannot make a Unix socket");
  socklen_t length = 0;
  const sockaddr_un address = abstract_address(name, &length);
  if (bind(listener.get(), reinterpret_cast<const sockaddr*>(&address), length) != 0 ||
      listen(listener.get(), 4096) != 0) {
    throw system_error("cannot listen on a Unix socket");
  }
  const auto [clients, own] = tokens_in(name);
  return {std::move(listener), own, clients};
}

LocalSocket connect_to(const std::string& name) {
  Fd client(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!client) throw system_error("cannot make a Unix socket");
  socklen_t length = 0;
  const sockaddr_un address = abstract_address(name, &length);
  if (connect(client.get(), reinterpret_cast<const sockaddr*>(&address), length) != 0) return {};
  const auto [own, listeners] = tokens_in(name);
  if (is_own(peer_of(client.get()).uid)) return {std::move(client), own, listeners};
  errno = EPERM;
  return {};
}

pid_t peer_pid(int socket) { return peer_of(socket).pid; }

bool backlog_is_full() { return errno == EAGAIN || errno == EINTR; }

LocalSocket connect_or_throw(const std::string& name, const std::string& called, const Deadline& deadline) {
  for (;;) {
    if (LocalSocket client = connect_to(name)) return client;
    if (!backlog_is_full()) {
      throw Error(Code::kPeerDied, "nvx: " + called + " cannot be reached (" + std::strerror(errno) +
                                       "): its process has ended, or belongs to another user");
    }
    if (deadline.passed(Clock::now())) {
      throw Error(Code::kTimeout, "nvx: the backlog of " + called + " was full for " + how_long(deadline) +
                                      ": its process is stopped, or another user of this host floods it");
    }
    std::this_thread::sleep_for(kConnectPause);
  }
}

std::string describe(const RejectedClients& rejected) {
  if (rejected.count == 0) return "";
  return ", and other users, such as " + std::to_string(rejected.last_user) + ", have made " +
         std::to_string(rejected.count) + " connections to that of this process";
}

void accept_clients(const LocalSocket& listener, const std::function<void(LocalSocket)>& take,
                    RejectedClients* rejected) {
  for (int i = 0; i < kAcceptedAtOnce; ++i) {
    Fd client(accept4(listener.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!client && ran_out())
      throw system_error(
          "cannot accept a connection of another process of this host");  // it would wait until its timeout
    if (!client) return;
    const uid_t user = peer_of(client.get()).uid;
    if (is_own(user)) {
      take({std::move(client), listener.own_token, listener.peer_token});
    } else if (rejected && user != kNoUser) {
      ++rejected->count;
      rejected->last_user = user;
    }
  }
}

bool send_packet(const LocalSocket& socket, const void* data, size_t bytes, std::span<const int> fds) {
  Control control{};
  Token token = socket.own_token;
  iovec parts[] = {{token.data(), sizeof token}, {const_cast<void*>(data), bytes}};
  msghdr message{};
  message.msg_iov = parts;
  message.msg_iovlen = 2;
  if (!fds.empty()) {
    message.msg_control = control.bytes;
    message.msg_controllen = CMSG_SPACE(fds.size_bytes());
    cmsghdr* head = CMSG_FIRSTHDR(&message);
    head->cmsg_level = SOL_SOCKET;
    head->cmsg_type = SCM_RIGHTS;
    head->cmsg_len = CMSG_LEN(fds.size_bytes());
    std::memcpy(CMSG_DATA(head), fds.data(), fds.size_bytes());
  }
  if (sendmsg(socket.get(), &message, MSG_NOSIGNAL | MSG_DONTWAIT) == ssize_t(sizeof token + bytes)) return true;
  if (ran_out()) throw system_error("cannot pass memory to another process of this host");  // it would read of an end
  if (errno == ETOOMANYREFS) errno = EAGAIN;  // until processes of this user receive descriptors that are in flight
  return false;
}

bool send_before(const LocalSocket& socket, const void* data, size_t bytes, std::span<const int> fds,
                 const Deadline& deadline) {
  while (!send_packet(socket, data, bytes, fds)) {
    if (errno != EAGAIN) return false;
    if (deadline.passed(Clock::now())) {
      throw Error(Code::kSystem,
                  std::string("nvx: could not pass memory to another process of this host for ") + how_long(deadline) +
                      ": " + kTooManyInFlight,
                  kRaiseLimit);
    }
    std::this_thread::sleep_for(kConnectPause);
  }
  return true;
}

bool receive_packet(const LocalSocket& socket, void* data, size_t bytes, std::span<Fd> fds) {
  Control control{};
  Token token{};
  iovec parts[] = {{token.data(), sizeof token}, {data, bytes}};
  msghdr message{};
  message.msg_iov = parts;
  message.msg_iovlen = 2;
  message.msg_control = control.bytes;
  message.msg_controllen = sizeof control.bytes;
  const ssize_t got = recvmsg(socket.get(), &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
  size_t taken = 0;
  for (cmsghdr* head = CMSG_FIRSTHDR(&message); head; head = CMSG_NXTHDR(&message, head)) {
    if (head->cmsg_level != SOL_SOCKET || head->cmsg_type != SCM_RIGHTS) continue;
    int received[kMostFds] = {-1, -1};
    const size_t count = std::min<size_t>((head->cmsg_len - CMSG_LEN(0)) / sizeof(int), kMostFds);
    std::memcpy(received, CMSG_DATA(head), count * sizeof(int));
    taken += count;
    for (size_t i = 0; i < count; ++i) {
      Fd owned(received[i]);
      if (i < fds.size()) fds[i] = std::move(owned);
    }
  }
  const bool cut = got > 0 && (message.msg_flags & MSG_CTRUNC) != 0 && taken < kMostFds;  // the message had room
  if (cut) errno = EMFILE;
  if (cut || (got < 0 && ran_out())) throw system_error("cannot receive the memory of another process of this host");
  if (got == ssize_t(sizeof token + bytes) && same(token, socket.peer_token)) return true;
  if (got >= 0) errno = EPROTO;
  return false;
}

}  // namespace nvx
