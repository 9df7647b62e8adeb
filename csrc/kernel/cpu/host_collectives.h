#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <span>

#include "kernel/cpu/channel.h"
#include "kernel/cpu/run_on_cpu.h"
#include "kernel/exec.h"
#include "kernel/piece.h"

/// The collectives of host memory inside a host. A rank writes to its own memory, and the others read it there.
///
///   reduce           all_reduce, reduce              every rank stages its input; the readers reduce all inputs
///   reduce_scatter   reduce_scatter                  the same, but each rank reduces its own part only
///   publish          all_gather, broadcast           every writer stages its data; all ranks copy it
///   exchange         all_to_all, gather, scatter     every writer stages a piece for each reader
///
/// Small messages use the slots of the pads ("one shot"), large ones leased staging in chunks ("pipelined"). The
/// exchange chooses by itself.
///
/// Every function runs on every rank of the group in its next epoch and returns false if a wait fails (the Exec has the
/// verdict). Results depend on the inputs and the rank order only: not on size, slicing, algorithm or timing. Without a
/// root, every rank meets every other one, by meet_all() or meet() for each, so that all of them name a rank that is
/// absent or made a different call.
///
/// The functions use the operations of CpuExec alone. Exec and Channel are parameters, so that tests can replace them.
namespace nvx::kernel {

/// No rank leaves before all ranks have arrived.
bool barrier(auto& ex, auto& ch, const CollectiveArgs& args) {
  if (!ch.enter(ex)) return false;
  ch.arrive(ex, args.call, Staging::kSlot);
  if (!ch.meet_all(ex)) return false;
  ch.leave(ex);
  return true;
}

/// Collects the multipliers from the arrivals, on a rank that reduces.
void collect_factors(auto& ch, const Call& call) {
  if (call.fingerprint.op != ReduceOp::kPremulSum) return;
  for (int p = 0; p < ch.size(); ++p) ch.factors()[size_t(p)] = ch.pad(p).arrival(ch.epoch()).factor;
}

/// Each rank stages its input in its slot and reduces all slots in rank order. With a root, only the root reads, and no
/// rank waits for the root.
bool reduce_one_shot(auto& ex, auto& ch, const CollectiveArgs& args) {
  const size_t bytes = args.count * ex.width();
  const int root = args.call.root;
  const bool reads = root < 0 || root == ch.rank();
  if (!ch.enter(ex)) return false;
  if (root != ch.rank()) ex.stage(ch.slot(ch.rank(), bytes), args.in, bytes);
  ch.arrive(ex, args.call, Staging::kSlot);
  if (reads) {
    if (!ch.meet_all(ex)) return false;
    collect_factors(ch, args.call);
    for (int p = 0; p < ch.size(); ++p) ch.sources()[size_t(p)] = p == ch.rank() ? args.in : ch.slot(p, bytes);
    ex.reduce(args.out, ch.sources().data(), ch.size(), args.count);
  }
  ch.leave(ex);
  return true;
}

/// Each rank stages its whole input in its slot and reduces its own part of all slots. `send` has one piece per rank,
/// of the same sizes on all ranks.
bool reduce_scatter_one_shot(auto& ex, auto& ch, const CollectiveArgs& args) {
  const Piece* const in = args.send;
  size_t total = 0, mine = 0;
  for (int p = 0; p < ch.size(); ++p) {
    if (p == ch.rank()) mine = total;
    total += in[p].bytes;
  }
  if (!ch.enter(ex)) return false;
  std::byte* slot = ch.slot(ch.rank(), total);
  for (int p = 0; p < ch.size(); ++p) {
    if (p != ch.rank()) ex.stage(slot, in[p].data, in[p].bytes);
    slot += in[p].bytes;
  }
  ch.arrive(ex, args.call, Staging::kSlot);
  if (!ch.meet_all(ex)) return false;
  collect_factors(ch, args.call);
  for (int p = 0; p < ch.size(); ++p) {
    ch.sources()[size_t(p)] = p == ch.rank() ? in[p].data : ch.slot(p, total) + mine;
  }
  ex.reduce(args.out, ch.sources().data(), ch.size(), in[ch.rank()].bytes / ex.width());
  ch.leave(ex);
  return true;
}

/// Each rank stages its data in its slot and copies from all slots: all-gather. With a root it is a broadcast: only the
/// root stages, and it waits for no reader. `recv` has one piece per rank; with a root, all ranks use the root's.
bool publish_one_shot(auto& ex, auto& ch, const CollectiveArgs& args) {
  const Piece* const out = args.recv;
  const int root = args.call.root;
  const bool writes = root < 0 || root == ch.rank();
  const size_t bytes = out[ch.rank()].bytes;
  if (!ch.enter(ex)) return false;
  if (writes) ex.stage(ch.slot(ch.rank(), bytes), args.in, bytes);
  ch.arrive(ex, args.call, Staging::kSlot);
  if (writes) ex.copy(out[ch.rank()].data, args.in, bytes);
  for (const int p : ch.others()) {
    if (root == ch.rank() || (root >= 0 && root != p)) continue;
    if (!ch.meet(ex, p)) return false;
    ex.copy(out[p].data, ch.slot(p, out[p].bytes), out[p].bytes);
  }
  ch.leave(ex);
  return true;
}

inline constexpr size_t kDepth = 3;  ///< chunks in flight: one being staged, one reduced, one fetched

/// Bounds of a piece and of an operation's chunks. Values from peers are checked by them first: no product overflows.
inline constexpr size_t kLongest = size_t(1) << 48;
inline constexpr size_t kMostChunks = size_t(1) << 31;

/// How an operation uses its staging: at once if it fits, otherwise in chunks through kDepth slots.
struct Geometry {
  size_t part;    ///< bytes of one rank's part of a chunk
  size_t chunks;  ///< rounds
  size_t depth;   ///< slots

  /// `longest` is the length of the longest piece, `parts` the number of parts in a slot. Parts are whole cache lines,
  /// so that no element straddles two of them. `chunks` is 0 if the piece exceeds kLongest or the staging is too small.
  static Geometry of(size_t staging, size_t longest, size_t parts) {
    constexpr size_t kAlign = 64;
    if (longest > kLongest) return {0, 0, kDepth};
    const size_t whole = ceil_div(longest, kAlign) * kAlign;
    if (whole <= staging / parts) return {whole, longest ? size_t(1) : size_t(0), 1};
    const size_t most = staging / kDepth / parts / kAlign * kAlign;
    const size_t chunks = most ? ceil_div(longest, most) : 0;
    if (chunks > kMostChunks) return {0, 0, kDepth};
    return {chunks ? ceil_div(ceil_div(longest, chunks), kAlign) * kAlign : 0, chunks, kDepth};
  }
  /// False if the staging is too small or the piece too long.
  bool possible(size_t longest) const { return longest == 0 || chunks != 0; }
  size_t slot(size_t chunk, size_t parts) const { return chunk % depth * parts * part; }
};

/// One tensor, cut into chunks with one slice per rank.
struct WholeSlices {
  const std::byte* in;
  std::byte* out;
  size_t bytes;
  size_t ranks;

  size_t longest() const { return ceil_div(bytes, ranks); }
  size_t total() const { return bytes; }
  /// The place of a slice in a rank's input.
  size_t place(const Geometry& g, size_t k, int p) const { return first(g, k, p); }
  size_t first(const Geometry& g, size_t k, int p) const { return std::min(bytes, (k * ranks + size_t(p)) * g.part); }
  size_t count(const Geometry& g, size_t k, int p) const { return std::min(g.part, bytes - first(g, k, p)); }
  const std::byte* source(const Geometry& g, size_t k, int p) const { return in + first(g, k, p); }
  std::byte* target(const Geometry& g, size_t k, int p) const { return out + first(g, k, p); }
};

/// One block per rank; slice k is the k-th part of a block. This rank reduces only its own block, into one output.
struct BlockSlices {
  const Piece* in;
  std::byte* out;
  size_t ranks;

  size_t longest() const {
    size_t most = 0;
    for (size_t p = 0; p < ranks; ++p) most = std::max(most, in[p].bytes);
    return most;
  }
  size_t before(int rank) const {
    size_t sum = 0;
    for (int p = 0; p < rank; ++p) sum += in[p].bytes;
    return sum;
  }
  size_t total() const { return before(int(ranks)); }
  size_t place(const Geometry& g, size_t k, int p) const { return before(p) + first(g, k, p); }
  size_t first(const Geometry& g, size_t k, int p) const { return std::min(in[p].bytes, k * g.part); }
  size_t count(const Geometry& g, size_t k, int p) const { return std::min(g.part, in[p].bytes - first(g, k, p)); }
  const std::byte* source(const Geometry& g, size_t k, int p) const { return advance(in[p], first(g, k, p)); }
  std::byte* target(const Geometry& g, size_t k, int p) const { return out + first(g, k, p); }
};

enum class Fetch { kNoRank, kRoot, kEverybody };

/// For each chunk: stage the other ranks' slices of this rank's input; reduce this rank's slice of all inputs; fetch
/// the slices that the others reduced. The three stages run one chunk behind each other. All ranks fetch in all-reduce,
/// the root in reduce, none in reduce-scatter.
///
/// A rank that lends stages nothing: the others read its input, and the slices that it has reduced, where they are. If
/// all ranks fetch, its input is its output.
///
/// A slot holds one part per rank. The place of this rank's own part holds the slice that it has reduced. The slot is
/// staged again when all ranks have reduced from it and fetched from it.
template <class Exec, class Channel, class Slices>
class ReducePipeline {
 public:
  ReducePipeline(Exec& ex, Channel& ch, const Slices& slices, Fetch fetch, int root)
      : ex_(ex),
        ch_(ch),
        slices_(slices),
        ranks_(size_t(ch.size())),
        fetch_(fetch),
        fetches_(fetch == Fetch::kEverybody || (fetch == Fetch::kRoot && root == ch.rank())),
        keeps_(fetch != Fetch::kRoot || fetches_) {}

  bool run(const Call& call) {
    if (!ch_.enter(ex_)) return false;
    ch_.arrive(ex_, call, Staging::kLeased);
    if (!ch_.meet_all(ex_)) return false;
    collect_factors(ch_, call);
    if (!ch_.own_staging(ex_, &mine_)) return false;
    size_t least = mine_.size();
    for (const int p : ch_.others()) {
      std::span<std::byte> theirs;
      if (!ch_.staging(ex_, p, slices_.total(), &theirs)) return false;
      least = std::min(least, theirs.size());
    }
    geometry_ = Geometry::of(least, slices_.longest(), ranks_);
    if (!geometry_.possible(slices_.longest())) return ex_.fail(Verdict::bad_lease(ch_.rank()));
    for (size_t k = 0; k < geometry_.chunks + 2; ++k) {
      if (k < geometry_.chunks && !stage(k)) return false;
      if (k >= 1 && k - 1 < geometry_.chunks && !reduce(k - 1)) return false;
      if (k >= 2 && !fetch(k - 2)) return false;
    }
    return ch_.leave_lenders(ex_);
  }

 private:
  Stamp step(size_t chunks) const { return stamp(ch_.epoch(), uint32_t(chunks)); }

  std::byte* part(int owner, size_t k, int p) {
    return ch_.staging_base(owner) + geometry_.slot(k, ranks_) + size_t(p) * geometry_.part;
  }

  /// Slice p of chunk k, as its owner staged, reduced or lends it.
  const std::byte* shared(int owner, size_t k, int p) {
    const std::byte* lent = ch_.lent(owner);
    return lent ? lent + slices_.place(geometry_, k, p) : part(owner, k, p);
  }

  bool stage(size_t k) {
    if (ch_.lends()) return true;
    if (k >= geometry_.depth) {
      const Stamp freed = step(k - geometry_.depth + 1);
      for (const int p : ch_.others()) {
        if (!ex_.wait(ch_.pad(p).reduced(), freed, p) || !ex_.wait(ch_.pad(p).fetched(), freed, p)) return false;
      }
    }
    for (const int p : ch_.others()) {
      ex_.stage(part(ch_.rank(), k, p), slices_.source(geometry_, k, p), slices_.count(geometry_, k, p));
    }
    ex_.signal(ch_.mine().staged(), step(k + 1));
    return true;
  }

  bool reduce(size_t k) {
    for (const int p : ch_.others()) {
      if (!ch_.lent(p) && !ex_.wait(ch_.pad(p).staged(), step(k + 1), p)) return false;
    }
    const int me = ch_.rank();
    const size_t bytes = slices_.count(geometry_, k, me);
    std::byte* const own = keeps_ ? slices_.target(geometry_, k, me) : nullptr;
    std::byte* const staged = ch_.lends() || (keeps_ && fetch_ != Fetch::kEverybody) ? nullptr : part(me, k, me);
    const bool apart = own ? fetch_ == Fetch::kNoRank && ex_.keeps_past() : ex_.stages_past();
    for (int p = 0; p < ch_.size(); ++p) {
      ch_.sources()[size_t(p)] = p == me ? slices_.source(geometry_, k, me) : shared(p, k, me);
    }
    for (size_t at = 0; at < bytes; at += Exec::kBlock) {
      const size_t block = std::min(Exec::kBlock, bytes - at);
      std::byte* first = apart ? block_.data() : (own ? own : staged) + at;
      ex_.reduce(first, ch_.sources().data(), ch_.size(), block / ex_.width());
      if (apart && own) ex_.copy(own + at, first, block);
      if (staged && (apart || own)) ex_.stage(staged + at, first, block);
      for (const void*& source : ch_.sources()) source = static_cast<const std::byte*>(source) + block;
    }
    ex_.signal(ch_.mine().reduced(), step(k + 1));
    return true;
  }

  bool fetch(size_t k) {
    for (const int p : ch_.others()) {
      if (!fetches_) break;
      if (!ex_.wait(ch_.pad(p).reduced(), step(k + 1), p)) return false;
      ex_.copy(slices_.target(geometry_, k, p), shared(p, k, p), slices_.count(geometry_, k, p));
    }
    ex_.signal(ch_.mine().fetched(), step(k + 1));
    return true;
  }

  Exec& ex_;
  Channel& ch_;
  const Slices& slices_;
  size_t ranks_;
  Fetch fetch_;
  bool fetches_;  // this rank fetches the slices of the others
  bool keeps_;    // this rank stores its own slice in its output
  Geometry geometry_{};
  std::span<std::byte> mine_;
  alignas(64) std::array<std::byte, Exec::kBlock> block_;  // reduced, not yet staged or kept
};

bool reduce_pipelined(auto& ex, auto& ch, const CollectiveArgs& args) {
  const WholeSlices slices{args.in, args.out, args.count * ex.width(), size_t(ch.size())};
  const int root = args.call.root;
  return ReducePipeline(ex, ch, slices, root < 0 ? Fetch::kEverybody : Fetch::kRoot, root).run(args.call);
}

bool reduce_scatter_pipelined(auto& ex, auto& ch, const CollectiveArgs& args) {
  const BlockSlices slices{args.send, args.out, size_t(ch.size())};
  return ReducePipeline(ex, ch, slices, Fetch::kNoRank, -1).run(args.call);
}

/// Every writer stages its piece chunk by chunk; all ranks copy chunk k while chunk k + 1 is being staged. With a root,
/// only the root writes and is read. Data that a writer lends is copied at once.
template <class Exec, class Channel>
class PublishPipeline {
 public:
  PublishPipeline(Exec& ex, Channel& ch, const CollectiveArgs& args)
      : ex_(ex),
        ch_(ch),
        in_(args.in),
        out_(args.recv),
        root_(args.call.root),
        writes_(root_ < 0 || root_ == ch.rank()) {}

  bool run(const Call& call) {
    if (!ch_.enter(ex_)) return false;
    ch_.arrive(ex_, call, writes_ ? Staging::kLeased : Staging::kSlot);
    if (writes_ && !prepare()) return false;
    size_t rounds = own_.chunks;
    for (const int p : ch_.others()) {
      if (listens(p) && !begin(p, &rounds)) return false;
    }
    for (size_t k = 0; k < rounds + 1; ++k) {
      if (k < own_.chunks && !stage(k)) return false;
      if (k >= 1 && !fetch(k - 1)) return false;
    }
    return ch_.leave_lenders(ex_);
  }

 private:
  Stamp step(size_t chunks) const { return stamp(ch_.epoch(), uint32_t(chunks)); }
  bool listens(int p) const { return p != ch_.rank() && (root_ < 0 || root_ == p); }
  Geometry geometry(std::span<std::byte> staging, int p) const {
    return Geometry::of(staging.size(), out_[p].bytes, 1);
  }

  bool prepare() {
    const int me = ch_.rank();
    if (!ch_.own_staging(ex_, &mine_)) return false;
    if (ch_.lends()) return ex_.copy(out_[me].data, in_, out_[me].bytes), true;
    own_ = geometry(mine_, me);
    return own_.possible(out_[me].bytes) || ex_.fail(Verdict::bad_lease(me));
  }

  /// Meets a writer and determines how many rounds its piece takes.
  bool begin(int p, size_t* rounds) {
    std::span<std::byte> theirs;
    if (!ch_.meet(ex_, p) || !ch_.staging(ex_, p, out_[p].bytes, &theirs)) return false;
    if (const std::byte* lent = ch_.lent(p)) return ex_.copy(out_[p].data, lent, out_[p].bytes), true;
    const Geometry g = geometry(theirs, p);
    if (!g.possible(out_[p].bytes)) return ex_.fail(Verdict::bad_lease(p));
    *rounds = std::max(*rounds, g.chunks);
    return true;
  }

  bool stage(size_t k) {
    const Piece& out = out_[ch_.rank()];
    for (const int p : ch_.others()) {
      if (k < own_.depth) break;
      if (k == own_.depth && !ch_.meet(ex_, p)) return false;  // a rank that called another operation would never fetch
      if (!ex_.wait(ch_.pad(p).fetched(), step(k - own_.depth + 1), p)) return false;
    }
    const size_t at = k * own_.part, bytes = std::min(own_.part, out.bytes - at);
    ex_.stage(mine_.data() + own_.slot(k, 1), in_ + at, bytes);
    ex_.signal(ch_.mine().staged(), step(k + 1));
    ex_.copy(out.data + at, in_ + at, bytes);
    return true;
  }

  bool fetch(size_t k) {
    for (const int p : ch_.others()) {
      std::span<std::byte> theirs;
      if (!listens(p) || ch_.lent(p)) continue;
      if (!ch_.staging(ex_, p, out_[p].bytes, &theirs)) return false;
      if (ch_.lent(p)) return ex_.fail(Verdict::bad_lease(p));  // it staged when this rank met it
      const Geometry g = geometry(theirs, p);
      if (k >= g.chunks) continue;
      const size_t at = k * g.part;
      if (!ex_.wait(ch_.pad(p).staged(), step(k + 1), p)) return false;
      ex_.copy(out_[p].data + at, theirs.data() + g.slot(k, 1), std::min(g.part, out_[p].bytes - at));
    }
    ex_.signal(ch_.mine().fetched(), step(k + 1));
    return true;
  }

  Exec& ex_;
  Channel& ch_;
  const std::byte* in_;
  const Piece* out_;
  const int root_;
  const bool writes_;
  Geometry own_{0, 0, 1};
  std::span<std::byte> mine_;
};

bool publish_pipelined(auto& ex, auto& ch, const CollectiveArgs& args) {
  return PublishPipeline(ex, ch, args).run(args.call);
}

/// Exchanges pieces of any sizes, compared pair by pair: between all ranks (all-to-all), or between the root and each
/// rank (gather, scatter). A sender stages them in its slot if they fit; otherwise each receiver has a part of every
/// chunk, or the sender lends them. Receivers follow the sender's choice. This rank's own piece is copied locally.
template <class Exec, class Channel>
class ExchangePipeline {
 public:
  ExchangePipeline(Exec& ex, Channel& ch, const CollectiveArgs& args)
      : ex_(ex), ch_(ch), args_(args), ranks_(size_t(ch.size())) {}

  bool run() {
    if (!ch_.enter(ex_)) return false;
    uint64_t* counts = ch_.mine().counts(ch_.epoch());
    size_t total = 0;
    for (int p = 0; p < ch_.size(); ++p) {
      const bool travels = p != ch_.rank();
      counts[p] = travels ? args_.send[p].bytes : 0;
      total += counts[p];
      longest_ = std::max<size_t>(longest_, counts[p]);
    }
    leased_ = total > kSlotBytes;
    if (!leased_) fill_slot(total);
    if (leased_ && ch_.lends()) counts[ch_.rank()] = args_.send[ch_.rank()].bytes;
    ch_.arrive(ex_, args_.call, leased_ ? Staging::kLeased : Staging::kSlot);
    if (leased_) {
      if (!ch_.own_staging(ex_, &mine_)) return false;
      own_ = ch_.lends() ? Geometry{0, 0, 1} : Geometry::of(mine_.size(), longest_, ranks_);
      if (!ch_.lends() && !own_.possible(longest_)) return ex_.fail(Verdict::bad_lease(ch_.rank()));
    }
    ex_.copy(args_.recv[ch_.rank()].data, args_.send[ch_.rank()].data, args_.recv[ch_.rank()].bytes);
    size_t rounds = own_.chunks;
    for (const int p : ch_.others()) {
      if (!begin(p, &rounds)) return false;
    }
    for (size_t k = 0; k < rounds + 1; ++k) {
      if (k < own_.chunks && !stage(k)) return false;
      if (k >= 1 && !fetch(k - 1)) return false;
    }
    return ch_.leave_lenders(ex_);
  }

 private:
  Stamp step(size_t chunks) const { return stamp(ch_.epoch(), uint32_t(chunks)); }
  bool meets(int p) const { return args_.meets_all || args_.meets == p; }

  void fill_slot(size_t total) {
    std::byte* slot = ch_.slot(ch_.rank(), total);
    for (int p = 0; p < ch_.size(); ++p) {
      if (p == ch_.rank()) continue;
      ex_.stage(slot, args_.send[p].data, args_.send[p].bytes);
      slot += args_.send[p].bytes;
    }
  }

  /// Meets a sender, compares its announced size with the expected one, and reads the piece if it is in the slot.
  bool begin(int p, size_t* rounds) {
    if (!meets(p)) return true;
    if (!ch_.meet(ex_, p)) return false;
    const uint64_t* counts = ch_.pad(p).counts(ch_.epoch());
    const uint64_t offered = counts[ch_.rank()];
    if (offered != args_.recv[p].bytes) {
      return ex_.fail(Verdict::counts(p, args_.recv[p].bytes, offered));
    }
    if (ch_.pad(p).arrival(ch_.epoch()).lease_bytes != 0) {
      Geometry g{};
      std::span<std::byte> theirs;
      const size_t before = before_me(p);
      if (!geometry(p, before, &g, &theirs)) return false;
      if (ch_.lent(p)) {
        ex_.copy(args_.recv[p].data, ch_.lent(p) + before, offered);
      } else {
        *rounds = std::max(*rounds, ceil_div(offered, g.part));
      }
      return true;
    }
    uint64_t before = 0, total = 0;
    for (int q = 0; q < ch_.size(); ++q) {
      const uint64_t bytes = counts[q];
      if (q == ch_.rank()) before = total;
      if (bytes > kSlotBytes - total) return ex_.fail(Verdict::bad_lease(p));
      total += bytes;
    }
    if (offered > total - before) return ex_.fail(Verdict::bad_lease(p));
    ex_.copy(args_.recv[p].data, ch_.slot(p, total) + before, offered);
    return true;
  }

  /// Where this rank's piece begins in the data that a rank lends.
  size_t before_me(int p) {
    size_t bytes = 0;
    for (int q = 0; q < ch_.rank(); ++q) bytes += std::min<size_t>(ch_.pad(p).counts(ch_.epoch())[q], kLongest);
    return bytes;
  }

  /// `before`: the bytes before this rank's piece, if the rank lends.
  bool geometry(int p, size_t before, Geometry* g, std::span<std::byte>* theirs) {
    if (!ch_.staging(ex_, p, before + args_.recv[p].bytes, theirs)) return false;
    uint64_t longest = 0;
    for (int q = 0; q < ch_.size(); ++q) longest = std::max(longest, ch_.pad(p).counts(ch_.epoch())[q]);
    *g = Geometry::of(theirs->size(), longest, ranks_);
    if (g->part == 0) return ex_.fail(Verdict::bad_lease(p));
    return true;
  }

  bool stage(size_t k) {
    for (const int p : ch_.others()) {
      // The receiver of a part of the chunk that this one replaces must have fetched it.
      if (k >= own_.depth && args_.send[p].bytes > (k - own_.depth) * own_.part) {
        if (k == own_.depth && !ch_.meet(ex_, p))
          return false;  // a rank that called another operation would never fetch
        if (!ex_.wait(ch_.pad(p).fetched(), step(k - own_.depth + 1), p)) return false;
      }
      const size_t at = std::min(args_.send[p].bytes, k * own_.part);
      ex_.stage(mine_.data() + own_.slot(k, ranks_) + size_t(p) * own_.part, advance(args_.send[p], at),
                std::min(own_.part, args_.send[p].bytes - at));
    }
    ex_.signal(ch_.mine().staged(), step(k + 1));
    return true;
  }

  bool fetch(size_t k) {
    for (const int p : ch_.others()) {
      if (!meets(p) || ch_.pad(p).arrival(ch_.epoch()).lease_bytes == 0 || ch_.lent(p)) continue;
      Geometry g{};
      std::span<std::byte> theirs;
      if (!geometry(p, 0, &g, &theirs)) return false;
      if (ch_.lent(p)) return ex_.fail(Verdict::bad_lease(p));  // it staged when this rank met it
      const size_t at = k * g.part;
      if (at >= args_.recv[p].bytes) continue;
      if (!ex_.wait(ch_.pad(p).staged(), step(k + 1), p)) return false;
      ex_.copy(args_.recv[p].data + at, theirs.data() + g.slot(k, ranks_) + size_t(ch_.rank()) * g.part,
               std::min(g.part, args_.recv[p].bytes - at));
    }
    ex_.signal(ch_.mine().fetched(), step(k + 1));
    return true;
  }

  Exec& ex_;
  Channel& ch_;
  const CollectiveArgs& args_;
  size_t ranks_;
  size_t longest_ = 0;
  bool leased_ = false;
  Geometry own_{0, 0, 1};
  std::span<std::byte> mine_;
};

bool exchange(auto& ex, auto& ch, const CollectiveArgs& args) { return ExchangePipeline(ex, ch, args).run(); }

}  // namespace nvx::kernel
