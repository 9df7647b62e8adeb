#include "group/device/launch_batch.h"

#include <functional>

namespace nvx {
namespace {

/// The addresses belong to different objects, so `<` is unspecified; std::less is a total order.
bool overlap(const std::byte* a, const std::byte* a_end, const std::byte* b, const std::byte* b_end) {
  const std::less<const std::byte*> before;
  return before(a, b_end) && before(b, a_end);
}

}  // namespace

LaunchBatch::Reach LaunchBatch::reach_of(const kernel::Pieces& pieces) const {
  const kernel::Piece extent = kernel::extent_of(pieces, ranks_, piece_.data());
  return {extent.data, extent.data + extent.bytes};
}

bool LaunchBatch::meets(const kernel::Pieces& a, const kernel::Pieces& b) const {
  for (uint32_t p = 0; p < a.count(ranks_); ++p) {
    const kernel::Piece one = a.at(p, ranks_, piece_.data());
    for (uint32_t q = 0; one.bytes != 0 && q < b.count(ranks_); ++q) {
      const kernel::Piece other = b.at(q, ranks_, piece_.data());
      if (other.bytes != 0 && overlap(one.data, one.data + one.bytes, other.data, other.data + other.bytes))
        return true;
    }
  }
  return false;
}

bool LaunchBatch::append(const kernel::Job& job) {
  if (jobs_ > 0 && (kernel::is_multicast({&job, 1}) || kernel::is_multicast(jobs()))) return false;
  const Reach read = reach_of(job.send), written = reach_of(job.recv);
  const auto near = [](const Reach& a, const Reach& b) {
    return a.end && b.end && overlap(a.begin, a.end, b.begin, b.end);
  };
  for (size_t i = 0; i < jobs_; ++i) {
    const kernel::Job& before = job_[i];
    if ((near(read, written_[i]) && meets(job.send, before.recv)) ||
        (near(written, read_[i]) && meets(job.recv, before.send)) ||
        (near(written, written_[i]) && meets(job.recv, before.recv)))
      return false;
  }
  job_[jobs_] = job, read_[jobs_] = read, written_[jobs_] = written;
  ++jobs_;
  const auto lists = [](const kernel::Pieces& pieces) { return pieces.kind == kernel::Pieces::Kind::kTable; };
  if (lists(job.send) || lists(job.recv)) listed_ += 2 * ranks_;
  listed_ += job.send.owns() + job.recv.owns();
  return true;
}

}  // namespace nvx
