#pragma once

#include <span>
#include <string>

#include "base/handle.h"

/// Abstract Unix sockets, between processes of one user: no name that is left over, nothing that others may open.
namespace nvx {

/// A name that nobody else has.
std::string fresh_socket_name();

/// Never blocks. Throws Error if it cannot be made.
Fd listen_on(const std::string& name);

/// Nothing where nobody listens, or a process of another user does; errno says why.
Fd connect_to(const std::string& name);

/// The next one that has come to a listener, if it is of the same user. Throws Error where nobody can be let in.
enum class Came { kNobody, kStranger, kGuest };
Came accept_from(int listener, Fd* guest);

/// One packet, and up to two descriptors with it.
bool send_packet(int socket, const void* data, size_t bytes, std::span<const int> fds);

/// True if a packet of this length came. Whatever descriptors came are owned by the result, also when it is refused.
/// Throws Error where this process may have no more of them.
bool receive_packet(int socket, void* data, size_t bytes, std::span<Fd> fds);

}  // namespace nvx
