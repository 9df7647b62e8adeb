#include "group/plan/operation.h"

#include <cstring>

namespace nvx {

using kernel::Collective;
using kernel::Piece;

kernel::Fingerprint Operation::fingerprint() const {
  if (whole) return whole->fingerprint;
  const Collective called = precedes == Collective::kNone ? collective : precedes;
  return {called, dtype, reduces(called) ? op : ReduceOp::kSum, kernel::Form::kDense, root, count, shape, 0};
}

void send_copy_if_overlapping(Operation& operation, std::vector<std::byte>& copy) {
  const auto is_apart = [&](const Piece& sent) {
    return std::ranges::all_of(operation.recv, [&](const Piece& received) { return apart(sent, received); });
  };
  if (std::ranges::all_of(operation.send, is_apart)) return;
  copy.resize(operation.send.total());
  std::byte* to = copy.data();
  for (Piece& piece : operation.send) {
    if (piece.bytes != 0) std::memcpy(to, piece.data, piece.bytes);
    piece.data = to;
    to += piece.bytes;
  }
}

std::string describe(const kernel::Fingerprint& f) {
  std::string text = f.collective <= Collective::kBarrier ? name(f.collective) : "an unknown operation";
  if (f.collective == Collective::kBarrier || f.collective == Collective::kNone) return text;
  text += "(";
  if (reduces(f.collective) && size_t(f.op) < kernel::kReduceOpCount) text += std::string(nvx::name(f.op)) + ", ";
  text += size_t(f.dtype) < kernel::kDTypeCount ? nvx::name(f.dtype) : "?";
  if (f.form == kernel::Form::kSparse) text += ", sparse";
  if (f.count) text += ", " + std::to_string(f.count) + (f.count == 1 ? " element" : " elements");
  if (f.root >= 0) text += ", root " + std::to_string(f.root);
  return text + ")";
}

}  // namespace nvx
