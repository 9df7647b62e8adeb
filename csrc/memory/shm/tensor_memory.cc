#include "memory/shm/tensor_memory.h"

#include <fcntl.h>
#include <sys/mman.h>

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "base/log.h"
#include "base/per_process.h"

namespace nvx {

TensorMemory::TensorMemory(const Arena& arena)
    : fd_(arena.fd()),
      bytes_(sealed_bytes(fd_) - Arena::kBytes),
      fork_generation_(fork_generation()),
      spans_(bytes_, kSpanPage, "the tensor memory of this process", [this](Span span) { punch(span); }) {}

TensorMemory::~TensorMemory() {
  if (!base_.load(std::memory_order_acquire) || fork_generation_ != fork_generation()) return;
  (void)fallocate(fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, off_t(Arena::kBytes), off_t(kKept));
}

std::byte* TensorMemory::mapped() {
  if (std::byte* base = base_.load(std::memory_order_acquire)) return base;
  MutexLock lock(mutex_);
  if (std::exchange(tried_, true) || bytes_ == 0) return base_.load(std::memory_order_relaxed);
  try {
    mapping_ = Mapping(fd_, bytes_, Arena::kBytes, Forks::kInherit);
    base_.store(mapping_.base(), std::memory_order_release);
  } catch (const Error& error) {
    NVX_LOG(kInfo, "no tensor is allocated in memory that other ranks read: %s", error.reason().c_str());
  }
  return mapping_.base();
}

Span TensorMemory::allocate(size_t bytes) { return mapped() ? spans_.find(bytes) : Span{}; }

void TensorMemory::free(Span span) {
  if (fork_generation_ == fork_generation()) spans_.free(span);
}

void TensorMemory::free_when(Span span, std::function<bool()> released) {
  if (fork_generation_ == fork_generation()) spans_.free_when(span, std::move(released));
}

void TensorMemory::punch(Span span) {
  if (span.offset + span.bytes <= kKept) return;
  const size_t from = std::max(span.offset, kKept);
  (void)fallocate(fd_, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, off_t(Arena::kBytes + from),
                  off_t(span.offset + span.bytes - from));
}

std::optional<size_t> TensorMemory::find(const std::byte* at, size_t bytes) const {
  const auto base = reinterpret_cast<uintptr_t>(base_.load(std::memory_order_acquire));
  const size_t offset = reinterpret_cast<uintptr_t>(at) - base;  // wraps below the base
  if (base == 0 || offset >= bytes_ || bytes > bytes_ - offset) return std::nullopt;
  return offset;
}

}  // namespace nvx
