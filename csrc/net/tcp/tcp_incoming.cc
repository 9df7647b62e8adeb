#include "net/tcp/tcp_incoming.h"

#include <sys/epoll.h>
#include <sys/uio.h>

#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "base/random.h"
#include "net/source_filter.h"

namespace nvx::net {
namespace {

/// Bodies from this size on may be read directly to their place.
constexpr size_t kLeastPlaced = 16 << 10;
/// The memory for bodies that a link keeps between two of them.
constexpr size_t kMostKept = 64 << 10;

static_assert(sizeof(ClientHello) <= sizeof(Frame) + kMostHeader);

}  // namespace

Incoming::Incoming(int epoll, Fd fd, std::string at, const JobKey& key, const LinkNonce& self, Unplaced& spare)
    : Socket(Kind::kIncoming, epoll), at_(std::move(at)), key_(key), self_(self), spare_(spare) {
  set_options(fd.get());
  watch(std::move(fd), EPOLLIN | EPOLLRDHUP);
}

void Incoming::end(End how, const std::string& why) {
  if (end_ != End::kNone) return;
  end_ = how;
  why_ = why;
  close();
}

void Incoming::drop(Receiver& receiver) {
  if (std::exchange(placed_, false)) receiver.dropped(header(), where_);
}

void Incoming::discard(Receiver& receiver) {
  discards_ |= placed_;
  drop(receiver);
}

bool Incoming::read(Receiver& receiver, std::span<std::byte> scratch) {
  if (end_ != End::kNone) return false;
  if (!authenticated_) return handshake();
  const size_t wanted = where_ ? frame_.bytes - have_ : 0;
  iovec parts[] = {{where_ ? where_ + have_ : nullptr, wanted}, {scratch.data(), scratch.size()}};
  if (discards_) parts[0] = {scratch.data(), std::min(wanted, scratch.size())};
  msghdr message{};
  message.msg_iov = wanted ? parts : parts + 1;
  message.msg_iovlen = wanted && !discards_ ? 2 : 1;
  const ssize_t n = recvmsg(fd(), &message, MSG_DONTWAIT);
  if (n < 0 && must_wait(errno)) return false;
  if (n <= 0) {
    end(End::kBroken, n < 0 ? std::strerror(errno) : "Connection closed");
    return true;
  }
  const size_t direct = std::min(size_t(n), wanted);
  have_ += direct;
  if (where_ && have_ == frame_.bytes) complete(receiver);
  for (Bytes come = scratch.first(size_t(n) - direct); !come.empty() && end_ == End::kNone;)
    come = take(receiver, come);
  return true;
}

// --- the handshake

bool Incoming::handshake() {
  const size_t size = answered_ ? sizeof(Proof) : sizeof(ClientHello);
  const ssize_t n = recv(fd(), head_.data() + got_, size - got_, MSG_DONTWAIT);
  if (n < 0 && must_wait(errno)) return false;
  if (n <= 0) return end(End::kBroken, ""), true;  // it may have been a peer that has changed its mind
  got_ += size_t(n);
  if (got_ < size) return true;
  got_ = 0;
  try {
    answer();
  } catch (const Error& error) {
    end(End::kBroken, error.reason());
  }
  return true;
}

void Incoming::answer() {
  if (answered_) {
    Proof proof;
    std::memcpy(&proof, head_.data(), sizeof proof);
    authenticated_ = JobKey::same(proof.mac, mac_of(Role::kConnects, hello_, challenge_, key_));
    if (!authenticated_) return end(End::kBroken, "it did not prove that it holds the key");
    detach_source_filter(fd());
    const Accepted accepted;
    if (send(fd(), &accepted, sizeof accepted, MSG_NOSIGNAL | MSG_DONTWAIT) != ssize_t(sizeof accepted))
      end(End::kLeft, "it could not be sent the acceptance");
    return;
  }
  std::memcpy(&hello_, head_.data(), sizeof hello_);
  if (hello_.magic != ClientHello::kMagic || hello_.to != self_ || hello_.from == self_)
    return end(End::kBroken, "it did not request this process in nvx's protocol");
  challenge_ = random_value<Challenge>();
  const Answer answer{challenge_, mac_of(Role::kAccepts, hello_, challenge_, key_)};
  answered_ = true;
  if (send(fd(), &answer, sizeof answer, MSG_NOSIGNAL | MSG_DONTWAIT) != ssize_t(sizeof answer))
    end(End::kBroken, "it took no answer");
}

// --- messages

/// Adds to the head until it has this size. Returns false if there is too little for it.
bool Incoming::gather(size_t size, Bytes& from) {
  if (got_ >= size) return true;
  const size_t n = std::min(size - got_, from.size());
  std::memcpy(head_.data() + got_, from.data(), n);
  from = from.subspan(n);
  got_ += n;
  return got_ == size;
}

/// Takes at most one message. Returns the rest.
Incoming::Bytes Incoming::take(Receiver& receiver, Bytes come) {
  const bool fresh = got_ < sizeof frame_;
  if (!gather(sizeof frame_, come)) return come;
  if (fresh) std::memcpy(&frame_, head_.data(), sizeof frame_);
  if (!frame_.valid()) return end(End::kLost, "sent data that is no message of nvx"), come;
  if (!gather(sizeof frame_ + frame_.header_bytes, come)) return come;
  if (frame_.kind != Frame::kMessage) {
    end(frame_.kind == Frame::kLeave ? End::kLeft : End::kLost, "its process has closed its link");
  } else if (frame_.bytes < kLeastPlaced && frame_.bytes <= come.size()) {
    got_ = 0;
    const Bytes body = come.first(frame_.bytes);
    come = come.subspan(body.size());
    receiver.arrived(header(), body);
  } else {
    take_body(receiver, come);
  }
  return come;
}

/// Finds the place of a body, and copies the part of it that has arrived.
void Incoming::take_body(Receiver& receiver, Bytes& come) {
  where_ = frame_.bytes < kLeastPlaced ? nullptr : receiver.place(header(), frame_.bytes);
  placed_ = where_ != nullptr;
  if (!placed_) {
    if (frame_.bytes > kMostUnplaced) return end(End::kLost, "sent a message that is larger than accepted");
    const bool fits = spare_.bytes >= frame_.bytes;
    own_ = fits ? std::exchange(spare_, {})
                : Unplaced{std::make_unique_for_overwrite<std::byte[]>(frame_.bytes), frame_.bytes};
    where_ = own_.memory.get();
  }
  have_ = std::min<size_t>(frame_.bytes, come.size());
  std::memcpy(where_, come.data(), have_);
  come = come.subspan(have_);
  if (have_ == frame_.bytes) complete(receiver);
}

void Incoming::complete(Receiver& receiver) {
  got_ = 0;
  placed_ = false;
  const Bytes body(std::exchange(where_, nullptr), frame_.bytes);
  if (!std::exchange(discards_, false)) receiver.arrived(header(), body);
  if (own_.bytes > spare_.bytes && own_.bytes <= kMostKept) std::swap(own_, spare_);
  own_ = {};
}

}  // namespace nvx::net
