#pragma once

#include <sys/types.h>

#include <array>
#include <cstdint>
#include <functional>
#include <span>
#include <string>

#include "base/deadline.h"
#include "base/handle.h"

/// Abstract Unix sockets between processes of one job and one user. They leave no name in the file system. Every
/// process of the network namespace sees their names (/proc/net/unix), can connect, and can fill a listener's backlog,
/// but it receives and sends no data. So no call here blocks, and each handles a bounded number of connections.
namespace nvx {

/// A secret of 14 random characters, of 6 bits each. Every packet of a listener begins with one token and every packet
/// of its clients with another; packets without theirs are dropped.
using Token = std::array<char, 14>;

/// A listener, or one end of a connection.
struct LocalSocket {
  Fd fd;
  Token own_token{}, peer_token{};  ///< those of the packets that this end sends and receives

  int get() const { return fd.get(); }
  explicit operator bool() const { return bool(fd); }
};

/// A name that no other socket has, and after a dot the two tokens of the socket. Other processes see the name, but not
/// the tokens; the ranks of a job get both through the store.
std::string unique_socket_name();

/// A listening socket that never blocks. Throws Error if it cannot be made, and if the number of this process's user
/// is also that of other users, which its user namespace does not map.
LocalSocket listen_on(const std::string& name);

/// Empty if no process listens there, if a process of another user does, or if the backlog is full; errno shows which.
LocalSocket connect_to(const std::string& name);

/// The process at the other end of a connection, by its pid in this process's namespace; 0 if it is not visible here.
pid_t peer_pid(int socket);

/// Whether errno after connect_to() means that another attempt may succeed: the backlog is full, or a signal came.
bool backlog_is_full();

/// Retries while the backlog is full, until the deadline. Throws Error; `called`: "the Unix socket of rank 3".
LocalSocket connect_or_throw(const std::string& name, const std::string& called, const Deadline& deadline);

/// The pause between attempts to connect to a listener whose backlog is full, and to send what there is no room for.
constexpr std::chrono::milliseconds kConnectPause{1};

/// Connections of other users to a listener, which were closed.
struct RejectedClients {
  uint64_t count = 0;
  uint32_t last_user = 0;
};
/// ", and other users, such as 65534, have made 7 connections to that of this process"; empty if there were none.
std::string describe(const RejectedClients& rejected);

/// Above this number, a listener closes the oldest connections that have sent nothing, so that other processes of this
/// user do not take all descriptors. Ranks send at once.
constexpr ptrdiff_t kMostSilent = 256;
/// Accepts at most this many connections per call, so that a flood delays the caller by about a millisecond ...
constexpr int kAcceptedAtOnce = 256;
/// ... and passes those of the same user to take(). Throws Error if the process has no free descriptors for them.
void accept_clients(const LocalSocket& listener, const std::function<void(LocalSocket)>& take,
                    RejectedClients* rejected = nullptr);

/// Sends a packet with up to two descriptors. False if there is no room now (errno is EAGAIN) or the peer is gone.
/// Linux has no room for descriptors while the processes of this user together have more of them in flight, sent and
/// not yet received, than one may have open (RLIMIT_NOFILE). That does not apply to a process with CAP_SYS_RESOURCE or
/// CAP_SYS_ADMIN.
bool send_packet(const LocalSocket& socket, const void* data, size_t bytes, std::span<const int> fds);

/// Retries while there is no room. False if the peer is gone. Throws Error at the deadline.
bool send_before(const LocalSocket& socket, const void* data, size_t bytes, std::span<const int> fds,
                 const Deadline& deadline);

/// Why there has been no room for descriptors until a deadline, and what to do about it.
inline constexpr const char* kTooManyInFlight =
    "this user has more descriptors in flight than its limit of open files (ulimit -n)";
inline constexpr const char* kRaiseLimit =
    "raise the limit of open files per process (ulimit -n), or end the processes of this user that do not receive "
    "what is sent to them";

/// True if a packet of this length with the other end's token has arrived; errno is EAGAIN if none has yet. `fds` owns
/// descriptors, even of a rejected packet. Throws Error if this process has reached its descriptor limit.
bool receive_packet(const LocalSocket& socket, void* data, size_t bytes, std::span<Fd> fds);

}  // namespace nvx
