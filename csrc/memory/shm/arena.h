#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>

#include "base/handle.h"
#include "base/random.h"
#include "memory/shm/spans.h"

namespace nvx {

/// A random name of a process's arena. It distinguishes processes, restarted processes and arenas that were made again.
struct ArenaId {
  uint64_t high = 0;
  uint64_t low = 0;
  auto operator<=>(const ArenaId&) const = default;
};
inline ArenaId random_arena_id() { return random_value<ArenaId>(); }

/// A memfd that neither shrinks nor grows, so that no access to a mapping of it can fault. Throws Error.
Fd sealed_memory(const char* name, size_t bytes);
/// The size of such a memory that another process has sent; 0 if the descriptor is of anything else.
size_t sealed_bytes(int fd);

/// Whether children that this process forks inherit a mapping.
enum class Forks { kLose, kInherit };

/// A mapping of a memfd that unmaps itself. Mappings in other processes are not affected.
class Mapping {
 public:
  Mapping() = default;
  Mapping(int fd, size_t bytes, size_t offset = 0, Forks forks = Forks::kLose);
  ~Mapping();
  Mapping(Mapping&& other) noexcept;
  Mapping& operator=(Mapping&& other) noexcept;

  std::byte* base() const { return base_; }
  size_t size() const { return bytes_; }

 private:
  std::byte* base_ = nullptr;
  size_t bytes_ = 0;
};

/// The memory that this process shares with the other ranks of its host: one sparse memfd, sealed against shrinking. It
/// has no name in the file system, so nothing is left over after a crash. Pages cost nothing until they are touched,
/// and return to the kernel when their span is freed. The tensors of `TensorMemory` are behind it in the same file.
class Arena {
 public:
  static constexpr size_t kBytes = size_t(1) << 30;

  Arena();

  const ArenaId& id() const { return id_; }
  int fd() const { return fd_.get(); }
  std::byte* at(size_t offset) const { return mapping_.base() + offset; }

  /// Returns zeroed pages. Throws Error if the arena is full, or would have less than `left` bytes afterwards.
  Span allocate(size_t bytes, size_t left = 0) { return spans_.allocate(bytes, left); }
  void free_when(Span span, std::function<bool()> released) { spans_.free_when(span, std::move(released)); }
  void free(Span span) { spans_.free(span); }

  /// Bytes in spans, retired ones included.
  size_t used() { return spans_.used(); }

 private:
  void punch(Span span);

  ArenaId id_;
  Fd fd_;
  Mapping mapping_;
  SpanAllocator spans_;
};

}  // namespace nvx
