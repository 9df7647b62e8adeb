#include "memory/shm/arena.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include <cstring>
#include <string>
#include <utility>

#include "base/error.h"
#include "memory/shm/tensor_memory.h"

namespace nvx {

Fd sealed_memory(const char* name, size_t bytes) {
  Fd fd(memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd) throw system_error("cannot make shared memory (memfd_create)");
  if (ftruncate(fd.get(), off_t(bytes)) != 0 || fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) != 0)
    throw system_error("cannot make " + std::to_string(bytes >> 20) + " MiB of shared memory (ftruncate)");
  return fd;
}

size_t sealed_bytes(int fd) {
  struct stat facts {};
  const int seals = fcntl(fd, F_GET_SEALS);
  return seals >= 0 && (seals & F_SEAL_SHRINK) && fstat(fd, &facts) == 0 ? size_t(facts.st_size) : 0;
}

Mapping::Mapping(int fd, size_t bytes, size_t offset, Forks forks) : bytes_(bytes) {
  void* base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, off_t(offset));
  if (base == MAP_FAILED) throw system_error("cannot map " + std::to_string(bytes) + " bytes of shared memory");
  base_ = static_cast<std::byte*>(base);
  // Forked children, such as DataLoader workers, must not use the memory of a group.
  if (forks == Forks::kLose) madvise(base, bytes, MADV_DONTFORK);
  madvise(base, bytes, MADV_DONTDUMP);
}

Mapping::~Mapping() {
  if (base_) munmap(base_, bytes_);
}

Mapping::Mapping(Mapping&& other) noexcept
    : base_(std::exchange(other.base_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}

Mapping& Mapping::operator=(Mapping&& other) noexcept {
  std::swap(base_, other.base_);
  std::swap(bytes_, other.bytes_);
  return *this;
}

namespace {

/// A larger file than the process may have would kill it, by SIGXFSZ. With a limit on addresses, an operation might
/// find no room to map the tensors of a peer.
size_t file_bytes() {
  rlimit file{}, addresses{};
  const bool limited = (getrlimit(RLIMIT_FSIZE, &file) == 0 && file.rlim_cur < Arena::kBytes + TensorMemory::kMost) ||
                       (getrlimit(RLIMIT_AS, &addresses) == 0 && addresses.rlim_cur != RLIM_INFINITY);
  return limited ? Arena::kBytes : Arena::kBytes + TensorMemory::kMost;
}

}  // namespace

Arena::Arena()
    : id_(random_arena_id()),
      fd_(sealed_memory("nvx", file_bytes())),
      mapping_(fd_.get(), kBytes),
      spans_(kBytes, kSpanPage, "the shared arena of this process", [this](Span span) { punch(span); }) {}

/// Returns the pages to the kernel. They read as zero when they are used again.
void Arena::punch(Span span) {
  const int mode = FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE;
  if (fallocate(fd_.get(), mode, off_t(span.offset), off_t(span.bytes)) != 0)
    std::memset(at(span.offset), 0, span.bytes);
}

}  // namespace nvx
