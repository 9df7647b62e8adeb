#include "memory/shm/arena.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>

#include <cstring>
#include <utility>

#include "base/error.h"

namespace nvx {
namespace {

Fd make_memfd(size_t bytes) {
  Fd fd(memfd_create("nvx", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd) throw system_error("memfd_create failed");
  if (ftruncate(fd.get(), off_t(bytes)) != 0) throw system_error("cannot size the shared memory");
  if (fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) != 0)
    throw system_error("cannot seal the shared memory");
  return fd;
}

}  // namespace

ArenaId random_arena_id() {
  ArenaId id;
  if (getrandom(&id, sizeof id, 0) != ssize_t(sizeof id)) throw system_error("getrandom failed");
  return id;
}

Mapping::Mapping(int fd, size_t bytes) : bytes_(bytes) {
  void* base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
  if (base == MAP_FAILED) throw system_error("cannot map " + std::to_string(bytes) + " bytes of shared memory");
  base_ = static_cast<std::byte*>(base);
  madvise(base, bytes, MADV_DONTFORK);  // forked children, such as DataLoader workers, must not use it
  madvise(base, bytes, MADV_DONTDUMP);
}

Mapping::~Mapping() {
  if (base_) munmap(base_, bytes_);
}

Mapping::Mapping(Mapping&& other) noexcept
    : base_(std::exchange(other.base_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}

Arena::Arena()
    : id_(random_arena_id()),
      fd_(make_memfd(kBytes)),
      mapping_(fd_.get(), kBytes),
      spans_(kBytes, kSpanPage, "the shared arena of this process", [this](Span span) { punch(span); }) {}

/// Returns the pages to the kernel. They read as zero when they are used again.
void Arena::punch(Span span) {
  const int mode = FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE;
  if (fallocate(fd_.get(), mode, off_t(span.offset), off_t(span.bytes)) != 0)
    std::memset(at(span.offset), 0, span.bytes);
}

}  // namespace nvx
