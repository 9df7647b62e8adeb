#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <gtest/gtest.h>

#include <atomic>
#include <vector>

#include "kernel/gpu/device_pad.h"

namespace nvx::test {

/// One pool per rank, as the ranks of a SimulatedDevices map each other's: each at another address, and only as far as
/// it is mapped. Writes beyond that get lost. ThreadSanitizer detects races by addresses, so for it all ranks use the
/// same address.
class Pools {
 public:
#if defined(__SANITIZE_THREAD__)
  static constexpr bool kOneView = true;
#else
  static constexpr bool kOneView = false;
#endif
  static constexpr size_t kGranule = kernel::Reach::kGranule;

  /// `first`: the offset in a pool at which allocation starts.
  Pools(int ranks, size_t granules, size_t first = 0) : ranks_(ranks), bytes_(granules * kGranule), first_(first) {
    for (int owner = 0; owner < ranks; ++owner) {
      files_.push_back(memfd_create("pool", MFD_CLOEXEC));
      EXPECT_EQ(ftruncate(files_.back(), off_t(bytes_)), 0);
      for (int viewer = 0; viewer < ranks; ++viewer)
        seen_.push_back(kOneView && viewer > 0 ? seen(owner, 0) : reserve());
      used_.push_back(first);
      (void)expose(seen(owner, owner), owner, bytes_);
    }
    views_.resize(size_t(ranks * ranks));
  }
  ~Pools() {
    for (size_t i = 0; i < seen_.size(); i += kOneView ? size_t(ranks_) : 1) munmap(seen_[i], bytes_);
    for (const int file : files_) close(file);
  }
  Pools(const Pools&) = delete;

  /// By rank, as passed to its kernels.
  kernel::PoolView* views(int rank) { return &views_[size_t(rank * ranks_)]; }
  /// The viewer maps so much of the owner's pool from now on. It only grows.
  void map(int viewer, int owner, size_t granules) {
    if (viewer == owner || granules == 0) return;
    if (!kOneView && !expose(seen(owner, viewer), owner, granules * kGranule)) return;
    kernel::PoolView& view = views(viewer)[owner];
    std::atomic_ref(view.base).store(reinterpret_cast<uint64_t>(seen(owner, viewer)), std::memory_order_relaxed);
    std::atomic_ref(view.mapped).store(granules * kGranule, std::memory_order_release);
  }
  void map_all(size_t granules) {
    for (int i = 0; i < ranks_ * ranks_; ++i) map(i / ranks_, i % ranks_, granules);
  }

  /// Allocates in a rank's pool, until the pool is reset.
  std::byte* allocate(int rank, size_t bytes) {
    size_t& used = used_[size_t(rank)];
    std::byte* const at = seen(rank, rank) + used;
    used += (bytes + 255) / 256 * 256;
    EXPECT_LE(used, bytes_) << "the test's pools are too small";
    return at;
  }
  void begin_anew(int rank) { used_[size_t(rank)] = first_; }
  uint64_t place_of(int rank, const std::byte* data, size_t bytes) const {
    const auto offset = uint64_t(data - seen(rank, rank));
    return bytes != 0 && offset < bytes_ && bytes <= bytes_ - offset ? 1 + offset : 0;
  }

 private:
  std::byte* seen(int owner, int viewer) const { return seen_[size_t(owner * ranks_ + viewer)]; }
  std::byte* reserve() const {
    void* const at = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    EXPECT_NE(at, MAP_FAILED);
    return static_cast<std::byte*>(at);
  }
  bool expose(std::byte* at, int owner, size_t bytes) const {
    void* const there = mmap(at, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, files_[size_t(owner)], 0);
    EXPECT_EQ(there, at);
    return there == at;
  }

  const int ranks_;
  const size_t bytes_, first_;
  std::vector<int> files_;
  std::vector<std::byte*> seen_;  // by owner and viewer
  std::vector<size_t> used_;
  std::vector<kernel::PoolView> views_;
};

}  // namespace nvx::test
