#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/error.h"
#include "net/address_prefix.h"

namespace nvx::net {

/// A process at the other end of a link, numbered by this side in the order in which it was added. Never used again.
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

/// Who a link talks to. Called inside progress() and close() only, by the thread that runs them, one call at a time.
/// The only method of the link that it may call is post().
class Receiver {
 public:
  virtual ~Receiver() = default;
  /// Where the body of a message should go, which the link then fetches; null lets the link find room itself. As a rule
  /// this is asked for messages that are longer than the sender's segment_bytes(); a link need not ask it for others.
  /// The memory is the link's until arrived() or dropped(), of which exactly one follows.
  virtual std::byte* place(std::span<const std::byte> header, size_t bytes) = 0;
  /// A whole message has come. body is where place() said, or in the link's own memory, which is valid during this call
  /// only and may have any alignment.
  virtual void arrived(std::span<const std::byte> header, std::span<const std::byte> body) = 0;
  /// A message that place() was asked for will not come: its peer is lost or forgotten, or the link closes. Nothing
  /// writes to that memory from here on.
  virtual void dropped(std::span<const std::byte> header, std::byte* where) {
    (void)header;
    (void)where;
  }
  /// The link has read the post for the last time; where the status is good, it is on its way. Called exactly once for
  /// each post, also after a loss.
  virtual void done(Post& post, const Status& status) = 0;
  /// Nothing can be sent to this peer any more, and nothing will come from it: its process has ended or closed its
  /// link, or cannot be reached. At most once a peer. Once a message has gone either way, the link notices this by
  /// itself; before, only when something is posted.
  virtual void lost(PeerId peer, const std::string& why) = 0;
};

/// Moves messages between processes. Each arrives whole and once, in any order, or its peer is lost. Used by one thread
/// at a time, except for sleep() and wake(). In a forked child it does nothing but end every post in a failure.
class Link {
 public:
  virtual ~Link() = default;
  /// Whom to tell; before anything else is done with the link.
  virtual void listen(Receiver& receiver) = 0;
  /// Ends everything. What was done() well still goes out where that takes under a second; open posts are done(), and
  /// places dropped(), before this returns. The peers lose this link. Nothing is called after it. Also what the
  /// destructor does.
  virtual void close() = 0;

  /// For the other side's add(). Carries what that needs to refuse an address that it cannot reach.
  virtual std::vector<std::byte> address() const = 0;
  /// Makes a peer known; the link connects to it when that is first needed. Throws Error if this side could never talk
  /// to it. The same process may be added again, as another peer.
  virtual PeerId add(std::span<const std::byte> address) = 0;
  /// Gives up what is kept for a peer, lost or not. Nothing may be posted to it any more, and lost() is not called for
  /// it any more. What was done() well still goes out in later calls of progress(); what is open has ended there after
  /// a quarter of a second, one way or the other. The peer does not lose this side, though what it is sending may fail:
  /// either may connect again.
  virtual void forget(PeerId peer) = 0;

  /// Lets peers reach this side from these addresses, from now on: before they have its address, as what comes too
  /// early is lost. A link that takes connections from nobody else does not by itself. Throws Error.
  virtual void admit(std::span<const AddressPrefix> addresses) { (void)addresses; }

  /// Of a peer from which nothing has ever come: what may keep the two apart, and what to set; empty where nothing says
  /// so.
  virtual std::string why_unheard(PeerId peer) { return (void)peer, std::string(); }

  /// Begins to send. Never blocks, never fails: what goes wrong is told to done().
  virtual void post(Post& post) = 0;
  /// Moves what can be moved without waiting; true if anything did, so that calling it again may pay.
  virtual bool progress() = 0;

  /// Prepares to sleep. False if progress() has something to do; where it is true, whatever comes ends the sleep, also
  /// if it has come unnoticed already.
  virtual bool arm() = 0;
  /// Sleeps until something may have come, wake() is called, or the span is over. Several threads may sleep while
  /// another one uses the link. One of them may be woken for what another has already dealt with, and the other way
  /// round, so the span should be short.
  virtual void sleep(std::chrono::microseconds span) = 0;
  /// Ends the sleeps going on or, if there is none, the next one. From any thread, as long as the link is not closed.
  virtual void wake() = 0;

  /// What to cut long bodies into: with several of these in flight the link is as fast as it gets. The same at both
  /// ends of every link of a kind. A longer post works, and is as a rule fetched by its receiver (rendezvous), so
  /// done() waits for that.
  virtual size_t segment_bytes() const = 0;

  /// How long somebody who spins should wait between two calls of progress() in which nothing moved: a call may slow
  /// down whoever is just delivering a message.
  virtual std::chrono::nanoseconds between_looks() const { return std::chrono::nanoseconds(0); }

  /// "UCX 1.22.0 (/usr/lib/libucp.so.0), tcp on eth0, host memory"
  virtual std::string describe() const = 0;
};

}  // namespace nvx::net
