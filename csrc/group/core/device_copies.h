#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <vector>

#include "base/error.h"
#include "base/mutex.h"
#include "group/core/poller.h"
#include "memory/gpu/device_arena.h"
#include "memory/gpu/device_work.h"

namespace nvx {

/// One step of a message through the copy engines.
struct DeviceCopy {
  struct Piece {
    DevicePtr to, from;
    size_t bytes;
  };
  std::vector<Piece> pieces;
  std::shared_ptr<const void> memory;  ///< the owner of the user's memory; it stays until the copy has ended
  std::function<void()> on_end;        ///< called when the copy has ended; may be called after the group has gone

  bool over() const { return state_.load(std::memory_order_acquire) != State::kRuns; }
  /// Whether the device may still access the memory.
  bool may_run() const { return state_.load(std::memory_order_acquire) != State::kEnded; }
  const Status& status() const { return status_; }  ///< once over
  /// It ends unless it has begun.
  void give_up() { given_up_.store(true, std::memory_order_release); }

 private:
  friend class DeviceCopies;
  enum class State { kRuns, kEnded, kLost };
  std::unique_ptr<DeviceWork> work_;    // null before it has begun
  std::shared_ptr<const void> copies_;  // the DeviceCopies, until the copy has ended
  bool begun_ = false;                  // a piece has
  std::atomic<bool> given_up_{false};
  Status status_;
  std::atomic<State> state_{State::kRuns};
};

/// Copies between the GPUs of this host's ranks, for the messages of one group. A copy begins when it can run to its
/// end at once: neither its stream nor any other waits for a peer. So it ends independently of the peers. It waits
/// for one of a few streams: more would share hardware queues with kernels that wait for a peer. A pool thread
/// makes the driver's calls, because they may hang.
class DeviceCopies : public std::enable_shared_from_this<DeviceCopies> {
 public:
  /// How this rank's copies access a peer's memory: see DevicePeer.
  struct Peer {
    DevicePtr theirs = 0, mine = 0;
    size_t bytes = 0;
    std::shared_ptr<DeviceRegion> region;  ///< of `theirs`; null within a process
    std::shared_ptr<PeerPool> pool;        ///< null if its pool is not reachable
  };
  struct Setting {
    std::shared_ptr<DeviceDriver> driver;
    int device = 0;
    std::chrono::milliseconds timeout{0};
    DeviceArena* arena = nullptr;  ///< lives until the process ends
    std::function<uint64_t(const std::byte*, size_t)> place_of;
    std::vector<Peer> peers;  ///< by local rank
  };
  /// Creates the streams. Throws Error.
  static std::shared_ptr<DeviceCopies> of(Setting setting);
  ~DeviceCopies();

  int device() const { return setting_.device; }
  /// 1 + the offset in this rank's pool; 0: the memory is not of the pool.
  uint64_t place_of(DevicePtr at, size_t bytes) const;
  /// Where this rank's device finds this part of a peer's pool, or of its arena; 0: nowhere.
  DevicePtr in_pool(int local_rank, uint64_t offset, uint64_t bytes) const;
  DevicePtr in_arena(int local_rank, uint64_t offset, uint64_t bytes) const;
  /// The part of this rank's arena that this peer reads.
  DevicePtr for_peer(int local_rank, const Span& span) const { return peer(local_rank).mine + span.offset; }

  /// Memory of the arena for a message of this size, for its sender. It may be smaller; empty if there is none.
  Span lease(size_t bytes);
  void release(Span span) { setting_.arena->messages().free(span); }
  void release_when(Span span, std::function<bool()> released) {
    setting_.arena->messages().free_when(span, std::move(released));
  }

  /// Returns at once.
  void begin(const std::shared_ptr<DeviceCopy>& copy) EXCLUDES(mutex_);

 private:
  using Copies = std::vector<std::shared_ptr<DeviceCopy>>;

  explicit DeviceCopies(Setting setting) : setting_(std::move(setting)) {}
  const Peer& peer(int local_rank) const { return setting_.peers[size_t(local_rank)]; }
  bool progress() EXCLUDES(mutex_);
  bool advance(const std::shared_ptr<DeviceCopy>& copy);
  static void end(DeviceCopy& copy, DeviceCopy::State state, const Status& status);

  Setting setting_;
  std::shared_ptr<Poller> poller_;
  Mutex mutex_;  // never held during a call of the driver
  Copies begun_ GUARDED_BY(mutex_);
  // Of the polling thread:
  Copies in_flight_;
  std::vector<std::unique_ptr<DeviceWork>> idle_;
  Status lost_;                    // why a copy was lost; none begins after that
  Clock::time_point last_change_;  // when a copy last began or ended
};

}  // namespace nvx
