#include "net/tcp/tcp_outgoing.h"

#include <sys/epoll.h>
#include <sys/uio.h>

#include <cstring>

#include "base/error.h"
#include "base/random.h"
#include "net/descriptors.h"

namespace nvx::net {

void Outgoing::fail(const std::string& why, Failure failure) {
  if (state_ == State::kFailed) return;
  state_ = State::kFailed;
  failure_ = failure;
  why_ = why;
  close();
}

void Outgoing::connect(const HostAddress& to) {
  state_ = State::kConnecting;
  begun_ = Clock::now();
  got_ = 0;
  Fd socket = new_socket(to);
  if (!socket) return fail(std::strerror(errno) + descriptor_limit_hint());
  set_options(socket.get());
  const auto [at, bytes] = sockaddr_of(to);
  if (::connect(socket.get(), reinterpret_cast<const sockaddr*>(&at), bytes) != 0 && errno != EINPROGRESS)
    return fail(std::strerror(errno), errno == ECONNREFUSED ? Failure::kRefused : Failure::kOther);
  try {
    hello_ = {.from = self_, .to = peer_, .challenge = random_value<Challenge>()};
    watch(std::move(socket), EPOLLIN | EPOLLOUT | EPOLLRDHUP | EPOLLET);
  } catch (const Error& error) {
    fail(error.reason());
  }
}

bool Outgoing::advance(uint32_t events) {
  const State before = state_;
  const size_t posts = posts_.size(), sent = sent_;
  if (state_ == State::kConnecting) send_hello();
  if (state_ == State::kHelloSent) send_proof();
  if (state_ == State::kProved) receive_accepted();
  if (state_ == State::kOpen && (before != State::kOpen || (events & ~uint32_t(EPOLLOUT)) != 0)) check_for_end();
  if (state_ == State::kOpen) flush();
  return state_ != before || posts_.size() != posts || sent_ != sent;
}

/// Sends as much as the kernel takes now. The messages of the handshake fit into the empty buffer of a new connection.
size_t Outgoing::send_some(const void* bytes, size_t size) {
  const ssize_t n = ::send(fd(), bytes, size, MSG_NOSIGNAL | MSG_DONTWAIT);
  if (n < 0 && !must_wait(errno)) fail(std::strerror(errno));
  return size_t(std::max<ssize_t>(n, 0));
}

/// Returns 0 if nothing has arrived.
size_t Outgoing::receive_some(void* bytes, size_t size) {
  const ssize_t n = recv(fd(), bytes, size, MSG_DONTWAIT);
  if (n == 0) fail(was_open_ ? "Connection closed" : "the connection was closed during the handshake");
  if (n < 0 && !must_wait(errno)) fail(std::strerror(errno));
  return size_t(std::max<ssize_t>(n, 0));
}

void Outgoing::send_hello() {
  int error = 0;
  socklen_t bytes = sizeof error;
  (void)getsockopt(fd(), SOL_SOCKET, SO_ERROR, &error, &bytes);
  if (error != 0) return fail(std::strerror(error), error == ECONNREFUSED ? Failure::kRefused : Failure::kOther);
  if (send_some(&hello_, sizeof hello_) == sizeof hello_) state_ = State::kHelloSent;
}

void Outgoing::send_proof() {
  got_ += receive_some(reinterpret_cast<std::byte*>(&answer_) + got_, sizeof answer_ - got_);
  if (got_ < sizeof answer_) return;
  try {
    if (!JobKey::same(answer_.mac, mac_of(Role::kAccepts, hello_, answer_.challenge, key_)))
      return fail("did not prove that it holds the job's key (NVX_JOB_KEY)", Failure::kWrongKey);
    const Proof proof{mac_of(Role::kConnects, hello_, answer_.challenge, key_)};
    if (send_some(&proof, sizeof proof) == sizeof proof) state_ = State::kProved;
  } catch (const Error& error) {
    fail(error.reason());
  }
}

/// No message leaves before the peer has accepted the proof, so a connection that it gave up can be replaced.
void Outgoing::receive_accepted() {
  Accepted accepted;
  if (receive_some(&accepted, sizeof accepted) == 0) return;
  state_ = State::kOpen;
  was_open_ = true;
}

/// The peer sends nothing more, so anything that can be read is the end.
void Outgoing::check_for_end() {
  std::byte more;
  if (receive_some(&more, 1) != 0) fail("Unexpected data");
}

void Outgoing::post(Post& post) {
  posts_.push_back(&post);
  if (state_ == State::kOpen && posts_.size() == 1) flush();
}

void Outgoing::leave(Frame::Kind last_frame) {
  leaves_ = true;
  last_frame_.kind = last_frame;
  if (state_ == State::kOpen) flush();
}

void Outgoing::flush() {
  while (!posts_.empty()) {
    Post& post = *posts_.front();
    const size_t head = sizeof(Frame) + post.header_bytes;
    if (sent_ == 0) {
      const Frame frame{.bytes = post.bytes, .header_bytes = post.header_bytes};
      std::memcpy(head_.data(), &frame, sizeof frame);
      std::memcpy(head_.data() + sizeof frame, post.header, post.header_bytes);
    }
    iovec parts[] = {{head_.data() + std::min(sent_, head), head - std::min(sent_, head)},
                     {const_cast<std::byte*>(post.body) + (sent_ > head ? sent_ - head : 0),
                      post.bytes - (sent_ > head ? sent_ - head : 0)}};
    msghdr message{};
    message.msg_iov = sent_ < head ? parts : parts + 1;
    message.msg_iovlen = (sent_ < head) + (post.bytes != 0);
    const ssize_t n = sendmsg(fd(), &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    if (n < 0 && must_wait(errno)) return;
    if (n < 0) return fail(std::strerror(errno));
    sent_ += size_t(n);
    if (sent_ < head + post.bytes) continue;
    events_.end(post, Status());
    sent_ = 0;
    posts_.pop_front();
  }
  if (!leaves_) return;
  sent_ += send_some(reinterpret_cast<const std::byte*>(&last_frame_) + sent_, sizeof last_frame_ - sent_);
  if (sent_ < sizeof last_frame_) return;
  state_ = State::kLeft;
  close();
}

std::vector<Post*> Outgoing::take_posts() {
  std::vector<Post*> posts(posts_.begin(), posts_.end());
  posts_.clear();
  return posts;
}

}  // namespace nvx::net
