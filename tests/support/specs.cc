#include "support/specs.h"

#include <numeric>

namespace nvx::test {

using kernel::Collective;
using kernel::Piece;

namespace {

const char* name_of(Collective collective) {
  constexpr const char* kNames[] = {"nothing",   "all_reduce", "reduce", "reduce_scatter", "all_gather",
                                    "broadcast", "all_to_all", "gather", "scatter",        "barrier"};
  return kNames[size_t(collective)];
}

size_t sum(const std::vector<size_t>& counts) { return std::accumulate(counts.begin(), counts.end(), size_t(0)); }

}  // namespace

std::string describe(const Spec& spec) {
  std::string text = std::string(name_of(spec.collective)) + " " + name(spec.dtype) + " " + name(spec.op) + " root " +
                     std::to_string(spec.root) + " counts";
  for (const size_t n : spec.counts) text += " " + std::to_string(n);
  return text + " shift " + std::to_string(spec.shift) + (spec.in_place ? " in place" : "") +
         (spec.nature == Nature::kTiny   ? " tiny"
          : spec.nature == Nature::kWild ? " wild"
                                         : "") +
         " round " + std::to_string(spec.round);
}

std::vector<size_t> counts_around(size_t n, int ranks, Collective collective) {
  const bool varies = collective != Collective::kAllReduce && collective != Collective::kReduce &&
                      collective != Collective::kBroadcast && collective != Collective::kReduceScatter;
  std::vector<size_t> counts;
  for (int r = 0; r < ranks; ++r) counts.push_back(!varies ? n : n % 3 == 0 ? n : r % 3 == 1 ? 0 : n + size_t(r));
  if (collective == Collective::kReduceScatter && n % 2 == 1) counts.back() += 3;
  return counts;
}

size_t Side::piece(int from, int to) const {
  const bool root_sends = spec_.collective == Collective::kScatter;
  switch (spec_.collective) {
    case Collective::kAllToAll: return spec_.counts[size_t(2 * from + to) % spec_.counts.size()];
    case Collective::kGather: return to == spec_.root ? spec_.counts[size_t(from)] : 0;
    case Collective::kScatter: return root_sends && from == spec_.root ? spec_.counts[size_t(to)] : 0;
    case Collective::kReduceScatter: return spec_.counts[size_t(to)];
    case Collective::kAllGather: return spec_.counts[size_t(from)];
    case Collective::kBroadcast: return spec_.counts[0];
    default: return 0;
  }
}

size_t Side::elements_in(int rank) const {
  switch (spec_.collective) {
    case Collective::kBarrier:
    case Collective::kNone: return 0;
    case Collective::kAllReduce:
    case Collective::kReduce:
    case Collective::kBroadcast: return spec_.counts[0];
    case Collective::kAllGather: return spec_.counts[size_t(rank)];
    default: break;
  }
  size_t n = 0;
  for (int to = 0; to < ranks_; ++to) n += piece(rank, to);
  return n;
}

/// The piece from rank `from` to rank `to`, cut out of its input.
Bytes Side::slice_of(int from, int to) const {
  const Bytes all = input_of(from);
  if (spec_.collective == Collective::kAllGather || spec_.collective == Collective::kBroadcast) return all;
  size_t first = 0;
  for (int p = 0; p < to; ++p) first += piece(from, p);
  const auto begin = all.begin() + long(first * width());
  return {begin, begin + long(piece(from, to) * width())};
}

bool Side::reduces() const {
  const Collective c = spec_.collective;
  return c == Collective::kAllReduce || c == Collective::kReduce || c == Collective::kReduceScatter;
}

bool Side::receives() const {
  const bool rooted = spec_.collective == Collective::kReduce || spec_.collective == Collective::kGather;
  return spec_.collective != Collective::kBarrier && (!rooted || rank_ == spec_.root);
}

Bytes Side::want() const {
  if (!receives()) return {};
  std::vector<Bytes> inputs;
  for (int r = 0; r < ranks_; ++r) inputs.push_back(input_of(r));
  switch (spec_.collective) {
    case Collective::kAllReduce:
    case Collective::kReduce: return reduced(spec_.dtype, spec_.op, inputs, 0, spec_.counts[0], factors_);
    case Collective::kReduceScatter: {
      const size_t first = std::accumulate(spec_.counts.begin(), spec_.counts.begin() + rank_, size_t(0));
      return reduced(spec_.dtype, spec_.op, inputs, first, spec_.counts[size_t(rank_)], factors_);
    }
    case Collective::kBroadcast: return inputs[size_t(spec_.root)];
    default: break;
  }
  Bytes all;
  for (int from = 0; from < ranks_; ++from) {
    const Bytes part = slice_of(from, rank_);
    all.insert(all.end(), part.begin(), part.end());
  }
  return all;
}

Side::Side(const Spec& spec, int rank, int ranks, const SlotRequest& in_room, const SlotRequest& out_room)
    : spec_(spec), rank_(rank), ranks_(ranks), factors_(size_t(ranks)), in_(0), out_(0) {
  for (int r = 0; r < ranks; ++r) factors_[size_t(r)] = 0.5 + 0.25 * r;
  in_ = Tensor(input_of(rank), spec.shift, in_room);
  out_ = Tensor(want().size(), spec.shift, out_room);
  in_data_ = in_.data();
  out_data_ = receives() ? out_.data() : nullptr;
  if (spec.collective == Collective::kBroadcast && rank != spec.root) in_data_ = nullptr;
  if (spec.in_place) place_in_place();
  lay_out_pieces();
}

/// Makes the input a part of the output, as torch's in-place calls do.
void Side::place_in_place() {
  const Collective c = spec_.collective;
  const bool whole = c == Collective::kAllReduce || c == Collective::kReduce || c == Collective::kBroadcast;
  bool swaps = c == Collective::kAllToAll;  // pieces of equal length
  for (int r = 0; r < ranks_; ++r) swaps = swaps && piece(rank_, r) == piece(r, rank_);
  if (!receives() || !in_data_ || (!whole && !swaps && c != Collective::kAllGather)) return;
  size_t first = 0;
  for (int r = 0; c == Collective::kAllGather && r < rank_; ++r) first += spec_.counts[size_t(r)] * width();
  if (in_.size() != 0) std::memcpy(out_.data() + first, in_.data(), in_.size());
  in_data_ = out_.data() + first;
}

void Side::lay_out_pieces() {
  std::byte* from = const_cast<std::byte*>(in_data_);
  std::byte* to = out_data_;
  for (int r = 0; r < ranks_; ++r) {
    const bool publishes = spec_.collective == Collective::kAllGather || spec_.collective == Collective::kBroadcast;
    const size_t there = publishes ? 0 : piece(rank_, r) * width();
    const size_t here = spec_.collective == Collective::kReduceScatter ? 0 : piece(r, rank_) * width();
    send_.push_back({from, there});
    recv_.push_back({to, here});
    if (from) from += there;
    if (to && spec_.collective != Collective::kBroadcast) to += here;
  }
}

kernel::Fingerprint Side::fingerprint() const {
  const bool pairwise = spec_.collective >= Collective::kAllToAll;
  kernel::Fingerprint f;
  f.collective = spec_.collective;
  f.dtype = spec_.dtype;
  f.op = reduces() ? spec_.op : ReduceOp::kSum;
  f.root = spec_.root;
  f.count = pairwise ? 0 : sum(spec_.counts);
  return f;
}

kernel::CollectiveArgs Side::args() const {
  kernel::CollectiveArgs args;
  args.call = {fingerprint(), factor(), spec_.root};
  args.in = in_data_;
  args.out = out_data_;
  args.count = elements_in(rank_);
  args.send = send_.data();
  args.recv = recv_.data();
  if (spec_.collective == Collective::kGather) args.meets_all = spec_.root == rank_;
  if (spec_.collective == Collective::kScatter) {
    args.meets_all = false;
    args.meets = spec_.root == rank_ ? -1 : spec_.root;
  }
  return args;
}

/// After reductions all NaNs are equal; data that is only moved keeps its bits.
bool Side::is_right(const Bytes& want) {
  return reduces() ? same_numbers(spec_.dtype, out_.data(), want.data(), want.size()) : out_.holds(want);
}

std::string Side::verdict() {
  const std::string where = "rank " + std::to_string(rank_) + " of " + std::to_string(ranks_) + ", " + describe(spec_);
  if (!out_.guards_are_whole() || !in_.guards_are_whole()) return where + ": wrote outside its tensors";
  if (receives() && !is_right(want())) return where + ": wrong output";
  const bool keeps_input = in_data_ == in_.data();
  if (keeps_input && !in_.holds(input_of(rank_))) return where + ": changed its input";
  return "";
}

}  // namespace nvx::test
