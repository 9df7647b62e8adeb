#pragma once

#include <array>
#include <deque>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "net/link_events.h"
#include "net/tcp/tcp_socket.h"
#include "net/tcp/tcp_wire.h"

namespace nvx::net {

/// A connection that carries this side's messages to a peer, once the peer has proved that it holds the key.
class Outgoing final : public Socket {
 public:
  enum class State { kFailed, kConnecting, kHelloSent, kProved, kOpen, kLeft };
  enum class Failure { kOther, kRefused, kWrongKey };

  /// A post has ended when the kernel has all of it.
  Outgoing(int epoll, const JobKey& key, const LinkNonce& self, const LinkNonce& peer, LinkEvents& events)
      : Socket(Kind::kOutgoing, epoll), key_(key), self_(self), peer_(peer), events_(events) {}

  /// Starts to connect, once more after a failure.
  void connect(const HostAddress& to);
  /// Advances as far as it goes without waiting, after these events of the epoll. Returns true if anything moved.
  bool advance(uint32_t events);
  void post(Post& post);
  /// Sends this behind all posts, and closes the connection then.
  void leave(Frame::Kind last_frame);
  void fail(const std::string& why, Failure failure = Failure::kOther);

  State state() const { return state_; }
  /// Whether it has been authenticated, so that messages may have been sent on it.
  bool was_open() const { return was_open_; }
  Failure failure() const { return failure_; }
  const std::string& why() const { return why_; }
  Clock::time_point begun() const { return begun_; }
  bool idle() const { return posts_.empty(); }
  /// Forgets a post, if no message may have been sent yet. Returns whether it had the post.
  bool remove(Post& post) { return !was_open_ && std::erase(posts_, &post) != 0; }
  /// The posts that are not written, which it forgets.
  std::vector<Post*> take_posts();

 private:
  void send_hello();
  void send_proof();
  void receive_accepted();
  void flush();
  size_t send_some(const void* bytes, size_t size);
  size_t receive_some(void* bytes, size_t size);
  void check_for_end();

  const JobKey& key_;
  const LinkNonce self_, peer_;
  LinkEvents& events_;
  State state_ = State::kFailed;
  bool was_open_ = false;
  Failure failure_ = Failure::kOther;
  std::string why_;
  Clock::time_point begun_{};
  ClientHello hello_;
  Answer answer_;
  size_t got_ = 0;  // of the answer

  std::deque<Post*> posts_;
  std::array<std::byte, sizeof(Frame) + kMostHeader> head_;  // of the first post
  size_t sent_ = 0;  // of the first post with its head, behind all posts of the last frame
  bool leaves_ = false;
  Frame last_frame_;
};

}  // namespace nvx::net
