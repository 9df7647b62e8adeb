#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/address_prefix.h"
#include "base/handle.h"
#include "memory/shm/handout.h"
#include "net/host_address.h"

namespace nvx {

/// The leader of a host, as it describes itself in the store to the leaders of other hosts. Fixed layout; comes from
/// peers.
struct HostLeader {
  Card card;
  uint64_t secret = 0;                                           ///< a connection to it begins with this
  std::array<AddressBytes, net::kMostAddresses> addresses = {};  ///< from which it connects; ends with 0
  std::array<char, 64> at = {};                                  ///< where it listens: "10.0.0.7"
  uint16_t port = 0;
  std::array<uint8_t, 6> reserved = {};
};
static_assert(sizeof(HostLeader) == 464);

/// During set-up, the leader of the first host to come holds a TCP connection to the leader of each other host. So both
/// notice when the process of the other ends, or all of its host: the connection closes without a farewell. Best
/// effort: hosts that cannot connect notice it later. A job on one host opens no port.
class HostLinks {
 public:
  using Addresses = std::array<AddressBytes, net::kMostAddresses>;

  /// `addresses`: of this host's packets. `store_host`: see Store::host().
  HostLinks(const Card& own, const Addresses& addresses, const std::string& store_host);
  /// Says farewell.
  ~HostLinks();
  HostLinks(const HostLinks&) = delete;
  HostLinks& operator=(const HostLinks&) = delete;

  /// For the store.
  const HostLeader& own() const { return own_; }
  /// On the leader of a host that is not the first: listens, for the leader of the first host only.
  void listen(const HostLeader& first);
  /// Waits at most so long until that leader has connected. Closes the port.
  void await(std::chrono::milliseconds span);
  /// On the leader of the first host: connects to another leader, in the background.
  void connect(const HostLeader& other);

  /// Proceeds with connections, without blocking. Returns the card of a leader whose process has ended.
  std::optional<Card> look();

 private:
  struct Link {
    Fd socket;
    Card card;
    bool greeted = false;  // on the side that connects: the secret is sent
    uint64_t secret = 0;
  };
  static bool greet(Link& link, std::chrono::milliseconds span);

  HostLeader own_;
  std::string store_host_;
  Fd listener_;
  Card first_;
  std::vector<Link> links_;
};

}  // namespace nvx
