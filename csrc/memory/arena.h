#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <vector>

#include "base/handle.h"
#include "base/mutex.h"

namespace nvx {

/// A random name for a process's arena: tells apart processes, re-started processes and arenas made anew.
struct ArenaId {
  uint64_t high = 0;
  uint64_t low = 0;
  auto operator<=>(const ArenaId&) const = default;
};

/// Memory mapped from a memfd; unmaps itself. Other processes' mappings of the same memfd live on.
class Mapping {
 public:
  Mapping() = default;
  Mapping(int fd, size_t bytes);
  ~Mapping();
  Mapping(Mapping&& other) noexcept;
  Mapping& operator=(Mapping&&) = delete;

  std::byte* base() const { return base_; }
  size_t size() const { return bytes_; }

 private:
  std::byte* base_ = nullptr;
  size_t bytes_ = 0;
};

/// A piece of an arena.
struct Span {
  size_t offset = 0;
  size_t bytes = 0;
  explicit operator bool() const { return bytes != 0; }
};

/// The memory that this process lets the other ranks of its host map: one sparse memfd, sealed against shrinking, with
/// no name to leak. Pages cost nothing until touched, and go back to the kernel when their span is freed.
class Arena {
 public:
  static constexpr size_t kBytes = size_t(1) << 30;

  Arena();

  const ArenaId& id() const { return id_; }
  int fd() const { return fd_.get(); }
  std::byte* at(size_t offset) const { return mapping_.base() + offset; }

  /// Zeroed pages. Throws Error when the arena is full.
  Span allocate(size_t bytes) EXCLUDES(mutex_);

  /// Gives a span back when no peer can still touch it: released() is asked now and at each later allocation.
  void bury(Span span, std::function<bool()> released) EXCLUDES(mutex_);
  void free(Span span) EXCLUDES(mutex_);

  /// Bytes in spans, the buried ones too.
  size_t used() EXCLUDES(mutex_);

 private:
  struct Grave {
    Span span;
    std::function<bool()> released;
  };

  void sweep() REQUIRES(mutex_);
  void give_back(Span span) REQUIRES(mutex_);

  ArenaId id_;
  Fd fd_;
  Mapping mapping_;
  Mutex mutex_;
  std::map<size_t, size_t> holes_ GUARDED_BY(mutex_);  // offset -> bytes
  std::vector<Grave> graves_ GUARDED_BY(mutex_);
  size_t used_ GUARDED_BY(mutex_) = 0;
};

}  // namespace nvx
