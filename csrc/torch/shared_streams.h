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

/// The streams that ranks of a group use which are threads of one process. A stream does one thing after the other, and
/// the kernels of a collective wait for each other: what a rank begins on a stream behind another rank's part of the
/// same collective, or of a later one, would never begin. Calls are known by their numbers in the group.
class SharedStreams {
 public:
  /// The group's, for one more of its ranks. group: what it is known by in this process.
  static std::shared_ptr<SharedStreams> join(uint64_t group) EXCLUDES(registry_mutex());

  /// A rank's call, and the stream that it is made on.
  struct Call {
    const c10::Stream& stream;
    int rank;
    uint64_t number;
  };
  /// Raises where it must not begin behind what the stream has been given.
  void check(const Call& call, const std::string& group) EXCLUDES(mutex_);
  /// From here on the stream is behind it.
  void note(const Call& call) EXCLUDES(mutex_);
  struct Last {
    int rank = -1;
    uint64_t number = 0;
  };
  /// What a stream is behind while its call may still turn out not to begin: then it is behind what it was before.
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
    /// It begins.
    void keep() { streams_ = nullptr; }

   private:
    SharedStreams* streams_ = nullptr;
    std::optional<c10::Stream> stream_;
    Last mine_, before_;
  };
  /// Both at once.
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
