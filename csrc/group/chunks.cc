#include "group/chunks.h"

#include <algorithm>

namespace nvx {
namespace {

using kernel::ceil_div;
using kernel::Collective;

/// Whole cache lines, which no element straddles.
constexpr size_t kLine = 64;

/// What slices are multiples of.
size_t grain_of(const Operation& o, size_t bytes, const PlanFacts& facts) {
  if (facts.hosts == 1 || !reduces(o.collective)) return kLine;
  const Bridge bridge = plan_between(across(o.collective), bytes, facts);
  if (bridge.row->guarantee.order != schedule::Order::kByPlace) return kLine;
  const size_t width = size_of(o.dtype);
  return bridge.slice / width * width;
}

}  // namespace

bool goes_in_chunks(Collective collective, DType dtype, size_t count) {
  switch (collective) {
    case Collective::kAllReduce:
    case Collective::kReduce:
    case Collective::kBroadcast:
    case Collective::kAllGather:
    case Collective::kReduceScatter:
      // Elements whose type nvx does not know may have other sizes on other ranks.
      return dtype != DType::kBytes && count > kChunk / size_of(dtype);
    default: return false;
  }
}

kernel::Piece Cut::of(kernel::Piece piece, size_t k) const {
  const size_t at = std::min(piece.bytes, k * slice);
  return {advance(piece, at), std::min(slice, piece.bytes - at)};
}

Cut cut(const Operation& o, const PlanFacts& facts) {
  size_t longest = o.count * size_of(o.dtype), pieces = 1;
  if (o.collective == Collective::kAllGather) longest = o.recv.longest(), pieces = o.recv.size();
  if (o.collective == Collective::kReduceScatter) longest = o.send.longest(), pieces = o.send.size();
  if (longest == 0) return {};
  const size_t bytes = longest * pieces, grain = grain_of(o, bytes, facts);
  // As even as may be: a short last chunk would cost as much as the others do besides their bytes.
  const size_t even = ceil_div(ceil_div(longest, ceil_div(bytes, kChunk)), grain) * grain;
  const size_t slice = std::min(even, longest);
  return {slice, ceil_div(longest, slice), bytes};
}

}  // namespace nvx
