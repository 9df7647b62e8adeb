#include "group/plan/chunks.h"

#include <algorithm>

#include "base/round_up.h"

namespace nvx {
namespace {

using kernel::Collective;

/// Chunks are whole cache lines. No element straddles one.
constexpr size_t kCacheLine = 64;

/// Slices are multiples of this.
size_t grain_of(const Operation& o, size_t bytes, const PlanFacts& facts) {
  if (facts.hosts == 1 || !reduces(o.collective)) return kCacheLine;
  const InterHostPlan inter_host = plan_between(across(o.collective), bytes, facts);
  if (inter_host.row->guarantee.order != schedule::Order::kByPlace) return kCacheLine;
  const size_t width = size_of(o.dtype);
  return inter_host.slice / width * width;
}

/// Places pieces one after another in the buffer, and records the copies. Pieces that are adjacent on the device are
/// adjacent in the buffer, and one copy moves them. Without a buffer it only counts the bytes.
class Loader {
 public:
  explicit Loader(StagedChunk& staged, std::byte* buffer) : staged_(staged), buffer_(buffer) {}

  enum class Direction { kD2h, kH2d, kBoth };
  kernel::Piece place(kernel::Piece there, Direction direction) {
    if (there.bytes == 0) return {};
    if (there.data != behind_) staged_.bytes = round_up(staged_.bytes, kCacheLine);
    const kernel::Piece here{buffer_ ? buffer_ + staged_.bytes : nullptr, there.bytes};
    if (buffer_ && direction != Direction::kH2d) note(staged_.d2h, there, here);
    if (buffer_ && direction != Direction::kD2h) note(staged_.h2d, there, here);
    staged_.bytes += there.bytes, behind_ = there.data + there.bytes;
    return here;
  }

 private:
  static void note(std::vector<CopyPair>& copies, const kernel::Piece& there, const kernel::Piece& here) {
    if (!copies.empty()) {
      CopyPair& last = copies.back();
      if (there.data == last.device.data + last.device.bytes && here.data == last.host.data + last.host.bytes) {
        last.device.bytes += there.bytes, last.host.bytes += here.bytes;
        return;
      }
    }
    copies.push_back({there, here});
  }

  StagedChunk& staged_;
  std::byte* const buffer_;
  const std::byte* behind_ = nullptr;
};

}  // namespace

bool goes_in_chunks(Collective collective, DType dtype, size_t count) {
  switch (collective) {
    case Collective::kAllReduce:
    case Collective::kReduce:
    case Collective::kBroadcast:
    case Collective::kAllGather:
    case Collective::kReduceScatter:
      // A tensor of a type that nvx does not know goes whole.
      return dtype != DType::kBytes && count > kChunk / size_of(dtype);
    default: return false;
  }
}

kernel::Piece Cut::of(kernel::Piece piece, size_t k) const {
  const size_t at = std::min(piece.bytes, k * slice);
  return {advance(piece, at), std::min(slice, piece.bytes - at)};
}

StagedChunk stage_chunk(const Operation& o, const Cut& cut, size_t k, int rank, std::byte* buffer) {
  using Direction = Loader::Direction;
  StagedChunk staged;
  Loader loader(staged, buffer);
  Operation& part = staged.part;
  part.collective = o.collective, part.dtype = o.dtype, part.op = o.op, part.root = o.root, part.factor = o.factor;
  part.send = Pieces(o.send.size()), part.recv = Pieces(o.recv.size());
  const bool is_root = o.root == rank;
  const size_t width = size_of(o.dtype);
  const auto own = [&](const std::byte* data, size_t bytes, Direction direction) {
    return loader.place(cut.of(piece_of(data, bytes), k), direction);
  };
  const auto each = [&](Pieces& here, const Pieces& there, Direction direction) {
    for (size_t p = 0; p < there.size(); ++p) here[p] = loader.place(cut.of(there[p], k), direction);
  };
  switch (o.collective) {
    case Collective::kAllReduce:
    case Collective::kReduce: {
      const bool gets = o.collective == Collective::kAllReduce || is_root;
      const kernel::Piece here = own(o.in, o.count * width, gets ? Direction::kBoth : Direction::kD2h);
      part.in = part.out = here.data;
      part.count = here.bytes / width;
      break;
    }
    case Collective::kBroadcast: {
      const kernel::Piece here = own(o.in, o.recv[0].bytes, is_root ? Direction::kD2h : Direction::kH2d);
      part.in = part.out = here.data;
      std::ranges::fill(part.recv, here);
      break;
    }
    case Collective::kAllGather:
      part.in = own(o.in, o.recv[size_t(rank)].bytes, Direction::kD2h).data;
      each(part.recv, o.recv, Direction::kH2d);
      break;
    case Collective::kReduceScatter:
      part.out = own(o.out, o.send[size_t(rank)].bytes, Direction::kH2d).data;
      each(part.send, o.send, Direction::kD2h);
      break;
    default: each(part.send, o.send, Direction::kD2h); each(part.recv, o.recv, Direction::kH2d);
  }
  return staged;
}

/// No later chunk needs more than the first one.
size_t buffer_bytes(const Operation& o, const Cut& cut, int rank) {
  return round_up(stage_chunk(o, cut, 0, rank, nullptr).bytes, kCacheLine);
}

Cut unsplit(const Operation& o) {
  size_t bytes = o.count * size_of(o.dtype);
  if (o.collective == Collective::kAllGather) bytes = o.recv.longest() * o.recv.size();
  if (o.collective == Collective::kReduceScatter) bytes = o.send.longest() * o.send.size();
  return {SIZE_MAX, 1, bytes};
}

Cut cut(const Operation& o, const PlanFacts& facts) {
  size_t longest = o.count * size_of(o.dtype), pieces = 1;
  if (o.collective == Collective::kAllGather) longest = o.recv.longest(), pieces = o.recv.size();
  if (o.collective == Collective::kReduceScatter) longest = o.send.longest(), pieces = o.send.size();
  if (longest == 0) return {};
  const size_t bytes = longest * pieces, grain = grain_of(o, bytes, facts);
  // Chunks are as even as possible: a short last chunk has the fixed cost of a full one.
  const size_t even = round_up(ceil_div(longest, ceil_div(bytes, kChunk)), grain);
  const size_t slice = std::min(even, longest);
  return {slice, ceil_div(longest, slice), bytes};
}

}  // namespace nvx
