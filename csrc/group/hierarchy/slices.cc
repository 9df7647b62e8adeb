// The slices and steps of the collectives over several hosts. Reductions sum inside each host first, so a host sends
// one term. Data that is only moved crosses to each host once.

#include "group/hierarchy/slices.h"

namespace nvx {
namespace {

using kernel::Collective;
using kernel::Piece;

InterHostPlan plan_for(const Slices::Source& s) {
  const Operation& o = s.o;
  const schedule::Collective between = across(o.collective);
  const size_t longest = std::max(o.send.longest(), o.recv.longest());
  switch (o.collective) {
    case Collective::kReduceScatter: return plan_between(between, o.planned(longest * o.send.size()), s.facts);
    case Collective::kBroadcast: return plan_between(between, longest, s.facts);
    case Collective::kAllGather: {
      const bool alike = s.rails.rounds() == 1 && o.recv.of_one_length();
      return plan_between(between, longest, s.facts, alike ? Blocks::kAlike : Blocks::kOfAnySize);
    }
    default: return plan_between(between, o.planned(o.count * size_of(o.dtype)), s.facts);
  }
}

std::vector<schedule::Block> packed_blocks(const std::vector<Piece>& pieces) {
  std::vector<schedule::Block> blocks;
  for (const Piece& piece : pieces) blocks.push_back({blocks.empty() ? 0 : blocks.back().end(), piece.bytes});
  return blocks;
}

CopyPair between(const Piece& device, std::byte* host) { return {device, {host, device.bytes}}; }

std::vector<Operation> one(Operation step) {
  std::vector<Operation> steps;
  steps.push_back(std::move(step));
  return steps;
}

}  // namespace

std::byte* lay_out(const std::vector<Piece>& pieces, std::vector<schedule::Block>& blocks) {
  std::byte* base = nullptr;
  for (const Piece& piece : pieces) {
    if (piece.bytes != 0 && (!base || piece.data < base)) base = piece.data;
  }
  for (const Piece& piece : pieces) blocks.push_back({piece.bytes ? size_t(piece.data - base) : 0, piece.bytes});
  return base;
}

Slices::Slices(const Source& source)
    : o_(source.o),
      rails_(source.rails),
      facts_(source.facts),
      rank_(source.rank),
      plan_(plan_for(source)),
      split_(split_of(source.o.dtype, source.o.op, source.o.factor, source.facts.world)) {}

/// Between elements.
void Slices::cut_by(size_t slice, size_t bytes) {
  slice = slice / width() * width();
  cut_ = {slice, std::max<size_t>(1, ceil_div(bytes, slice)), bytes};
}

std::byte* Slices::at(size_t k) const { return o_.proxy ? o_.proxy->at(k) : scratch_ + k % kSlots * slot_bytes_; }

Operation Slices::step_of(Collective collective) const {
  Operation step;
  step.collective = collective, step.dtype = o_.dtype, step.number = o_.number, step.timeout = o_.timeout;
  step.send = Pieces(rails_.local_ranks()), step.recv = Pieces(rails_.local_ranks());
  return step;
}

Operation Slices::sum_of() const {
  Operation step = step_of(plan_.before);
  step.op = split_.inside, step.factor = split_.factor;
  return step;
}

namespace {

/// The ranks of a host sum the slice, one part for each rail; an all-reduce of each part between hosts; an all-gather
/// inside the host. If the plan is by leader, one rank of each host has the whole slice as its part.
class AllReduce final : public Slices {
 public:
  explicit AllReduce(const Source& source) : Slices(source) {
    peers_ = rails_.rail(plan_.by_leader ? 0 : rails_.local_rank());
    carries_ = plan_.by_leader ? rails_.local_rank() == 0 : rails_.carries();
    cut_by(plan_.slice, o_.count * width());
    if (o_.proxy) slot_bytes_ = own(0).bytes;
  }
  std::vector<Operation> before(size_t k) const override {
    if (reads_input()) return {};
    Operation step = sum_of();
    step.root = leader(), step.count = slice(o_.in, k).bytes / width(), step.in = slice(o_.in, k).data;
    for (size_t l = 0; l < rails_.local_ranks(); ++l) step.send[l] = part(o_.in, k, l);
    step.out = plan_.by_leader && !carries_ ? nullptr : sum(k).data;
    return one(std::move(step));
  }
  Run run(size_t k) const override {
    return {own(k).bytes, {}, reads_input() ? slice(o_.in, k).data : sum(k).data, sum(k).data};
  }
  Piece sum(size_t k) const override { return {o_.proxy ? at(k) : own(k).data, own(k).bytes}; }
  std::vector<CopyPair> h2d(size_t k) const override { return {between(own(k), at(k))}; }
  std::vector<Operation> after(size_t k) const override {
    Operation step = step_of(plan_.after);
    step.root = leader(), step.count = slice(o_.out, k).bytes / width();
    for (size_t l = 0; l < rails_.local_ranks(); ++l)
      step.recv[l] = plan_.by_leader ? slice(o_.out, k) : part(o_.out, k, l);
    step.in = step.recv[rails_.local_rank()].data;
    return one(std::move(step));
  }

 private:
  int leader() const { return plan_.by_leader ? 0 : -1; }
  Piece slice(const std::byte* of, size_t k) const { return cut_.of(piece_of(of, cut_.bytes), k); }
  Piece part(const std::byte* of, size_t k, size_t l) const {
    if (plan_.by_leader) return l == 0 ? slice(of, k) : Piece{};
    return rails_.part_of(slice(of, k), l, width());
  }
  Piece own(size_t k) const { return part(o_.out, k, rails_.local_rank()); }
};

/// Reduces to one rank of each host, the root itself on the root's host, and from there to the root.
class Reduce final : public Slices {
 public:
  explicit Reduce(const Source& source) : Slices(source) {
    peers_ = rails_.leaders_with(o_.root);
    root_ = int(rails_.host_of(o_.root));
    carries_ = peers_.members[rails_.host()] == rank_;
    cut_by(plan_.slice, o_.count * width());
    if (carries_ && !is_root()) slot_bytes_ = slice(0).bytes;
  }
  std::vector<Operation> before(size_t k) const override {
    if (reads_input()) return {};
    Operation step = sum_of();
    step.root = rails_.local_rank_of(peers_.members[rails_.host()]);
    step.count = slice(k).bytes / width(), step.in = slice(k).data;
    step.out = carries_ ? to(k) : nullptr;
    return one(std::move(step));
  }
  Run run(size_t k) const override { return {slice(k).bytes, {}, reads_input() ? slice(k).data : to(k), to(k)}; }
  Piece sum(size_t k) const override { return is_root() ? Piece{to(k), slice(k).bytes} : Piece{}; }

 private:
  bool is_root() const { return o_.root == rank_; }
  Piece slice(size_t k) const { return cut_.of(piece_of(o_.in, cut_.bytes), k); }
  std::byte* to(size_t k) const { return is_root() ? cut_.of({o_.out, cut_.bytes}, k).data : at(k); }
};

/// From the root to one rank of each other host, and from there to the other ranks of the host.
class Broadcast final : public Slices {
 public:
  explicit Broadcast(const Source& source) : Slices(source) {
    peers_ = rails_.leaders_with(o_.root);
    root_ = int(rails_.host_of(o_.root));
    carries_ = peers_.members[rails_.host()] == rank_;
    cut_by(plan_.slice, o_.recv[0].bytes);
  }
  Run run(size_t k) const override {
    const Piece in = cut_.of(piece_of(o_.in, cut_.bytes), k);
    return {in.bytes, {}, o_.root == rank_ ? in.data : out(k).data, out(k).data};
  }
  std::vector<Operation> after(size_t k) const override {
    Operation step = step_of(plan_.after);
    step.root = rails_.local_rank_of(peers_.members[rails_.host()]);
    step.in = out(k).data;
    for (size_t l = 0; l < rails_.local_ranks(); ++l) step.recv[l] = out(k);
    return one(std::move(step));
  }

 private:
  Piece out(size_t k) const { return cut_.of(o_.recv[0], k); }
};

/// In each round, every rail serves one rank of every host. The ranks of this host sum their blocks for each host, so
/// each rail has its host's terms for all hosts. Its run sums these over hosts: the rank of this round gets its block.
class ReduceScatter final : public Slices {
 public:
  explicit ReduceScatter(const Source& source) : Slices(source) {
    peers_ = rails_.rail(rails_.local_rank());
    carries_ = rails_.carries();
    cut_by(o_.proxy ? proxy_slice(plan_, facts_) : plan_.slice, o_.send.longest());
    rounds_ = rails_.rounds();
    in_place_ = reads_input() && is_legal_in_place();
    if (!in_place_) slot_bytes_ = (rails_.hosts() + (o_.proxy ? 1 : 0)) * std::min(cut_.slice, cut_.bytes);
    if (carries_) kept_ = (rounds_ - 1) * cut_.bytes;
  }
  std::vector<Operation> before(size_t i) const override {
    std::vector<Operation> sums;
    if (in_place_) return sums;
    const std::vector<schedule::Block> blocks = packed_blocks(terms(i));
    for (size_t host = 0; host < rails_.hosts(); ++host) {
      Operation sum = sum_of();
      for (size_t l = 0; l < rails_.local_ranks(); ++l) sum.send[l] = term(i, host, l);
      sum.count = sum.send.total() / width();
      sum.out = carries_ ? at(i) + blocks[host].offset : nullptr;
      sums.push_back(std::move(sum));
    }
    return sums;
  }
  Run run(size_t i) const override {
    Run run{0, {}, at(i), sum(i).data};
    if (in_place_) {
      run.input = lay_out(terms(i), run.blocks);
    } else {
      run.blocks = packed_blocks(terms(i));
    }
    return run;
  }
  Piece sum(size_t i) const override {
    const size_t bytes = term(i, rails_.host(), rails_.local_rank()).bytes;
    if (o_.proxy) return {at(i) + packed_blocks(terms(i)).back().end(), bytes};
    return {result(i % rounds_) + i / rounds_ * cut_.slice, bytes};
  }
  std::vector<CopyPair> h2d(size_t i) const override {
    return {between(cut_.of({o_.out, o_.send[size_t(rank_)].bytes}, i), sum(i).data)};
  }
  std::optional<Operation> return_from_rails() const override {
    if (!rails_.serves_others()) return {};
    Operation step = step_of(Collective::kAllToAll);
    for (size_t round = 1; carries_ && round < rounds_; ++round) {
      const size_t l = rails_.local_rank() + round * rails_.count();
      if (l < rails_.local_ranks())
        step.send[l] = {result(round), o_.send[size_t(rails_.rank_at(rails_.host(), l))].bytes};
    }
    if (!carries_) step.recv[rails_.local_rank() % rails_.count()] = {o_.out, o_.send[size_t(rank_)].bytes};
    return step;
  }

 private:
  std::byte* result(size_t round) const { return round == 0 ? o_.out : kept() + (round - 1) * cut_.bytes; }
  Piece term(size_t i, size_t host, size_t rail) const {
    return rails_.slice_of(o_.send, cut_, i / rounds_, host, i % rounds_, rail);
  }
  std::vector<Piece> terms(size_t i) const {
    std::vector<Piece> terms;
    for (size_t host = 0; host < rails_.hosts(); ++host) terms.push_back(term(i, host, rails_.local_rank()));
    return terms;
  }
  bool is_legal_in_place() const {
    bool legal = true;
    for (size_t i = 0; i < count() && legal; ++i) {
      std::vector<schedule::Block> blocks;
      (void)lay_out(terms(i), blocks);
      schedule::Layout layout;
      layout.size = int(blocks.size()), layout.width = width(), layout.blocks = blocks;
      legal = plan_.row->legal(layout);
    }
    return legal;
  }

  bool in_place_ = false;
};

/// Every rail gathers the blocks of its `local_rank` on all hosts, and distributes them inside its host. Small blocks
/// of all rails are distributed in one step for any number of hosts.
class AllGather final : public Slices {
 public:
  explicit AllGather(const Source& source) : Slices(source) {
    peers_ = rails_.rail(rails_.local_rank());
    carries_ = rails_.carries();
    cut_by(o_.proxy ? proxy_slice(plan_, facts_) : plan_.slice, o_.recv.longest());
    rounds_ = rails_.rounds();
    packed_ = !o_.proxy && !rails_.alone() && packs_all_gather(cut_.bytes, facts_);
    if (o_.proxy || packed_) slot_bytes_ = rails_.hosts() * std::min(cut_.slice, cut_.bytes);
    if (packed_) slot_bytes_ *= rails_.count();
  }
  std::optional<Operation> collect_for_rails() const override {
    if (!rails_.serves_others()) return {};
    Operation step = step_of(Collective::kAllToAll);
    if (!carries_) step.send[rails_.local_rank() % rails_.count()] = piece_of(o_.in, o_.recv[size_t(rank_)].bytes);
    for (size_t l = rails_.count(); carries_ && l < rails_.local_ranks(); ++l) {
      if (l % rails_.count() == rails_.local_rank()) step.recv[l] = o_.recv[size_t(rails_.rank_at(rails_.host(), l))];
    }
    return step;
  }
  std::optional<std::vector<CopyPair>> d2h(size_t i) const override {
    return std::vector{CopyPair{own(i), in_slot(i, rails_.local_rank())[rails_.host()]}};
  }
  Run run(size_t i) const override {
    const std::vector<Piece> pieces = blocks(i, rails_.local_rank());
    Run run{0, {}, i % rounds_ == 0 ? own(i).data : pieces[rails_.host()].data, nullptr};
    if (!o_.proxy && !packed_) {
      run.output = lay_out(pieces, run.blocks);
      return run;
    }
    const std::vector<Piece> slot = in_slot(i, rails_.local_rank());
    run.blocks = packed_blocks(pieces);
    run.output = slot[0].data;
    if (o_.proxy) run.input = slot[rails_.host()].data;
    return run;
  }
  bool moves_only() const override { return true; }
  std::vector<CopyPair> h2d(size_t i) const override {
    std::vector<CopyPair> copies = copies_of(i, rails_.local_rank());
    copies.erase(copies.begin() + std::ptrdiff_t(rails_.host()));  // this rank has its own block
    return copies;
  }
  std::vector<Operation> after(size_t i) const override {
    std::vector<Operation> steps;
    for (size_t host = 0; host < (packed_ ? 1 : rails_.hosts()); ++host) {
      Operation step = step_of(plan_.after);
      for (size_t l = 0; l < rails_.local_ranks(); ++l) {
        const std::vector<schedule::Block> row = packed_blocks(blocks(i, l));
        step.recv[l] = packed_ ? Piece{in_slot(i, l)[0].data, row.back().end()} : block(i, host, l);
      }
      step.count = step.recv.total() / width();
      step.in = o_.proxy && host == rails_.host() ? own(i).data : step.recv[rails_.local_rank()].data;
      steps.push_back(std::move(step));
    }
    return steps;
  }
  std::vector<CopyPair> unpack(size_t i) const override {
    std::vector<CopyPair> copies;
    for (size_t l = 0; packed_ && l < rails_.count(); ++l) {
      for (const CopyPair& copy : copies_of(i, l)) copies.push_back(copy);
    }
    return copies;
  }

 private:
  Piece own(size_t i) const { return cut_.of(piece_of(o_.in, o_.recv[size_t(rank_)].bytes), i / rounds_); }
  Piece block(size_t i, size_t host, size_t rail) const {
    return rails_.slice_of(o_.recv, cut_, i / rounds_, host, i % rounds_, rail);
  }
  std::vector<Piece> blocks(size_t i, size_t rail) const {
    std::vector<Piece> blocks;
    for (size_t host = 0; host < rails_.hosts(); ++host) blocks.push_back(block(i, host, rail));
    return blocks;
  }
  /// The same in the slot, which holds the blocks of this rail or, if they are packed, of all rails.
  std::vector<Piece> in_slot(size_t i, size_t rail) const {
    std::byte* to = at(i);
    for (size_t l = 0; packed_ && l < rail; ++l) to += packed_blocks(blocks(i, l)).back().end();
    std::vector<Piece> slot;
    for (const schedule::Block& block : packed_blocks(blocks(i, rail)))
      slot.push_back({to + block.offset, block.bytes});
    return slot;
  }
  std::vector<CopyPair> copies_of(size_t i, size_t rail) const {
    const std::vector<Piece> there = blocks(i, rail), here = in_slot(i, rail);
    std::vector<CopyPair> copies;
    for (size_t host = 0; host < there.size(); ++host) copies.push_back({there[host], here[host]});
    return copies;
  }

  bool packed_ = false;
};

/// For data on devices: each rank copies its own data, and the host performs the collective, chunk by chunk.
class InChunks final : public Slices {
 public:
  explicit InChunks(const Source& source) : Slices(source) {
    cut_ = goes_in_chunks(o_.collective, o_.dtype, o_.count) ? nvx::cut(o_, facts_) : unsplit(o_);
    slot_bytes_ = buffer_bytes(o_, cut_, rank_);
    by_kernels_ = false;
  }
  std::optional<std::vector<CopyPair>> d2h(size_t k) const override { return staged(k).d2h; }
  std::vector<CopyPair> h2d(size_t k) const override { return staged(k).h2d; }
  std::optional<Operation> chunk(size_t k) const override { return std::move(staged(k).part); }
  Run run(size_t) const override { return {}; }

 private:
  StagedChunk staged(size_t k) const { return stage_chunk(o_, cut_, k, rank_, at(k)); }
};

}  // namespace

std::unique_ptr<Slices> slices_of(const Slices::Source& source) {
  const Operation& o = source.o;
  if (o.proxy && why_not_by_kernels(o.collective, o.dtype, o.count, source.facts))
    return std::make_unique<InChunks>(source);
  switch (o.collective) {
    case Collective::kAllReduce: return std::make_unique<AllReduce>(source);
    case Collective::kReduce: return std::make_unique<Reduce>(source);
    case Collective::kReduceScatter: return std::make_unique<ReduceScatter>(source);
    case Collective::kAllGather: return std::make_unique<AllGather>(source);
    default: return std::make_unique<Broadcast>(source);
  }
}

}  // namespace nvx
