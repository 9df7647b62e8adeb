#pragma once

#include <cerrno>

#include "base/handle.h"
#include "net/host_address.h"

namespace nvx::net {

/// A socket of a TCP link, never blocking. The link's epoll returns it when something has happened to it.
class Socket {
 public:
  enum class Kind { kListener, kIncoming, kOutgoing };

  Kind kind() const { return kind_; }

 protected:
  Socket(Kind kind, int epoll) : kind_(kind), epoll_(epoll) {}
  ~Socket() { close(); }
  /// Takes over a socket and has the epoll watch it. Throws Error.
  void watch(Fd fd, uint32_t events);
  void change(uint32_t events);
  /// Leaves the epoll first: a child that was just forked may still have the socket, and the epoll would go on.
  void close();
  int fd() const { return fd_.get(); }

 private:
  const Kind kind_;
  const int epoll_;
  Fd fd_;
};

Fd new_socket(const HostAddress& address);
/// Small messages leave at once, and a silent host is noticed, later if NVX_LIVENESS_S is longer.
void set_options(int connection);

/// Whether a call failed only because it would have blocked.
inline bool must_wait(int error) { return error == EAGAIN || error == EWOULDBLOCK || error == EINTR; }

}  // namespace nvx::net
