#pragma once

#include <array>
#include <cstddef>
#include <span>

#include "kernel/gpu/launch_cuda.h"

namespace nvx {

/// What one launch is handed: jobs of one rank, and the pieces that they list. Holds only jobs that may run in one
/// launch, whose blocks do not wait for each other between jobs: none reads or writes what another one writes.
class LaunchBatch {
 public:
  explicit LaunchBatch(uint32_t ranks) : ranks_(ranks) {}

  void clear() { jobs_ = 0, listed_ = 0; }
  /// Where the next job may list its pieces, 2 * ranks of them or as many as are asked for, and as what it names the
  /// first; null: there is no room for one more.
  kernel::Piece* room(size_t pieces = 0);
  uint32_t index() const { return uint32_t(listed_); }
  /// Takes the job that room() was asked for. False: it must be in a later launch.
  bool add(const kernel::Job& job);

  std::span<const kernel::Job> jobs() const { return {job_.data(), jobs_}; }
  std::span<const kernel::Piece> pieces() const { return {piece_.data(), listed_}; }

 private:
  /// From the first byte that a job touches to behind the last one: what is apart here is apart.
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
