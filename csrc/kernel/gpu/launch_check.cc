#include <string>

#include "kernel/gpu/launch_cuda.h"

namespace nvx::kernel {
namespace {

bool has_root(Collective c) {
  return c == Collective::kReduce || c == Collective::kBroadcast || c == Collective::kGather ||
         c == Collective::kScatter;
}

bool lies_inside(const Pieces& pieces, uint32_t ranks, size_t listed) {
  const size_t own = pieces.kind == Pieces::Kind::kTable ? ranks : pieces.owns();
  return own == 0 || (pieces.index <= listed && own <= listed - pieces.index);
}

bool is_own(const Pieces& pieces) { return pieces.kind == Pieces::Kind::kOwn; }

bool lacks_memory(const Piece& piece) { return piece.bytes != 0 && !piece.data; }

const char* flaw(const DeviceChannel& channel) {
  if (!channel.shape.is_valid())
    return "its channel has an invalid shape: no ranks, no blocks, or a wrong size of packets or chunks";
  if (channel.rank >= channel.shape.ranks) return "its rank is not one of the channel's ranks";
  if (!channel.state || !channel.control) return "its channel has no memory";
  return nullptr;
}

const char* flaw_of_moves(const Job& job, std::span<const Piece> table) {
  if (job.algorithm != DeviceAlgorithm::kMoveOwn || !is_own(job.send) || !is_own(job.recv))
    return "a move needs pieces of this rank alone, and only a move can have them";
  if (!lies_inside(job.send, 0, table.size()) || !lies_inside(job.recv, 0, table.size()))
    return "it lists pieces beyond the end of the table";
  if (job.send.owns() != job.recv.owns()) return "it has different numbers of sources and destinations";
  for (uint32_t i = 0; i < job.send.owns(); ++i) {
    const Piece &from = table[job.send.index + i], &to = table[job.recv.index + i];
    if (lacks_memory(from) || lacks_memory(to)) return "it has a piece without memory";
    if (from.bytes != to.bytes) return "it moves a piece to a destination of another length";
  }
  return nullptr;
}

const char* flaw(const Job& job, const DeviceChannel& channel, std::span<const Piece> table) {
  const uint32_t ranks = channel.shape.ranks, me = channel.rank;
  const Collective collective = job.fingerprint.collective;
  if (size_t(job.algorithm) >= kDeviceAlgorithmCount) return "its algorithm is unknown";
  if (is_own(job.send) || is_own(job.recv) || job.algorithm == DeviceAlgorithm::kMoveOwn)
    return flaw_of_moves(job, table);
  if (job.root < -1 || job.root >= int64_t(ranks)) return "its root is not one of the channel's ranks";
  if (has_root(collective) != (job.root >= 0)) return "its root does not fit its collective";
  if (!lies_inside(job.send, ranks, table.size()) || !lies_inside(job.recv, ranks, table.size())) {
    return "it lists pieces beyond the end of the table";
  }
  if (!can_do(job.algorithm, job, channel.shape, table.data())) {
    return "its algorithm does not support its collective, its type or its length in packets";
  }
  for (uint32_t p = 0; p < ranks; ++p) {
    if (lacks_memory(job.send.of(p, ranks, table.data())) || lacks_memory(job.recv.of(p, ranks, table.data()))) {
      return "it has a piece without memory";
    }
  }
  const bool has_result = job.root < 0 || uint32_t(job.root) == me;
  const size_t in = job.send.of(me, ranks, table.data()).bytes, out = job.recv.of(me, ranks, table.data()).bytes;
  if (reduces(collective) && has_result && in != out) return "its result and its input differ in length";
  if (!reduces(collective) && out > in) return "its own part of the result is longer than its input";
  return nullptr;
}

Status refusal(const std::string& what, const char* why) {
  return {Code::kInvalid, "nvx: " + what + " is refused: " + why};
}

}  // namespace

Status check_multicast(const DeviceChannel& channel, const Job& job, const MulticastView& view) {
  const std::string what = "a launch of reduce_multicast";
  if (const char* why = flaw(channel)) return refusal(what, why);
  const Fingerprint& f = job.fingerprint;
  const bool is_sum = f.collective == Collective::kAllReduce && f.op == ReduceOp::kSum && !job.awaited &&
                      (f.dtype == DType::kF32 || f.dtype == DType::kBF16 || f.dtype == DType::kF16);
  const auto is_whole = [](const Pieces& pieces) { return pieces.kind == Pieces::Kind::kSame; };
  if (job.algorithm != DeviceAlgorithm::kReduceMulticast || !is_sum || !is_whole(job.send) || !is_whole(job.recv))
    return refusal(what, "it is not an all_reduce of a sum of its types");
  if (job.send.bytes != job.recv.bytes) return refusal(what, "its result and its input differ in length");
  if (job.send.bytes != 0 && (!job.send.base || !job.recv.base)) return refusal(what, "it has a piece without memory");
  if (!view.all || !view.mine || view.slot(channel.shape.blocks) == 0)
    return refusal(what, "it has no multicast memory");
  return {};
}

Status check_launch(const DeviceChannel& channel, std::span<const Job> jobs, std::span<const Piece> table) {
  if (const char* why = flaw(channel)) return refusal("a launch", why);
  if (jobs.size() > kLaunchJobs) return refusal("a launch", "it has too many operations");
  if (table.size() > kLaunchPieces) return refusal("a launch", "it lists too many pieces");
  for (size_t i = 0; i < jobs.size(); ++i) {
    if (const char* why = flaw(jobs[i], channel, table)) {
      return refusal("operation " + std::to_string(i) + " of a launch", why);
    }
  }
  return {};
}

}  // namespace nvx::kernel
