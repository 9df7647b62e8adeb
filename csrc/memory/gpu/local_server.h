#pragma once

#include <functional>
#include <list>
#include <string>
#include <thread>

#include "base/handle.h"
#include "memory/shm/unix_socket.h"

namespace nvx {

/// A listener that its own thread serves at any time. Each connection of the same user sends one packet.
class LocalServer {
 public:
  /// Reads the packet, and may reply, on the server's thread. Exceptions are logged.
  using Handler = std::function<void(const LocalSocket& client)>;

  /// Throws Error if the socket cannot be opened.
  LocalServer(const std::string& name, Handler handler);
  ~LocalServer();

 private:
  void serve();
  void accept();
  void handle(const LocalSocket& client);

  /// Above this number, the oldest clients that have sent nothing are closed to make room.
  static constexpr size_t kMostClients = 64;

  const Handler handler_;
  LocalSocket listener_;
  Fd end_;  // readable when the thread must end
  std::list<LocalSocket> clients_;
  std::thread thread_;
};

}  // namespace nvx
