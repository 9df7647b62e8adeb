#pragma once

#include <chrono>
#include <deque>
#include <string>
#include <utility>
#include <vector>

#include "net/link.h"

namespace nvx::net {

/// How long posts to a peer may stay open after the peer is forgotten.
inline constexpr std::chrono::milliseconds kOpenTimeout{250};
/// How long data of posts that are done() may take to leave this process after forget(), and in close().
inline constexpr std::chrono::milliseconds kFlushTimeout{10000}, kCloseTimeout{500};

/// The events that a link has yet to report: posts that have ended, and peers that are lost.
class LinkEvents {
 public:
  bool empty() const { return events_.empty(); }
  void end(Post& post, Status status = {Code::kPeerDied, "nvx: the peer is lost"}) {
    events_.push_back({&post, std::move(status), 0, {}});
  }
  void end(const std::vector<Post*>& posts, const Status& status = {Code::kPeerDied, "nvx: the peer is lost"}) {
    for (Post* post : posts) end(*post, status);
  }
  void lose(PeerId peer, const std::string& why) { events_.push_back({nullptr, {}, peer, why}); }
  void forget(PeerId peer) {
    std::erase_if(events_, [&](const Event& event) { return !event.post && event.peer == peer; });
  }

  /// Reports those that are there now; losses only if wanted. Each is taken out before its callback, which may post, or
  /// throw: the next call goes on behind it.
  bool report(Receiver* receiver, bool losses) {
    if (events_.empty()) return false;
    for (size_t left = events_.size(); left != 0 && !events_.empty(); --left) {
      const Event event = std::move(events_.front());
      events_.pop_front();
      if (event.post) {
        receiver->done(*event.post, event.status);
      } else if (losses) {
        receiver->lost(event.peer, event.why);
      }
    }
    return true;
  }

 private:
  struct Event {
    Post* post;  // null: the loss of a peer
    Status status;
    PeerId peer;
    std::string why;
  };
  std::deque<Event> events_;
};

}  // namespace nvx::net
