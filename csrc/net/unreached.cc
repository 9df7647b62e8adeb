#include "net/unreached.h"

#include "base/log.h"

namespace nvx::net {
namespace {

constexpr std::chrono::milliseconds kCheckInterval{100};

}  // namespace

std::string why_not_admitted(std::span<const HostAddress> addresses, uint64_t dropped) {
  std::string why;
  const std::string way = describe_route(addresses);
  if (!way.empty()) {
    why =
        "; nothing has ever come from it, " + way +
        ": either a firewall drops packets to the ports of ranks (docs/hosts.md#ports), or this host is behind address "
        "translation: each host admits published addresses only, so set NVX_ALLOW_FROM there to this host's translated "
        "address";
  }
  if (dropped != 0) {
    why +=
        "; " + std::to_string(dropped) +
        " packets to the TCP port of this process were dropped, because no rank has published their source address or "
        "because the backlog was full: if the rank is behind address translation, set NVX_ALLOW_FROM here to its "
        "translated address";
  }
  return why;
}

bool Unreached::holds(PeerId peer, std::span<const HostAddress> addresses) {
  if (waiting_.contains(peer)) return true;
  if (why_out_of_reach(addresses).empty()) return false;
  waiting_[peer] = {{addresses.begin(), addresses.end()}, Clock::now(), false, {}};
  return true;
}

bool Unreached::remove(Post& post) {
  const auto it = waiting_.find(post.to);
  return it != waiting_.end() && std::erase(it->second.posts, &post) != 0;
}

std::vector<Unreached::Result> Unreached::recheck() {
  std::vector<Result> results;
  const auto now = Clock::now();
  if (waiting_.empty() || now < next_check_) return results;
  for (auto it = waiting_.begin(); it != waiting_.end();) {
    Waiting& waiting = it->second;
    const std::string why = why_out_of_reach(waiting.addresses);
    const auto waited = now - waiting.since;
    if (!why.empty() && waited < timeout_) {
      if (!waiting.warned && waited >= timeout_ * 3 / 10) {
        waiting.warned = true;
        NVX_LOG(kWarn, "a process on another host cannot be reached (%s); it counts as lost after %.0f s", why.c_str(),
                std::chrono::duration<double>(timeout_).count());
      }
      ++it;
      continue;
    }
    const auto s = std::chrono::duration_cast<std::chrono::seconds>(waited).count();
    results.push_back({it->first,
                       why.empty() ? ""
                                   : "its host has been unreachable for " + std::to_string(s) + " s: " + why +
                                         "; NVX_SOCKET_IFNAME names the interfaces to use",
                       std::move(waiting.posts)});
    it = waiting_.erase(it);
  }
  next_check_ = Clock::now() + kCheckInterval;  // independent of the duration of this check
  return results;
}

std::vector<Post*> Unreached::take(PeerId peer) {
  auto taken = waiting_.extract(peer);
  return taken.empty() ? std::vector<Post*>() : std::move(taken.mapped().posts);
}

std::vector<Post*> Unreached::take_all() {
  std::vector<Post*> posts;
  for (auto& [peer, waiting] : waiting_) posts.insert(posts.end(), waiting.posts.begin(), waiting.posts.end());
  waiting_.clear();
  return posts;
}

}  // namespace nvx::net
