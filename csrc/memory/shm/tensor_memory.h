#pragma once

#include <atomic>
#include <functional>
#include <optional>
#include <span>

#include "base/mutex.h"
#include "memory/shm/arena.h"
#include "memory/shm/spans.h"

namespace nvx {

/// Memory for tensors that the other processes of the host read in place: the part of the arena's file behind the
/// arena. This process maps it at the first tensor, a peer when an operation of that process first refers to it.
///
/// A forked child inherits the tensors, as shared memory. It frees none.
class TensorMemory {
 public:
  static constexpr size_t kMost = size_t(256) << 30;
  /// Freed pages up to here stay for later tensors, since the first touch of a page costs as much as copying it. Pages
  /// behind return to the kernel at once.
  static constexpr size_t kKept = size_t(1) << 30;

  explicit TensorMemory(const Arena& arena);
  TensorMemory(const TensorMemory&) = delete;
  /// Frees all pages up to `kKept`: peers that stay may keep the file. Pages behind that free() did not return stay
  /// until those close the file.
  ~TensorMemory();

  /// Whether there is any. Maps it.
  bool available() { return mapped() != nullptr; }
  /// Memory with any content. Empty if there is no space.
  Span allocate(size_t bytes);
  void free(Span span);
  void free_when(Span span, std::function<bool()> released);
  std::byte* at(Span span) const { return base_.load(std::memory_order_acquire) + span.offset; }
  std::span<std::byte> all() { return {mapped(), available() ? bytes_ : 0}; }
  /// Where a range of this process's memory is in this one; empty if it is not, or not all of it.
  std::optional<size_t> find(const std::byte* at, size_t bytes) const;

 private:
  std::byte* mapped() EXCLUDES(mutex_);
  void punch(Span span);

  const int fd_;
  const size_t bytes_;
  const uint32_t fork_generation_;
  Mutex mutex_;
  bool tried_ GUARDED_BY(mutex_) = false;
  Mapping mapping_ GUARDED_BY(mutex_);
  std::atomic<std::byte*> base_{nullptr};
  SpanAllocator spans_;
};

}  // namespace nvx
