#pragma once

#include <array>
#include <memory>
#include <span>
#include <string>

#include "base/deadline.h"
#include "net/link.h"
#include "net/tcp/tcp_socket.h"
#include "net/tcp/tcp_wire.h"

namespace nvx::net {

/// Memory for a body without a place.
struct Unplaced {
  std::unique_ptr<std::byte[]> memory;
  size_t bytes = 0;
};

/// A connection that another process has made. It carries that process's messages to this one; the other way goes
/// nothing but the handshake. Nothing is read as a message before the other side has proved that it holds the key.
class Incoming final : public Socket {
 public:
  enum class End {
    kNone,
    kLeft,    ///< the sender no longer needs it
    kLost,    ///< the sender has closed its link, or its messages can be read no further
    kBroken,  ///< cut: the sender has ended, or has given up a message
  };

  /// `at`: the address of the other side. `spare`: the link's, for all connections: each would keep its own otherwise.
  Incoming(int epoll, Fd fd, std::string at, const JobKey& key, const LinkNonce& self, Unplaced& spare);

  /// Reads, at most once from the socket. True if anything moved. `scratch` takes data without a place.
  bool read(Receiver& receiver, std::span<std::byte> scratch);
  /// Ends it, and drops the message that is arriving.
  void end(End how, const std::string& why);
  void drop(Receiver& receiver);
  /// Drops the message that is arriving at a place, and reads the rest of it to nowhere.
  void discard(Receiver& receiver);

  bool has_hello() const { return answered_; }
  bool authenticated() const { return authenticated_; }
  const LinkNonce& from() const { return hello_.from; }
  End ended() const { return end_; }
  /// Empty if the other side closed it during the handshake.
  const std::string& why() const { return why_; }
  const std::string& at() const { return at_; }
  Clock::time_point since() const { return since_; }

 private:
  using Bytes = std::span<const std::byte>;
  bool handshake();
  void answer();
  bool gather(size_t size, Bytes& from);
  Bytes take(Receiver& receiver, Bytes come);
  void take_body(Receiver& receiver, Bytes& come);
  void complete(Receiver& receiver);
  Bytes header() const { return Bytes(head_).subspan(sizeof(Frame), frame_.header_bytes); }

  const std::string at_;
  const JobKey& key_;
  const LinkNonce& self_;
  Unplaced& spare_;
  const Clock::time_point since_ = Clock::now();
  bool authenticated_ = false, answered_ = false;
  ClientHello hello_;
  Challenge challenge_{};
  End end_ = End::kNone;
  std::string why_;

  std::array<std::byte, sizeof(Frame) + kMostHeader> head_;  // also of the handshake's messages
  size_t got_ = 0;                                           // of it
  Frame frame_;
  std::byte* where_ = nullptr;  // of the body that is arriving
  size_t have_ = 0;             // of it
  bool placed_ = false, discards_ = false;
  Unplaced own_;
};

}  // namespace nvx::net
