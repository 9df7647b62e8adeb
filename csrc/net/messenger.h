#pragma once

#include <array>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "base/flag.h"
#include "base/mutex.h"
#include "net/header.h"
#include "net/link.h"
#include "net/liveness.h"

namespace nvx::net {

class GroupPort;

/// Called when the link has finished reading a body, with the messenger's lock held.
class Sender {
 public:
  virtual ~Sender() = default;
  virtual void sent(uint64_t cookie, const Status& status) = 0;
};

/// Identifies a process; sent before its link's address.
using ProcessId = uint64_t;

/// The process's communication with other hosts: one link, one lock, and a progress thread that drives the link while
/// no thread waits, for the ports of all groups. Of several sleepers one sleeps in the link and wakes the others.
class Messenger final : private Receiver {
 public:
  /// This process's messenger. The first call opens it, and it lives until the process ends. Throws Error.
  /// `store_host`: see open_ucx() and open_tcp(), which it calls if there is a job key.
  static std::shared_ptr<Messenger> instance(const std::string& store_host);
  static std::shared_ptr<Messenger> opened();

  /// `silence`: see Liveness.
  Messenger(std::unique_ptr<Link> link, std::chrono::milliseconds silence);
  ~Messenger() override { close(); }
  /// Stops the thread and closes the link, in bounded time. Nothing moves afterwards.
  void close() EXCLUDES(mutex_);

  /// Hold it for any access to a port or a run.
  Mutex& mutex() RETURN_CAPABILITY(mutex_) { return mutex_; }
  std::vector<std::byte> address() EXCLUDES(mutex_);
  std::string describe() EXCLUDES(mutex_);
  std::string use_device_memory(std::span<const std::byte> range) EXCLUDES(mutex_);
  size_t segment_bytes() const { return segment_bytes_; }
  Liveness& liveness() { return liveness_; }

  /// Admits connections from processes at these addresses. Throws Error.
  void admit(std::span<const AddressPrefix> addresses) EXCLUDES(mutex_);

  /// Routes messages for a rank of a group to its port, until remove_port().
  void add_port(uint64_t group, int rank, GroupPort& port) REQUIRES(mutex_) { ports_[{group, uint32_t(rank)}] = &port; }
  void remove_port(uint64_t group, int rank, const GroupPort& port) REQUIRES(mutex_);

  /// The peer of a process's address. Throws Error if the link can never reach it.
  PeerId connect(std::span<const std::byte> address) REQUIRES(mutex_);

  /// Sends a header, the data that follows it, and a body, which is copied, up to kMostCopied bytes, unless a sender is
  /// to be notified when it has been read. If the peer is lost, the sender is notified and nothing is sent.
  void send(PeerId to, const MessageHeader& header, std::span<const std::byte> behind,
            std::span<const std::byte> body = {}, Sender* sender = nullptr, uint64_t cookie = 0) REQUIRES(mutex_);
  static constexpr size_t kMostCopied = 1024;
  /// Waits, at most 200 ms, until the reports of failed groups have left this process, which may end next: a connection
  /// may not stand yet. The next call does not wait for them again. Do not call it from a callback of the link.
  void flush_reports() EXCLUDES(mutex_);
  /// Closes the connection to a peer, which counts as lost from then on. `may_live`: it was given up by its process or
  /// by this one, so it is no reason to doubt that its process lives.
  void disconnect(PeerId peer, const std::string& why, bool may_live = false) REQUIRES(mutex_);

  /// Advances the link without waiting. Returns true if anything moved, so another call may be useful.
  bool progress() REQUIRES(mutex_);
  /// Releases memory that the link may still access, in bounded time; on return the link accesses it no more. `open`
  /// counts the link's remaining accesses. Messages that wait for a connection are cancelled. If the others do not end
  /// by themselves, `disconnect` closes the connections that hold them. At last the senders are detached, so they are
  /// not notified any more. Releases the lock from time to time. Do not call it from a callback of the link.
  void release_from_link(const auto& senders, const std::function<int()>& open, const std::function<void()>& disconnect)
      REQUIRES(mutex_) {
    if (open() == 0) return;
    for (const Sender* sender : senders) {
      for (Outgoing& out : outgoing_) {
        if (out.sender == sender) link_->cancel(out.post);
      }
    }
    if (await_end(open, disconnect)) return;
    for (const Sender* sender : senders) {
      for (Outgoing& out : outgoing_) {
        if (out.sender == sender) out.sender = nullptr;
      }
    }
  }
  /// Processes arrived messages, within bounds, unless another thread has the lock.
  bool try_progress() EXCLUDES(mutex_);

  /// Waits until ready(), which is called with the lock held, or until the deadline passes or the watch alarms. Drives
  /// the link meanwhile. A sleeper calls check_peers(), with the lock held, about fifty times a second.
  Waited wait(auto ready, auto check_peers, int peer, const WaitRules& rules) EXCLUDES(mutex_);

  /// Sleeps in the link until another thread that drives it has found something, at most for `span`. Returns at once if
  /// events_ has changed since `seen` was read.
  void sleep(std::chrono::microseconds span, std::optional<uint64_t> seen = std::nullopt) EXCLUDES(mutex_);

  /// For the end of the process: waits until the peers have received everything, as long as they show signs of life.
  /// After the process ends, the system discards undelivered data as soon as the peer sends something.
  void finish() EXCLUDES(mutex_);

  /// Why the peer is lost, or an empty text.
  const std::string& lost_because(PeerId peer) const REQUIRES(mutex_) { return peers_[peer].lost; }
  /// For a peer from which nothing has ever arrived: the likely obstacle and what to set; empty otherwise.
  std::string obstacle(PeerId peer) REQUIRES(mutex_);

 private:
  friend class Liveness;
  struct Peer {
    ProcessId process = 0;
    std::vector<std::byte> address{};  // of the link
    std::string lost{};                // the reason, if it is lost
    bool may_live = false;             // although it is lost
    std::optional<PeerId> spare{};     // a second connection, for the notice that it is considered lost
    std::optional<PeerId> spare_of{};  // set if this is such a connection
    bool has_sent = false;             // whether anything was sent to it
  };
  /// An outgoing message with space for a copied body.
  struct Outgoing {
    Post post;
    Sender* sender = nullptr;
    uint64_t cookie = 0;
    Clock::time_point report_ends{};  // of a report that a group has failed: until when flush_reports() waits for it
    std::array<std::byte, kMostCopied> copied;
  };
  using GroupPortKey = std::pair<uint64_t, uint32_t>;  // group, rank on this side

  std::byte* place(std::span<const std::byte> header, size_t bytes) override REQUIRES(mutex_);
  void arrived(std::span<const std::byte> header, std::span<const std::byte> body) override REQUIRES(mutex_);
  void dropped(std::span<const std::byte> header, std::byte* where) override REQUIRES(mutex_);
  void done(Post& post, const Status& status) override REQUIRES(mutex_);
  void lost(PeerId peer, const std::string& why) override REQUIRES(mutex_);

  bool await_end(const std::function<int()>& open, const std::function<void()>& disconnect) REQUIRES(mutex_);
  /// Drives the link, and releases the lock for a moment if nothing moves. Do not call it from a callback of the link.
  void drive_or_pause() REQUIRES(mutex_);

  Outgoing& outgoing(PeerId to, const MessageHeader& header, std::span<const std::byte> behind) REQUIRES(mutex_);
  /// Sends a lost peer the reason over a second connection, which stays.
  void send_to_lost(PeerId peer, const MessageHeader& header, std::span<const std::byte> behind) REQUIRES(mutex_);
  GroupPort* port_of(const MessageHeader& header) REQUIRES(mutex_);
  bool progress_all() REQUIRES(mutex_);
  void wake_sleepers() REQUIRES(mutex_);
  void run_progress_thread() EXCLUDES(mutex_);
  bool progress_while_idle(bool active) EXCLUDES(mutex_);

  Mutex mutex_;
  std::unique_ptr<Link> link_;
  const size_t segment_bytes_;
  const std::chrono::nanoseconds poll_interval_;
  const ProcessId process_;
  std::deque<Peer> peers_ GUARDED_BY(mutex_);  // by PeerId, as the link numbers them
  std::unordered_map<ProcessId, PeerId> by_process_ GUARDED_BY(mutex_);
  std::map<GroupPortKey, GroupPort*> ports_ GUARDED_BY(mutex_);
  std::deque<Outgoing> outgoing_ GUARDED_BY(mutex_);
  std::vector<Outgoing*> free_ GUARDED_BY(mutex_);
  std::vector<PeerId> to_forget_ GUARDED_BY(mutex_);
  Liveness liveness_;
  std::condition_variable event_;
  uint64_t events_ GUARDED_BY(mutex_) = 0;  // changes with every arrived or completed message
  int sleepers_ GUARDED_BY(mutex_) = 0;
  bool sleeper_in_link_ GUARDED_BY(mutex_) = false;  // a thread sleeps in the link
  bool closed_ GUARDED_BY(mutex_) = false;
  std::atomic<int64_t> driven_ns_{0};  // when a thread last drove the link
  std::atomic<bool> closing_{false};
  std::thread progress_thread_;
};

/// The longest sleep in the link while an operation waits; a missed event costs at most this.
inline constexpr std::chrono::microseconds kMostSleep{1000};
/// The shortest spin of a waiter that may spin. A shorter spin than an exchange takes never succeeds, and so the
/// adaptive spin time would never grow again.
inline constexpr std::chrono::microseconds kLeastSpin{50};

Waited Messenger::wait(auto ready, auto check_peers, int peer, const WaitRules& rules) {
  uint64_t seen = 0;
  bool moved = false;
  const auto attempt = [&] {
    MutexLock lock(mutex_);
    moved = progress();
    seen = events_;
    return ready();
  };
  if (attempt()) return Waited::kReached;
  if (rules.spin) {
    const auto stop = Clock::now() + std::max<std::chrono::nanoseconds>(rules.spin->span(), kLeastSpin);
    do {
      if (attempt()) return rules.spin->hit(), Waited::kReached;
      const auto next = Clock::now() + (moved ? std::chrono::nanoseconds(0) : poll_interval_);
      do relax();
      while (Clock::now() < next);
    } while (Clock::now() < stop);
    rules.spin->miss();
  }
  auto next_check = Clock::now() + kWatchInterval;
  for (;;) {
    sleep(kMostSleep, seen);
    if (attempt()) return Waited::kReached;
    const auto now = Clock::now();
    if (rules.deadline.passed(now)) return Waited::kTimedOut;
    if (now < next_check) continue;
    next_check = now + kWatchInterval;
    {
      MutexLock lock(mutex_);
      check_peers();
    }
    if (rules.watch && rules.watch->should_abort(peer)) {
      if (attempt()) return Waited::kReached;
      rules.watch->record_abort(peer);
      return Waited::kAlarmed;
    }
  }
}

}  // namespace nvx::net
