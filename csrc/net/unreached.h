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

/// What may keep a peer at these addresses from hearing this side, or this side from hearing it, which has dropped so
/// many packets of others; and what to set.
std::string why_not_admitted(std::span<const HostAddress> addresses, uint64_t dropped);

/// Peers of a link to which no way leads just now, as while a cable is out, and what was posted to them. UCX would give
/// up connecting to them at once, or after three seconds, and must not be asked again after that. So the posts wait
/// here; whether there is a way is looked at again now and then, for a bounded time.
class Unreached {
 public:
  explicit Unreached(std::chrono::milliseconds patience) : patience_(patience) {}

  /// Whether the peer has to wait: it does already, or there is no way to any of its addresses.
  bool holds(PeerId peer, std::span<const HostAddress> addresses);
  /// Keeps a post to a peer that has to wait.
  void keep(Post& post) { waiting_[post.to].posts.push_back(&post); }

  /// What has become of a peer: there is a way to it if `why` is empty; else it is given up.
  struct News {
    PeerId peer;
    std::string why;
    std::vector<Post*> posts;
  };
  std::vector<News> look_again();
  /// What is kept for a peer that is lost or forgotten; it waits no more.
  std::vector<Post*> take(PeerId peer);
  /// All that is kept; nothing is from then on.
  std::vector<Post*> take_all();

 private:
  struct Waiting {
    std::vector<HostAddress> addresses;
    Clock::time_point since{};
    bool warned = false;
    std::vector<Post*> posts;
  };
  const std::chrono::milliseconds patience_;
  std::map<PeerId, Waiting> waiting_;
  Clock::time_point next_look_{};
};

}  // namespace nvx::net
