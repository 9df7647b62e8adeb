#pragma once

#include <span>
#include <string>

#include "base/handle.h"

/// Abstract Unix sockets between processes of one user. They leave no name behind, and no other user can open them.
namespace nvx {

/// A name that nobody else has.
std::string fresh_socket_name();

/// A listening socket that never blocks. Throws Error if it cannot be made.
Fd listen_on(const std::string& name);

/// Nothing where nobody listens there, or a process of another user; errno says why.
Fd connect_to(const std::string& name);

/// Lets in the next process that has come to a listener, if it is of the same user. Throws Error where nobody can be
/// let in.
enum class Came { kNobody, kStranger, kGuest };
Came accept_from(int listener, Fd* guest);

/// One packet, and up to two descriptors with it.
bool send_packet(int socket, const void* data, size_t bytes, std::span<const int> fds);

/// True if a packet of this length came. Descriptors that came are owned by `fds`, also when the packet is refused.
/// Throws Error where this process may have no more of them.
bool receive_packet(int socket, void* data, size_t bytes, std::span<Fd> fds);

}  // namespace nvx
