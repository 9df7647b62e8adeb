#pragma once

#include <array>
#include <cstddef>
#include <span>

#include "kernel/gpu/launch_cuda.h"

namespace nvx {

/// The jobs of one rank in one launch, and the pieces that they list. Blocks do not synchronize between the jobs of a
/// launch, so no job in it reads or writes memory that another one writes.
class LaunchBatch {
 public:
  explicit LaunchBatch(uint32_t ranks) : ranks_(ranks) {}

  void clear() { jobs_ = 0, listed_ = 0; }
  /// Room for the next job's list: `pieces`, at least 2 * ranks. The job refers to its first piece by `index()`. Null
  /// if there is no room.
  kernel::Piece* room(size_t pieces = 0);
  uint32_t index() const { return uint32_t(listed_); }
  /// Adds the job for which `room()` was called. False: the job must go in a later launch.
  bool add(const kernel::Job& job);

  std::span<const kernel::Job> jobs() const { return {job_.data(), jobs_}; }
  std::span<const kernel::Piece> pieces() const { return {piece_.data(), listed_}; }

 private:
  /// The range from the first to the last byte that a job accesses. Disjoint ranges mean disjoint jobs.
  struct Reach {
    const std::byte* begin = nullptr;
    const std::byte* end = nullptr;
  };
  Reach reach_of(const kernel::Pieces& pieces) const;
  bool meets(const kernel::Pieces& a, const kernel::Pieces& b) const;

  const uint32_t ranks_;
  size_t jobs_ = 0, listed_ = 0;
  std::array<kernel::Job, kernel::kLaunchJobs> job_;
  std::array<Reach, kernel::kLaunchJobs> read_, written_;
  std::array<kernel::Piece, kernel::kLaunchPieces> piece_;
};

}  // namespace nvx
