#pragma once

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/address_prefix.h"
#include "base/error.h"

namespace nvx::net {

/// A process at the other end of a link. The link numbers peers in the order of add() and never reuses a number.
using PeerId = uint32_t;

/// Identifies a link, even among links of one process and of processes with recycled ids.
using LinkNonce = std::array<uint64_t, 2>;

inline constexpr size_t kMostHeader = 80;
/// The longest body for which a link allocates memory where Receiver::place() returns null.
inline constexpr size_t kMostUnplaced = 64 << 20;

/// One outgoing message. The post and its body must stay unchanged in place until done() is called for the post.
struct Post {
  PeerId to = 0;
  uint8_t header_bytes = 0;
  alignas(8) std::byte header[kMostHeader];
  const std::byte* body = nullptr;
  size_t bytes = 0;
  void* owner = nullptr;  ///< for the sender's use
};

/// The callbacks of a link. They are called inside progress() and close() only, by the thread that runs these, one at a
/// time. A callback may call post() and sent_by() and no other method of the link.
class Receiver {
 public:
  virtual ~Receiver() = default;
  /// Returns the memory into which the link fetches the body of a message, or null to let the link allocate it.
  /// Called for long messages only: over UCX normally for those above the sender's segment_bytes(), over TCP from
  /// 16 KiB on. The link owns the memory until it calls arrived() or dropped(), exactly one of them.
  virtual std::byte* place(std::span<const std::byte> header, size_t bytes) = 0;
  /// A complete message has arrived. `body` is in the memory from place(), or in memory of the link that is valid
  /// during this call only and may have any alignment.
  virtual void arrived(std::span<const std::byte> header, std::span<const std::byte> body) = 0;
  /// A message for which place() was called will not arrive. The link no longer writes to `where`.
  virtual void dropped(std::span<const std::byte> header, std::byte* where) {
    (void)header;
    (void)where;
  }
  /// The link has read the post; with a good status it is on its way. Called once for each, also after a loss.
  virtual void done(Post& post, const Status& status) = 0;
  /// The connection to this peer has ended: its process has ended or closed its link, or is unreachable. Called at most
  /// once per peer. After the first message in either direction the link detects this by itself; before it, only when a
  /// post fails.
  virtual void lost(PeerId peer, const std::string& why) = 0;
};

/// Moves messages between processes. Each message arrives whole and once, in any order, or its peer is lost. Used by
/// one thread at a time, except for sleep() and wake(). In a forked child every post fails and nothing else happens.
class Link {
 public:
  virtual ~Link() = default;
  /// Sets the receiver of all callbacks. Call it before any other method.
  virtual void listen(Receiver& receiver) = 0;
  /// Closes the link, as does the destructor. Posts done() with a good status are still delivered if that takes less
  /// than a second; open ones are done() and places dropped() on return, and no callback follows. The peers lose this
  /// link.
  virtual void close() = 0;

  /// The address for the other side's add(). It contains enough for that side to refuse an unreachable address.
  virtual std::vector<std::byte> address() const = 0;
  /// Adds a peer, connected on first use. Throws Error if it can never be reached. A process may be added again.
  virtual PeerId add(std::span<const std::byte> address) = 0;
  /// Releases a peer, lost or not. Do not post to it afterwards; lost() is not called for it. Posts that are done()
  /// with a good status are still delivered in later calls of progress(); open ones end within a quarter of a second.
  /// The peer does not lose this side, though its own messages may fail. Either side may connect again.
  virtual void forget(PeerId peer) = 0;

  /// Admits connections from these addresses. Call it before the peers have this side's address, because packets that
  /// arrive earlier are dropped. Links that accept connections only from added peers need not implement it. Throws
  /// Error.
  virtual void admit(std::span<const AddressPrefix> addresses) { (void)addresses; }

  /// Whether the message for which place() or arrived() is being called may come from this peer, forgotten or not. A
  /// link that cannot identify senders returns true.
  virtual bool sent_by(PeerId peer) const { return (void)peer, true; }

  /// For a peer from which nothing has ever arrived: the likely obstacle and the variable to set; empty if unknown.
  virtual std::string obstacle(PeerId peer) { return (void)peer, std::string(); }

  /// Starts to send. Never blocks and never fails; done() reports errors.
  virtual void post(Post& post) = 0;
  /// Ends a post that waits for the connection to its peer; nothing has read it. Does nothing to other posts.
  virtual void cancel(Post& post) { (void)post; }
  /// The status of a cancelled post.
  static Status cancelled() { return {Code::kAborted, "nvx: the message was cancelled before its peer was reached"}; }
  /// Advances all messages without waiting. Returns true if anything moved, so another call may be useful.
  virtual bool progress() = 0;

  /// Prepares to sleep. False if progress() has work; otherwise any event, even an earlier one, ends the next sleep.
  virtual bool arm() = 0;
  /// Sleeps until an event may have arrived, wake() is called, or the span is over. Several threads may sleep while
  /// another one uses the link. A sleeper may miss an event that another one was woken for, so use a short span.
  virtual void sleep(std::chrono::microseconds span) = 0;
  /// Ends the current sleeps or, if there is none, the next one. Any thread may call it while the link is open.
  virtual void wake() = 0;

  /// The segment size for long bodies: with several segments in flight the link reaches its full bandwidth. It is the
  /// same at both ends of every link of a kind. A longer post works, but its receiver usually fetches it (rendezvous),
  /// and done() waits for that.
  virtual size_t segment_bytes() const = 0;

  /// Bodies and places in this range are in device memory from now on: the link copies none of them, so the receiver
  /// has to give each such message a place, however short it is. Returns the reason if the link moves host memory
  /// alone; empty: it moves both. An empty range only queries it.
  virtual std::string use_device_memory(std::span<const std::byte> range) {
    return (void)range, "the link to other hosts reads and writes host memory alone";
  }

  /// How long a spinner waits after an idle progress(): each call may slow the thread that delivers a message.
  virtual std::chrono::nanoseconds poll_interval() const { return std::chrono::nanoseconds(0); }

  /// "UCX 1.22.0 (/usr/lib/libucp.so.0), tcp on eth0, host memory"
  virtual std::string describe() const = 0;
};

}  // namespace nvx::net
