#pragma once

#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <optional>
#include <unordered_map>
#include <unordered_set>
#include <vector>

#include "base/error.h"
#include "base/flag.h"
#include "base/mutex.h"
#include "group/engine.h"
#include "group/group.h"
#include "kernel/pad.h"
#include "memory/arena.h"
#include "net/port.h"

namespace nvx {

constexpr int kAnySource = -1;

/// One send or receive. The memory must stay until it is done.
struct Message {
  int peer = kAnySource;  ///< becomes the sender when a receive from any has found one
  int64_t tag = 0;
  DType dtype = DType::kBytes;
  std::byte* data = nullptr;
  size_t bytes = 0;
  std::chrono::milliseconds timeout{0};
  std::function<void(const Message&)> finished;  ///< called once, with no lock held, on whatever thread

  bool done() const { return done_.load(std::memory_order_acquire); }
  const Status& status() const { return status_; }  ///< once done

 private:
  friend class Mailbox;
  std::atomic<bool> done_{false};
  Status status_;
  bool receives_ = false;
  size_t moved_ = 0;  // bytes streamed so far
  Deadline deadline_;
};

/// Sends and receives of one rank: apart from the collectives, in order per pair and tag, matched as they come.
///
/// A sender announces each message in an envelope; small ones carry their data, and are done at once. For a large one
/// the receiver grants the message when it has a receive for it, and the sender then streams it through leased staging,
/// one message of a pair after the other in the order of the grants: so no message waits for one that nobody receives.
/// Ranks of this host do so through memory; with those of other hosts the same goes through the port, whose parcels
/// need no staging.
class Mailbox {
 public:
  explicit Mailbox(Group& group);
  ~Mailbox();

  /// Begin. What can be done at once is done; the rest goes on whenever somebody waits, or on a pool thread.
  void send(const std::shared_ptr<Message>& message, Carrier carrier) EXCLUDES(mutex_);
  void receive(const std::shared_ptr<Message>& message, Carrier carrier) EXCLUDES(mutex_);

  /// Drives everything until the message is done; then its status.
  Status wait(Message& message) EXCLUDES(mutex_);

  /// Ends everything that is open; from then on no peer's memory is touched.
  void close() EXCLUDES(mutex_);

  /// Drives everything until nothing is open, for at most this long.
  void settle(std::chrono::milliseconds span) EXCLUDES(mutex_);

 private:
  /// A message that came before its receive.
  struct Early {
    int peer;
    uint64_t number;
    int64_t tag;
    DType dtype;
    size_t bytes;
    bool carried;
    std::vector<std::byte> data;
  };

  /// The two directions between this rank and one other.
  struct Peer {
    // out
    uint64_t announced = 0;
    std::deque<std::shared_ptr<Message>> unannounced;
    std::unordered_map<uint64_t, std::shared_ptr<Message>> ungranted;  // by number
    uint64_t grants_seen = 0;
    std::deque<std::shared_ptr<Message>> streaming;
    uint64_t streamed = 0;
    Span lease;
    size_t lease_wanted = 0;
    // in
    uint64_t taken = 0;
    uint64_t granted = 0;
    std::deque<std::shared_ptr<Message>> arriving;  // granted, in that order
    uint64_t consumed = 0;
    // of another host, by number
    uint64_t taken_there = 0;         ///< announcements that it has read
    uint64_t untold = 0;              ///< of its announcements, read here and not told
    std::map<uint64_t, Early> ahead;  ///< announcements that came before those in front of them
    std::unordered_map<uint64_t, std::shared_ptr<Message>> parcels_out, parcels_in;
  };
  using Finished = std::vector<std::shared_ptr<Message>>;

  void begin(const std::shared_ptr<Message>& message, Carrier carrier) EXCLUDES(mutex_);
  bool advance() REQUIRES(mutex_);
  bool announce(int peer) REQUIRES(mutex_);
  bool read_grants(int peer) REQUIRES(mutex_);
  bool stream(int peer) REQUIRES(mutex_);
  bool take(int peer) REQUIRES(mutex_);
  void come(Early&& early) REQUIRES(mutex_);
  bool announce_far(int peer) REQUIRES(mutex_);
  bool grant_far(int peer) REQUIRES(mutex_);
  bool read_port() REQUIRES(mutex_);
  void read_letter(net::Port::Letter&& letter) REQUIRES(mutex_);
  void read_mail(net::Port::Letter&& letter) REQUIRES(mutex_);
  bool far(int peer) const { return peer >= 0 && group_.seat_of(peer) < 0; }
  std::optional<net::Port::Failure> fate(const Message& message);
  bool match_early(const std::shared_ptr<Message>& receive) REQUIRES(mutex_);
  bool accept(const std::shared_ptr<Message>& receive, Early&& early) REQUIRES(mutex_);
  bool grant(int peer) REQUIRES(mutex_);
  bool consume(int peer) REQUIRES(mutex_);
  bool lease(Peer& peer, int rank, size_t bytes) REQUIRES(mutex_);
  void finish(const std::shared_ptr<Message>& message, Status status) REQUIRES(mutex_);
  void check_times() EXCLUDES(mutex_);
  void fail_all(const Status& status) REQUIRES(mutex_);
  void poke(int peer);
  void deliver() REQUIRES(mutex_);
  void find_attendant() REQUIRES(mutex_);
  void attend() EXCLUDES(mutex_);
  bool turn(Message* message, Carrier carrier) EXCLUDES(mutex_);

  Group& group_;
  Mutex mutex_;
  std::vector<Peer> peers_ GUARDED_BY(mutex_);
  std::unordered_set<std::shared_ptr<Message>> open_ GUARDED_BY(mutex_);  // everything not done
  std::list<std::shared_ptr<Message>> receives_ GUARDED_BY(mutex_);       // not matched, in the order they were posted
  std::list<Early> early_ GUARDED_BY(mutex_);
  std::vector<std::deque<std::pair<std::shared_ptr<Message>, uint64_t>>> to_grant_ GUARDED_BY(mutex_);
  Finished finished_ GUARDED_BY(mutex_);
  int waiters_ GUARDED_BY(mutex_) = 0;
  bool attended_ GUARDED_BY(mutex_) = false;
  std::condition_variable waiters_gone_;
};

}  // namespace nvx
