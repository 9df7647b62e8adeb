#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>

#include "base/deadline.h"
#include "base/handle.h"

/// Abstract Unix sockets between processes of one user. They leave no name behind. Other users can connect, and fill a
/// listener's backlog, but get nothing and send nothing: so no call here blocks, and each deals with a bounded number
/// of connections.
namespace nvx {

/// A name that nobody else has.
std::string fresh_socket_name();

/// A listening socket that never blocks. Throws Error if it cannot be made.
Fd listen_on(const std::string& name);

/// Nothing where nobody listens there, or a process of another user, or where the backlog is full; errno says why.
Fd connect_to(const std::string& name);

/// Whether errno, as connect_to() left it, says that the backlog is full: another attempt may succeed.
bool backlog_is_full();

/// Tries again while the backlog is full, until the deadline.
Fd connect_to(const std::string& name, const Deadline& deadline);

/// The pause between attempts to connect to a listener whose backlog is full.
constexpr std::chrono::milliseconds kConnectPause{1};

/// Connections of other users to a listener, which were closed.
struct Strangers {
  uint64_t count = 0;
  uint32_t last_user = 0;
};
/// As ", and other users, such as 65534, have made 7 connections to that of this process"; empty where there were none.
std::string words_of(const Strangers& strangers);

/// Accepts at most this many connections a call, so that a flood of them delays the caller by about a millisecond ...
constexpr int kAcceptedAtOnce = 256;
/// ... and gives those of the same user to take(). Throws Error where the process has no descriptors left for them.
void accept_guests(int listener, const std::function<void(Fd)>& take, Strangers* strangers = nullptr);

/// One packet, and up to two descriptors with it. False where there is no room for it now (errno is EAGAIN), or nobody
/// takes it.
bool send_packet(int socket, const void* data, size_t bytes, std::span<const int> fds);

/// True if a packet of this length has come. Descriptors that came are owned by `fds`, also when the packet is refused.
/// Throws Error where this process may have no more of them.
bool receive_packet(int socket, void* data, size_t bytes, std::span<Fd> fds);

}  // namespace nvx
