#include "memory/arena.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/random.h>

#include <algorithm>
#include <cstring>
#include <iterator>

#include "base/error.h"

namespace nvx {
namespace {

constexpr size_t kPage = 65536;  // the largest base page that Linux uses, so that a span never shares a page

size_t round_up(size_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

Fd make_memfd(size_t bytes) {
  Fd fd(memfd_create("nvx", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd) throw system_error("memfd_create failed");
  if (ftruncate(fd.get(), off_t(bytes)) != 0) throw system_error("cannot size the shared memory");
  if (fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) != 0)
    throw system_error("cannot seal the shared memory");
  return fd;
}

ArenaId random_id() {
  ArenaId id;
  if (getrandom(&id, sizeof id, 0) != ssize_t(sizeof id)) throw system_error("getrandom failed");
  return id;
}

}  // namespace

Mapping::Mapping(int fd, size_t bytes) : bytes_(bytes) {
  void* base = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
  if (base == MAP_FAILED) throw system_error("cannot map " + std::to_string(bytes) + " bytes of shared memory");
  base_ = static_cast<std::byte*>(base);
  madvise(base, bytes, MADV_DONTFORK);  // a forked DataLoader worker has no business here
  madvise(base, bytes, MADV_DONTDUMP);
}

Mapping::~Mapping() {
  if (base_) munmap(base_, bytes_);
}

Mapping::Mapping(Mapping&& other) noexcept
    : base_(std::exchange(other.base_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}

Arena::Arena() : id_(random_id()), fd_(make_memfd(kBytes)), mapping_(fd_.get(), kBytes) { holes_[0] = kBytes; }

Span Arena::allocate(size_t bytes) {
  bytes = round_up(bytes);
  MutexLock lock(mutex_);
  sweep();
  for (auto hole = holes_.begin(); hole != holes_.end(); ++hole) {
    if (hole->second < bytes) continue;
    const Span span{hole->first, bytes};
    const size_t rest = hole->second - bytes;
    holes_.erase(hole);
    if (rest) holes_[span.offset + bytes] = rest;
    used_ += bytes;
    return span;
  }
  throw Error(Code::kSystem, "nvx: the shared arena of this process is full (" + std::to_string(used_ >> 20) +
                                 " MiB in use); destroy groups that are no longer needed");
}

void Arena::bury(Span span, std::function<bool()> released) {
  MutexLock lock(mutex_);
  graves_.push_back({span, std::move(released)});
  sweep();
}

void Arena::free(Span span) {
  MutexLock lock(mutex_);
  give_back(span);
}

size_t Arena::used() {
  MutexLock lock(mutex_);
  return used_;
}

void Arena::sweep() {
  const auto open =
      std::partition(graves_.begin(), graves_.end(), [](const Grave& grave) { return !grave.released(); });
  for (auto grave = open; grave != graves_.end(); ++grave) give_back(grave->span);
  graves_.erase(open, graves_.end());
}

void Arena::give_back(Span span) {
  // The pages go back to the kernel, and read as zero when used again.
  const int mode = FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE;
  if (fallocate(fd_.get(), mode, off_t(span.offset), off_t(span.bytes)) != 0)
    std::memset(at(span.offset), 0, span.bytes);
  used_ -= span.bytes;
  auto [hole, added] = holes_.emplace(span.offset, span.bytes);
  const auto next = std::next(hole);
  if (next != holes_.end() && hole->first + hole->second == next->first) {
    hole->second += next->second;
    holes_.erase(next);
  }
  if (hole == holes_.begin()) return;
  const auto before = std::prev(hole);
  if (before->first + before->second == hole->first) {
    before->second += hole->second;
    holes_.erase(hole);
  }
}

}  // namespace nvx
