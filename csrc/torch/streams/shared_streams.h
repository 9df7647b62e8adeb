#pragma once

#include <c10/core/Stream.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>

#include "base/mutex.h"

namespace nvx {

/// Prevents deadlocks between ranks that are threads of one process and use the same stream. A stream runs its work in
/// order, and the kernels of a collective wait for each other. If a rank called a collective on a stream after another
/// rank's part of the same or a later collective, its own part would never begin. Calls are identified by their numbers
/// in the group.
class SharedStreams {
 public:
  /// Returns the object of a group, for one more of its ranks. group: its number in this process.
  static std::shared_ptr<SharedStreams> join(uint64_t group) EXCLUDES(registry_mutex());

  /// A rank's call, by its number in the group.
  struct Numbered {
    int rank = -1;
    uint64_t number = 0;
    bool operator==(const Numbered&) const = default;
  };
  struct Call {
    const c10::Stream& stream;
    Numbered it;
  };
  /// Raises if the call would deadlock after the work that is already on the stream.
  void check(const Call& call, const std::string& group) EXCLUDES(mutex_);
  /// Notes that later work on the stream comes after this call.
  void note(const Call& call) EXCLUDES(mutex_);
  /// Notes a call on a stream before the call begins. The destructor removes the note unless keep() was called.
  class Claim {
   public:
    Claim() = default;
    Claim(SharedStreams* streams, const Call& call, Numbered before)
        : streams_(streams), stream_(call.stream), mine_(call.it), before_(before) {}
    Claim(const Claim&) = delete;
    Claim& operator=(const Claim&) = delete;
    ~Claim() {
      if (streams_) streams_->release(*stream_, mine_, before_);
    }
    void keep() { streams_ = nullptr; }

   private:
    SharedStreams* streams_ = nullptr;
    std::optional<c10::Stream> stream_;
    Numbered mine_, before_;
  };
  /// check(), then note(), under one lock.
  [[nodiscard]] Claim claim(const Call& call, const std::string& group) EXCLUDES(mutex_);

 private:
  static Mutex& registry_mutex();
  bool is_alone() const { return ranks_.load(std::memory_order_acquire) < 2; }
  void compare(const Call& call, const std::string& group) REQUIRES(mutex_);
  void keep(const Call& call) REQUIRES(mutex_);
  void release(const c10::Stream& stream, const Numbered& mine, const Numbered& before) EXCLUDES(mutex_);

  std::atomic<int> ranks_{0};
  Mutex mutex_;
  std::unordered_map<c10::Stream, Numbered> last_ GUARDED_BY(mutex_);  // the latest call on each stream
};

}  // namespace nvx
