#include "kernel/gpu/job.h"

#include <algorithm>
#include <functional>

namespace nvx::kernel {
namespace {

using Kind = Pieces::Kind;

constexpr const char* kNames[] = {"reduce_packets",  "reduce_packets_two_shot", "reduce_chunks", "exchange_packets",
                                  "exchange_chunks", "exchange_pieces",         "move_own",      "reduce_multicast"};
static_assert(std::size(kNames) == kDeviceAlgorithmCount);

}  // namespace

const char* name(DeviceAlgorithm algorithm) { return kNames[size_t(algorithm)]; }

Job job_of(DeviceAlgorithm algorithm, const CollectiveArgs& args, uint32_t rank, uint32_t ranks, size_t width,
           uint32_t index, Piece* table) {
  Job job;
  job.fingerprint = args.call.fingerprint;
  job.factor = args.call.factor;
  job.root = args.call.root;
  job.algorithm = algorithm;
  std::byte* const in = const_cast<std::byte*>(args.in);  // it is only read; Pieces serve both directions
  const bool is_root = job.root == int(rank);
  const uint64_t bytes = args.count * width;
  const auto listed = [&](const Piece* pieces, uint32_t at) {
    const Pieces even{Kind::kEven, 0, pieces[0].data, pieces[0].bytes};
    uint32_t same = 0;
    for (; same < ranks && even.bytes != 0 && pieces[same].bytes == even.bytes; ++same) {
      if (pieces[same].data != even.base + same * even.bytes) break;
    }
    if (same == ranks) return even;
    std::copy(pieces, pieces + ranks, table + at);
    return Pieces{Kind::kTable, index + at, extent_of({Kind::kTable, 0, nullptr, 0}, ranks, pieces).data, 0};
  };
  const auto only_root = [&](const Piece* pieces) {
    const Piece& piece = pieces[job.root];
    return Pieces{Kind::kOnly, uint32_t(job.root), piece.data, piece.bytes};
  };
  switch (args.call.fingerprint.collective) {
    case Collective::kAllReduce:
    case Collective::kReduce: {
      const bool whole = algorithm == DeviceAlgorithm::kReducePackets || algorithm == DeviceAlgorithm::kReduceMulticast;
      const Kind kind = whole ? Kind::kSame : Kind::kSplit;
      job.send = {kind, 0, in, bytes};
      if (job.root < 0 || is_root) job.recv = {kind, 0, args.out, bytes};
      break;
    }
    case Collective::kReduceScatter:
      job.send = listed(args.send, 0);
      job.recv = {Kind::kOnly, rank, args.out, args.send[rank].bytes};
      break;
    case Collective::kAllGather:
      job.send = {Kind::kSame, 0, in, args.recv[rank].bytes};
      job.recv = listed(args.recv, ranks);
      break;
    case Collective::kBroadcast: {
      const Piece& whole = args.recv[rank];
      if (is_root) job.send = {Kind::kSame, 0, in, whole.bytes};
      job.recv = {Kind::kOnly, uint32_t(job.root), whole.data, whole.bytes};
      break;
    }
    case Collective::kAllToAll:
      job.send = listed(args.send, 0);
      job.recv = listed(args.recv, ranks);
      break;
    case Collective::kGather:
      job.send = only_root(args.send);
      if (is_root) job.recv = listed(args.recv, ranks);
      break;
    case Collective::kScatter:
      if (is_root) job.send = listed(args.send, 0);
      job.recv = only_root(args.recv);
      break;
    case Collective::kBarrier:
    case Collective::kNone: break;
  }
  return job;
}

Piece extent_of(const Pieces& pieces, uint32_t ranks, PieceTable table) {
  const std::less<const std::byte*> before;  // pieces may belong to different tensors
  std::byte *begin = nullptr, *end = nullptr;
  for (uint32_t p = 0; p < pieces.count(ranks); ++p) {
    const Piece piece = pieces.at(p, ranks, table);
    if (piece.bytes == 0) continue;
    if (!end || before(piece.data, begin)) begin = piece.data;
    if (!end || before(end, piece.data + piece.bytes)) end = piece.data + piece.bytes;
  }
  return {begin, size_t(end - begin)};
}

bool are_aligned(const Pieces& pieces, uint32_t ranks, PieceTable table, size_t bytes) {
  uintptr_t bits = 0;
  for (uint32_t p = 0; p < pieces.count(ranks); ++p) {
    const Piece piece = pieces.at(p, ranks, table);
    if (piece.bytes != 0) bits |= reinterpret_cast<uintptr_t>(piece.data);
  }
  return bits % bytes == 0;
}

/// In an in-place all-to-all, the piece to a peer and the piece from it are in the same memory. The peer might write
/// there before this rank has read its own piece, so received pieces use slots.
void put_places(Job& job, uint32_t ranks, PieceTable table, const PlaceOf& place_of) {
  const std::less<const std::byte*> before;
  const Piece in = extent_of(job.send, ranks, table), out = extent_of(job.recv, ranks, table);
  const bool overlap =
      in.bytes != 0 && out.bytes != 0 && before(in.data, out.data + out.bytes) && before(out.data, in.data + in.bytes);
  const auto place = [&](const Piece& piece) { return piece.bytes == 0 ? 0 : place_of(piece.data, piece.bytes); };
  job.send_place = place(in);
  job.recv_place = overlap && job.fingerprint.collective == Collective::kAllToAll ? 0 : place(out);
}

Job job_of_moves(std::span<const Piece> from, std::span<const Piece> to, uint32_t index, Piece* table) {
  Job job;
  job.algorithm = DeviceAlgorithm::kMoveOwn;
  std::ranges::copy(from, table);
  std::ranges::copy(to, table + from.size());
  job.send = {Kind::kOwn, index, nullptr, from.size()};
  job.recv = {Kind::kOwn, index + uint32_t(from.size()), nullptr, to.size()};
  return job;
}

bool can_do(DeviceAlgorithm algorithm, const Job& job, const DeviceShape& shape, PieceTable table) {
  const Collective collective = job.fingerprint.collective;
  if (job.awaited || reduces(algorithm) != reduces(collective)) return false;
  if (reduces(algorithm) && !level().reduce(job.fingerprint.dtype, job.fingerprint.op)) return false;
  if (algorithm == DeviceAlgorithm::kReducePacketsTwoShot && collective != Collective::kAllReduce) return false;
  size_t most = 0;
  for (uint32_t p = 0; p < shape.ranks; ++p) {
    most = std::max({most, Pieces::fullest(job.send.of(p, shape.ranks, table), shape.blocks),
                     Pieces::fullest(job.recv.of(p, shape.ranks, table), shape.blocks)});
  }
  return ceil_div(most, sizeof(Pack)) <= most_packs(algorithm, shape);
}

}  // namespace nvx::kernel
