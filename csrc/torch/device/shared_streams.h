#pragma once

#include <c10/core/Stream.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>

#include "base/mutex.h"

namespace nvx {

/// Keeps ranks that are threads of one process from blocking each other on a stream. A stream does one thing after the
/// other, and the kernels of a collective wait for each other. So if a rank called a collective on a stream behind
/// another rank's part of the same collective, or of a later one, its own part would never begin. Calls are known by
/// their numbers in the group.
class SharedStreams {
 public:
  /// Those of a group, for one more of its ranks. group: its number in this process.
  static std::shared_ptr<SharedStreams> join(uint64_t group) EXCLUDES(registry_mutex());

  /// A rank's call, and the stream that it is made on.
  struct Call {
    const c10::Stream& stream;
    int rank;
    uint64_t number;
  };
  /// Raises if the call must not begin behind what the stream has been given.
  void check(const Call& call, const std::string& group) EXCLUDES(mutex_);
  /// Notes that what the stream is given from here on comes behind this call.
  void note(const Call& call) EXCLUDES(mutex_);
  struct Last {
    int rank = -1;
    uint64_t number = 0;
  };
  /// Notes a call on a stream before it has begun. If keep() is not called, as it did not begin, that is undone.
  class Claim {
   public:
    Claim() = default;
    Claim(SharedStreams* streams, const Call& call, Last before)
        : streams_(streams), stream_(call.stream), mine_{call.rank, call.number}, before_(before) {}
    Claim(Claim&& other) noexcept
        : streams_(std::exchange(other.streams_, nullptr)),
          stream_(other.stream_),
          mine_(other.mine_),
          before_(other.before_) {}
    Claim& operator=(Claim&&) = delete;
    ~Claim() {
      if (streams_) streams_->release(*stream_, mine_, before_);
    }
    /// The call begins.
    void keep() { streams_ = nullptr; }

   private:
    SharedStreams* streams_ = nullptr;
    std::optional<c10::Stream> stream_;
    Last mine_, before_;
  };
  /// check() and note() at once.
  [[nodiscard]] Claim claim(const Call& call, const std::string& group) EXCLUDES(mutex_);

 private:
  static Mutex& registry_mutex();
  bool is_alone() const { return ranks_.load(std::memory_order_acquire) < 2; }
  void compare(const Call& call, const std::string& group) REQUIRES(mutex_);
  void keep(const Call& call) REQUIRES(mutex_);
  void release(const c10::Stream& stream, const Last& mine, const Last& before) EXCLUDES(mutex_);

  std::atomic<int> ranks_{0};
  Mutex mutex_;
  std::unordered_map<c10::Stream, Last> last_ GUARDED_BY(mutex_);  // the latest call of each
};

}  // namespace nvx
