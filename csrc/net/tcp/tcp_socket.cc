#include "net/tcp/tcp_socket.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/epoll.h>

#include "base/config.h"
#include "base/error.h"
#include "net/descriptors.h"

namespace nvx::net {

void Socket::watch(Fd fd, uint32_t events) {
  close();
  fd_ = std::move(fd);
  epoll_event event{.events = events, .data = {.ptr = this}};
  if (epoll_ctl(epoll_, EPOLL_CTL_ADD, fd_.get(), &event) != 0) throw system_error("cannot watch a socket");
}

void Socket::change(uint32_t events) {
  epoll_event event{.events = events, .data = {.ptr = this}};
  (void)epoll_ctl(epoll_, EPOLL_CTL_MOD, fd_.get(), &event);
}

void Socket::close() {
  if (fd_) (void)epoll_ctl(epoll_, EPOLL_CTL_DEL, fd_.get(), nullptr);
  fd_.reset();
}

Fd new_socket(const HostAddress& address) {
  return Fd(socket(address.family == 4 ? AF_INET : AF_INET6, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
}

void set_options(int connection) {
  const auto set = [&](int level, int option, int value) {
    (void)setsockopt(connection, level, option, &value, sizeof value);
  };
  set(IPPROTO_TCP, TCP_NODELAY, 1);
  set(SOL_SOCKET, SO_KEEPALIVE, 1);
  set(IPPROTO_TCP, TCP_KEEPIDLE, 10);
  set(IPPROTO_TCP, TCP_KEEPINTVL, 2);
  limit_silence(connection);
}

}  // namespace nvx::net
