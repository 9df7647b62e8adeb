#pragma once

#include <chrono>
#include <cstdint>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "net/host_address.h"
#include "net/link.h"

namespace nvx::net {

/// Why messages between a peer at these addresses and this process may not arrive, and the variable to set. `dropped`:
/// the number of packets from unknown addresses that this process has dropped.
std::string why_not_admitted(std::span<const HostAddress> addresses, uint64_t dropped);

/// The peers of a link to which there is currently no route, for example while a cable is unplugged, and the posts to
/// them. UCX would give up connecting at once or after three seconds, and must not retry after that. So the
/// posts wait here, and the route is checked from time to time, for a bounded time.
class Unreached {
 public:
  explicit Unreached(std::chrono::milliseconds timeout) : timeout_(timeout) {}

  /// Whether the peer has to wait: it already does, or none of its addresses can be reached.
  bool holds(PeerId peer, std::span<const HostAddress> addresses);
  void keep(Post& post) { waiting_[post.to].posts.push_back(&post); }
  /// Returns whether the post was kept here.
  bool remove(Post& post);

  /// The result of a check: the peer is reachable if `why` is empty, and given up otherwise.
  struct Result {
    PeerId peer;
    std::string why;
    std::vector<Post*> posts;
  };
  std::vector<Result> recheck();
  /// Removes a peer that is lost or forgotten and returns its posts.
  std::vector<Post*> take(PeerId peer);
  std::vector<Post*> take_all();

 private:
  struct Waiting {
    std::vector<HostAddress> addresses;
    Clock::time_point since{};
    bool warned = false;
    std::vector<Post*> posts;
  };
  const std::chrono::milliseconds timeout_;
  std::map<PeerId, Waiting> waiting_;
  Clock::time_point next_check_{};
};

}  // namespace nvx::net
