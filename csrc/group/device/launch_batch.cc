#include "group/device/launch_batch.h"

namespace nvx {

bool LaunchBatch::overlap(const kernel::Pieces& a, const kernel::Pieces& b) const {
  for (uint32_t p = 0; p < a.count(ranks_); ++p) {
    const kernel::Piece one = a.at(p, ranks_, piece_.data());
    for (uint32_t q = 0; one.bytes != 0 && q < b.count(ranks_); ++q) {
      if (!apart(one, b.at(q, ranks_, piece_.data()))) return true;
    }
  }
  return false;
}

bool LaunchBatch::append(const kernel::Job& job) {
  if (jobs_ > 0 && (kernel::is_multicast({&job, 1}) || kernel::is_multicast(jobs()))) return false;
  const kernel::Piece read = kernel::extent_of(job.send, ranks_, piece_.data());
  const kernel::Piece written = kernel::extent_of(job.recv, ranks_, piece_.data());
  for (size_t i = 0; i < jobs_; ++i) {
    const kernel::Job& before = job_[i];
    if ((!apart(read, written_[i]) && overlap(job.send, before.recv)) ||
        (!apart(written, read_[i]) && overlap(job.recv, before.send)) ||
        (!apart(written, written_[i]) && overlap(job.recv, before.recv)))
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
