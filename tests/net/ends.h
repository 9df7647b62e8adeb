#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <utility>

#include "base/deadline.h"
#include "net/host_address.h"
#include "net/link.h"
#include "net/tcp/tcp.h"
#include "net/ucx/ucx.h"
#include "support/loopback.h"

/// Links under test, and a record of their callbacks.
namespace nvx::net::test {

using std::chrono::milliseconds;

inline std::vector<std::byte> pattern(size_t bytes, uint32_t seed) {
  std::vector<std::byte> made(bytes);
  uint32_t x = seed * 2654435761u + 1;
  for (std::byte& b : made) {
    x = x * 1664525u + 1013904223u;
    b = std::byte(x >> 24);
  }
  return made;
}

/// Records all callbacks of a link, and counts those that must happen once.
class EventLog final : public Receiver {
 public:
  struct Message {
    std::vector<std::byte> header, body;
    bool placed;
  };

  std::byte* place(std::span<const std::byte> header, size_t bytes) override {
    ++places_requested;
    if (on_place) on_place();
    if (!gives_places) return nullptr;
    places.emplace_back(bytes);
    placed_headers.emplace_back(header.begin(), header.end());
    return places.back().data();
  }
  void arrived(std::span<const std::byte> header, std::span<const std::byte> body) override {
    bool placed = false;
    for (const auto& place : places) placed |= !body.empty() && place.data() == body.data();
    messages.push_back({{header.begin(), header.end()}, {body.begin(), body.end()}, placed});
    if (on_arrival) on_arrival(messages.back());
  }
  void dropped(std::span<const std::byte>, std::byte* where) override {
    EXPECT_NE(where, nullptr);
    ++drops;
  }
  void done(Post& post, const Status& status) override {
    ++dones[&post];
    if (!status.ok()) ++failures;
    ++ended;
    if (const auto act = std::exchange(on_done, nullptr)) act();
  }
  void lost(PeerId peer, const std::string& why) override {
    EXPECT_FALSE(why.empty());
    ++losses[peer];
  }

  bool gives_places = true;
  std::function<void()> on_place, on_done;  // the latter once
  std::function<void(const Message&)> on_arrival;
  std::vector<Message> messages;
  std::deque<std::vector<std::byte>> places;
  std::deque<std::vector<std::byte>> placed_headers;
  std::map<const Post*, int> dones;
  std::map<PeerId, int> losses;
  size_t places_requested = 0, drops = 0, failures = 0, ended = 0;
};

inline const JobKey& some_key() {
  static const JobKey kKey("sixteen characters or more");
  return kKey;
}

/// A link between processes: "tcp" or "ucx".
inline std::unique_ptr<Link> open_link(const std::string& kind) {
  return kind == "ucx" ? open_ucx() : open_tcp(some_key());
}

/// The source addresses of links on this machine.
inline std::vector<AddressPrefix> this_machine() {
  std::vector<AddressPrefix> all = *parse_prefixes("127.0.0.0/8,::1");
  for (const AddressBytes& address : own_addresses()) all.push_back(AddressPrefix::of(address));
  return all;
}

/// A link with its log, and its posts.
struct End {
  explicit End(std::unique_ptr<Link> made) : link(std::move(made)) {
    link->listen(log);
    link->admit(this_machine());
  }
  ~End() {
    if (link) link->close();
  }

  Post& send(PeerId to, size_t bytes, uint32_t seed = 0, size_t header_bytes = 4) {
    bodies.push_back(pattern(bytes, seed));
    Post& post = posts.emplace_back();
    post.to = to;
    post.header_bytes = uint8_t(header_bytes);
    const std::vector<std::byte> header = pattern(header_bytes, seed + 7);
    std::copy(header.begin(), header.end(), post.header);
    if (header_bytes >= 4) std::memcpy(post.header, &seed, 4);
    post.body = bodies.back().data();
    post.bytes = bytes;
    link->post(post);
    return post;
  }
  bool all_done_once() const {
    for (const Post& post : posts) {
      const auto it = log.dones.find(&post);
      if (it == log.dones.end() || it->second != 1) return false;
    }
    return true;
  }

  std::deque<Post> posts;  // outlive the link, which reads them until it is closed
  std::deque<std::vector<std::byte>> bodies;
  EventLog log;
  std::unique_ptr<Link> link;
};

/// Drives links until `until` holds; false on a timeout.
inline bool drive(const std::vector<Link*>& links, milliseconds timeout, const std::function<bool()>& until) {
  const auto stop = Clock::now() + timeout;
  while (!until()) {
    if (Clock::now() > stop) return false;
    bool moved = false;
    for (Link* link : links) moved |= link->progress();
    if (!moved && links.front()->arm()) links.front()->sleep(std::chrono::microseconds(links.size() == 1 ? 1000 : 100));
  }
  return true;
}

inline bool drive(const std::vector<Link*>& links, const std::function<bool()>& until) {
  return drive(links, std::chrono::seconds(10), until);
}
inline void drive_for(milliseconds span, const std::vector<Link*>& links) {
  drive(links, span, [] { return false; });
}

/// Why there is no UCX here, or an empty text. An installed UCX that does not work is not a reason.
inline std::string why_no_ucx() {
  static const std::string kWhy = []() -> std::string {
#if defined(__SANITIZE_THREAD__)
    return "UCX hooks into how threads end, which ThreadSanitizer does not survive";
#endif
    try {
      open_ucx()->close();
      return "";
    } catch (const Error& error) {
      const std::string what = error.what();
      return !built_with_ucx() || what.find("no libucp.so.0 could be loaded") != what.npos ? what : "";
    }
  }();
  return kWhy;
}

}  // namespace nvx::net::test
