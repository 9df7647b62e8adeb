#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/error.h"

namespace nvx::net {

/// A process at the other end of a link, numbered by this side in the order in which it was added.
using PeerId = uint32_t;

inline constexpr size_t kMostHeader = 80;

/// One message on its way out. It and its body stay where they are, unchanged, until done() has been called for it.
struct Post {
  PeerId to = 0;
  uint8_t header_bytes = 0;
  alignas(8) std::byte header[kMostHeader];
  const std::byte* body = nullptr;
  size_t bytes = 0;
  void* owner = nullptr;  ///< the sender's own
};

/// Who a link talks to. Called inside progress() or post(), one call at a time; must not call the link back except for
/// post().
class Receiver {
 public:
  virtual ~Receiver() = default;
  /// Where the body of a large message should go, which the link then fetches; null lets the link find room itself.
  /// Called before arrived(), for some messages.
  virtual std::byte* place(std::span<const std::byte> header, size_t bytes) = 0;
  /// A message has come, whole. body is where place() said, or the link's own memory, valid during this call only.
  virtual void arrived(std::span<const std::byte> header, std::span<const std::byte> body) = 0;
  /// The link has read the post's body for the last time. Called exactly once for each post, also after a loss.
  virtual void done(Post& post, const Status& status) = 0;
  /// Nothing can be sent to this peer any more, and nothing will come from it. At most once a peer.
  virtual void lost(PeerId peer, const std::string& why) = 0;
};

/// Moves messages between processes. Each arrives whole and once, in any order, or its peer is lost. Used by one thread
/// at a time, except for wake().
class Link {
 public:
  virtual ~Link() = default;
  /// Ends everything: posts that are open are done(), with a failure, before this returns. Bounded.
  virtual void close() = 0;

  /// For the other side's add(). Carries what it needs to refuse an address that it cannot reach.
  virtual std::vector<std::byte> address() const = 0;
  /// Knows a peer from now on; connects when first needed. Throws Error if this side could never talk to it.
  virtual PeerId add(std::span<const std::byte> address) = 0;
  /// Gives up what is kept for a peer. It is not lost() by that, and may not be posted to any more.
  virtual void forget(PeerId peer) = 0;

  /// Begins to send. Never blocks; done() may be called before it returns.
  virtual void post(Post& post) = 0;
  /// Moves what can be moved without waiting; true if anything did.
  virtual bool progress() = 0;

  /// Prepares to sleep: true if nothing has come since the last progress(), so that sleeping is right.
  virtual bool arm() = 0;
  /// Sleeps until something may have come, wake() is called, or the span is over. The only call beside wake() that may
  /// run while another thread uses the link.
  virtual void sleep(std::chrono::microseconds span) = 0;
  /// Ends a sleep, now or the next one. From any thread.
  virtual void wake() = 0;

  /// The largest body that goes out as one piece; longer ones are the sender's to cut. Larger pieces than this are
  /// fetched by the receiver (rendezvous) where that is faster.
  virtual size_t segment_bytes() const = 0;

  /// "UCX 1.22.0 (/usr/lib/libucp.so.0), tcp on eth0, host memory"
  virtual std::string describe() const = 0;
};

}  // namespace nvx::net
