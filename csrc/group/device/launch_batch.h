#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <span>

#include "group/plan/operation.h"
#include "kernel/gpu/launch_cuda.h"

namespace nvx {

/// The jobs of one rank in one launch, and the pieces that they list. Blocks do not synchronize between the jobs of a
/// launch, so no job in it reads or writes memory that another one writes. A multicast job has a launch of its own.
class LaunchBatch {
 public:
  explicit LaunchBatch(uint32_t ranks) : ranks_(ranks) {}

  void clear() { jobs_ = 0, listed_ = 0; }
  /// Adds the job that `make` returns. It lists up to `pieces` pieces, at least 2 * ranks, in the table that `make`
  /// gets, and refers to the first one by the index that `make` gets. False: the job must go in a later launch.
  template <class Make>
  bool add(size_t pieces, const Make& make) {
    if (jobs_ == job_.size() || listed_ + std::max(pieces, 2 * size_t(ranks_)) > piece_.size()) return false;
    return append(make(uint32_t(listed_), piece_.data() + listed_));
  }

  std::span<const kernel::Job> jobs() const { return {job_.data(), jobs_}; }
  std::span<const kernel::Piece> pieces() const { return {piece_.data(), listed_}; }

 private:
  bool append(const kernel::Job& job);
  bool overlap(const kernel::Pieces& a, const kernel::Pieces& b) const;

  const uint32_t ranks_;
  size_t jobs_ = 0, listed_ = 0;
  std::array<kernel::Job, kernel::kLaunchJobs> job_;
  /// The ranges from the first to the last byte that the jobs access. Disjoint ranges mean disjoint jobs.
  std::array<kernel::Piece, kernel::kLaunchJobs> read_, written_;
  std::array<kernel::Piece, kernel::kLaunchPieces> piece_;
};

}  // namespace nvx
