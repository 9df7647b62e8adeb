#pragma once

#include <algorithm>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <list>
#include <mutex>
#include <new>
#include <vector>

#include "net/header.h"
#include "net/link.h"
#include "support/inputs.h"

namespace nvx::test {

/// A message as on the link: the header with the data that follows it, and a body.
struct Sent {
  Bytes header;
  Bytes body;
  net::MessageHeader read() const { return net::read_header(header).value_or(net::MessageHeader()); }
};

template <class T>
void append(Bytes& bytes, const T& value) {
  const auto* begin = reinterpret_cast<const std::byte*>(&value);
  bytes.insert(bytes.end(), begin, begin + sizeof value);
}

/// A link to no peer: the test decides what arrives and what happens to posts, and when. Access it with the messenger's
/// lock held.
class ScriptedLink final : public net::Link {
 public:
  explicit ScriptedLink(size_t segment_bytes) : segment_bytes_(segment_bytes) {}
  ~ScriptedLink() override { close(); }

  // --- the script
  bool reads_posts = true;   ///< completes a post successfully in the next progress()
  bool fetches = false;      ///< requests a place, and leaves the message half written until it is resumed
  bool minds_forget = true;  ///< completes open posts once their peer is forgotten
  bool throws = false;       ///< from progress()
  std::deque<Sent> sent;     ///< all posts
  std::deque<Sent> to_come;  ///< arrives in the next progress()
  std::deque<net::PeerId> to_lose;
  size_t looks = 0;      ///< the number of calls of progress()
  size_t forgotten = 0;  ///< peers

  size_t open_posts() const { return posts_.size(); }
  size_t open_fetches() const { return fetching_.size(); }
  /// Half-written messages arrive in the next progress().
  void finish_fetches() { finishing_ = true; }

  // --- the link
  void listen(net::Receiver& receiver) override { receiver_ = &receiver; }
  void close() override { end_all(); }
  std::vector<std::byte> address() const override { return Bytes(8); }
  net::PeerId add(std::span<const std::byte>) override { return peers_++; }
  void forget(net::PeerId) override { ++forgotten, ending_ = minds_forget; }
  void post(net::Post& post) override {
    sent.push_back({{post.header, post.header + post.header_bytes}, {}});
    if (post.bytes != 0) sent.back().body.assign(post.body, post.body + post.bytes);
    posts_.push_back(&post);
  }
  bool progress() override {
    bool moved = false;
    ++looks;
    if (throws) throw std::bad_alloc();
    for (; !to_lose.empty(); moved = true) {
      const net::PeerId peer = to_lose.front();
      to_lose.pop_front();
      receiver_->lost(peer, "the test says so");
    }
    if (reads_posts) {
      for (; !posts_.empty(); moved = true) end_post({});
    }
    if (std::exchange(finishing_, false)) {
      for (; !fetching_.empty(); moved = true) finish_fetch();
    }
    for (; !to_come.empty(); moved = true) {
      const Sent message = std::move(to_come.front());
      to_come.pop_front();
      come(message);
    }
    if (std::exchange(ending_, false)) end_all(), moved = true;
    return moved;
  }
  bool arm() override { return to_come.empty() && to_lose.empty(); }
  void sleep(std::chrono::microseconds span) override {
    std::unique_lock<std::mutex> lock(mutex_);
    stirred_.wait_for(lock, std::min(span, std::chrono::microseconds(1000)));
  }
  void wake() override { stirred_.notify_all(); }
  size_t segment_bytes() const override { return segment_bytes_; }
  std::string describe() const override { return "scripted"; }

 private:
  struct Fetch {
    Sent message;
    std::byte* where;
  };

  void come(const Sent& message) {
    std::byte* where =
        fetches && !message.body.empty() ? receiver_->place(message.header, message.body.size()) : nullptr;
    if (!where) return receiver_->arrived(message.header, message.body);
    std::memcpy(where, message.body.data(), message.body.size() / 2);
    fetching_.push_back({message, where});
  }
  void finish_fetch() {
    const Fetch fetch = std::move(fetching_.front());
    fetching_.pop_front();
    std::memcpy(fetch.where, fetch.message.body.data(), fetch.message.body.size());
    receiver_->arrived(fetch.message.header, {fetch.where, fetch.message.body.size()});
  }
  void end_post(const Status& status) {
    net::Post* post = posts_.front();
    posts_.pop_front();
    if (post->bytes != 0) last_read_ = post->body[post->bytes - 1];
    receiver_->done(*post, status);
  }
  void end_all() {
    while (!posts_.empty()) end_post(Status(Code::kPeerDied, "nvx: the peer was forgotten"));
    for (; !fetching_.empty(); fetching_.pop_front()) {
      const Fetch& fetch = fetching_.front();
      std::memset(fetch.where, 0xDD, fetch.message.body.size());  // the last write
      receiver_->dropped(fetch.message.header, fetch.where);
    }
  }

  const size_t segment_bytes_;
  net::Receiver* receiver_ = nullptr;
  net::PeerId peers_ = 0;
  std::deque<net::Post*> posts_;
  std::deque<Fetch> fetching_;
  bool finishing_ = false, ending_ = false;
  volatile std::byte last_read_{};
  std::mutex mutex_;
  std::condition_variable stirred_;
};

}  // namespace nvx::test
