#pragma once

#include <c10/core/Stream.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <unordered_map>

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
  /// Both at once.
  void claim(const Call& call, const std::string& group) EXCLUDES(mutex_);

 private:
  struct Last {
    int rank = -1;
    uint64_t number = 0;
  };
  static Mutex& registry_mutex();
  bool is_alone() const { return ranks_.load(std::memory_order_acquire) < 2; }
  void compare(const Call& call, const std::string& group) REQUIRES(mutex_);
  void keep(const Call& call) REQUIRES(mutex_);

  std::atomic<int> ranks_{0};
  Mutex mutex_;
  std::unordered_map<c10::Stream, Last> last_ GUARDED_BY(mutex_);  // the latest call of each
};

}  // namespace nvx
