#pragma once

#include <atomic>
#include <list>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "base/address_prefix.h"
#include "base/deadline.h"
#include "net/source_filter.h"
#include "net/tcp/tcp_socket.h"

namespace nvx::net {

/// The sockets at which a TCP link accepts connections: one for each address of the interfaces that lead to other
/// hosts. A filter drops packets from addresses that are not admitted, so that other hosts cost nothing; the handshake
/// does not depend on it.
class TcpListeners {
 public:
  /// `store_host`: see open_tcp(). Throws Error.
  TcpListeners(int epoll, const std::string& store_host);
  ~TcpListeners();
  std::vector<HostAddress> addresses() const;
  void admit(std::span<const AddressPrefix> more);
  /// The number of packets that were dropped; see Drops.
  uint64_t dropped();
  void connection_lost() { drops_.connection_lost(); }

  /// The next connection there, if any, and its source. Without a free descriptor the listener pauses.
  Fd accept(Socket& listener, std::string& from);
  /// Leaves connections in the kernel's queue, and the epoll silent about them, for a moment.
  void pause(Socket& listener);
  /// Any thread may call it.
  bool paused() const { return paused_; }
  /// Ends pauses. To be called from time to time.
  void resume();
  /// "; ranks cannot connect to this process, ..." if they lacked descriptors just now, otherwise empty.
  std::string why_paused() const;
  void close();

 private:
  class Listener;

  std::set<AddressPrefix> admitted_;
  std::list<Listener> listeners_;
  Drops drops_;
  std::atomic<bool> paused_{false};
  Clock::time_point paused_until_{}, no_descriptor_{};
};

}  // namespace nvx::net
