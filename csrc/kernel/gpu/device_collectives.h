#pragma once

#include <cstddef>
#include <cstdint>

#include "kernel/gpu/push_channel.h"

/// The collectives inside a host for memory that is far from its reader, as between GPUs: all data is pushed to its
/// reader, which waits for it locally. There are two primitives: packets, which carry their own stamps, for small data;
/// chunks and counters for large data. The contract and the results are those of kernel/cpu/direct.h, bit for bit.
///
/// Every block does its share of every piece and is independent of the other blocks. All lanes of a tile take the same
/// path: a failure of one lane ends the tile.
namespace nvx::kernel {

/// One step: each rank sends its data to every reader, and the readers reduce in rank order. For all_reduce, reduce,
/// and reduce_scatter, in which each rank is sent only its own piece.
template <class Exec, class Channel>
NVX_NOINLINE bool reduce_packets(Exec& ex, Channel& ch, const Job& job, PieceTable table) {
  const auto send = [&](uint32_t p) { return ch.share(job.send.of(p, ch.ranks(), table)); };
  const auto reads = [&](uint32_t p) { return job.root < 0 || uint32_t(job.root) == p; };
  const uint32_t me = ch.rank();
  const Piece out = ch.share(job.recv.of(me, ch.ranks(), table));
  if (!ch.enter(job, /*pairwise=*/false, table)) return false;
  for (uint32_t i = 0; i < ch.ranks(); ++i) {
    const uint32_t p = ch.other(i);  // this rank last
    const Piece piece = send(p);
    if (reads(p)) put_packets(ex, ch.packets_to(p), piece.data, piece.bytes, ch.stamp32());
  }
  if (reads(me)) {
    if (!ch.meet(job, [](uint32_t) { return true; })) return false;
    const Fold fold{out.data, ch.packet_sources(), ch.factors(job), job.fingerprint.op, int(ch.ranks()), out.bytes};
    if (!ex.all(reduce(ex, job.fingerprint.dtype, fold))) return false;
  }
  ch.leave(job, /*all_met=*/job.root < 0);
  return true;
}

/// all_reduce in two steps of packets: every rank reduces one slice and sends the result to all.
template <class Exec, class Channel>
NVX_NOINLINE bool reduce_packets_two_shot(Exec& ex, Channel& ch, const Job& job, PieceTable table) {
  const auto send = [&](uint32_t p) { return ch.share(job.send.of(p, ch.ranks(), table)); };
  const auto recv = [&](uint32_t p) { return ch.share(job.recv.of(p, ch.ranks(), table)); };
  const uint32_t me = ch.rank(), second = ch.shape().packets / 2;  // half of the packets per step
  const Piece out = recv(me);
  if (!ch.enter(job, /*pairwise=*/false, table)) return false;
  for (uint32_t i = 0; i < ch.ranks(); ++i) {
    const uint32_t p = ch.other(i);  // this rank last
    const Piece piece = send(p);
    put_packets(ex, ch.packets_to(p), piece.data, piece.bytes, ch.stamp32());
  }
  if (!ch.meet(job, [](uint32_t) { return true; })) return false;
  const Fold fold{out.data, ch.packet_sources(), ch.factors(job), job.fingerprint.op, int(ch.ranks()), out.bytes};
  if (!ex.all(reduce(ex, job.fingerprint.dtype, fold))) return false;
  for (uint32_t i = 0; i < ch.others(); ++i) {
    put_packets(ex, ch.packets_to(ch.other(i)) + second, out.data, out.bytes, ch.stamp32());
  }
  bool ok = true;
  for (uint32_t i = 0; ok && i < ch.others(); ++i) {
    const uint32_t p = ch.other(i);
    const Piece piece = recv(p);
    ok = get_packets(ex, piece.data, ch.packets_from(p) + second, piece.bytes, ch.stamp32(), int(p));
  }
  if (!ex.all(ok)) return false;
  ch.leave(job, /*all_met=*/true);
  return true;
}

/// For each chunk: send the other ranks their slices of this rank's input; reduce this rank's slice of all inputs and
/// send the sum on; store the sums from the others. The three stages run one chunk behind each other. all_reduce sends
/// sums to all ranks, reduce to the root, reduce_scatter to none. Inputs that the reader has mapped are read in place,
/// and sums are written directly to results that the writer has mapped. Input and result may be the same memory even
/// then: only rank p reads slice p, and it writes that slice after it has read it from all ranks.
template <class Exec, class Channel>
class ReduceChunks {
 public:
  NVX_HD ReduceChunks(Exec& ex, Channel& ch, const Job& job, PieceTable table)
      : ex_(ex), ch_(ch), job_(job), table_(table), me_(ch.rank()) {
    for (uint32_t p = 0; p < ch.ranks(); ++p) {
      const size_t chunks = ceil_div(send(p).bytes, ch.shape().chunk_bytes);
      rounds_ = chunks > rounds_ ? chunks : rounds_;
    }
  }

  NVX_NOINLINE bool run() {
    const auto all = [](uint32_t) { return true; };
    if (!ch_.enter(job_, /*pairwise=*/false, table_)) return false;
    if (!ch_.meet(job_, /*pairwise=*/false, table_, all)) return false;
    const bool scatters = job_.fingerprint.collective == Collective::kReduceScatter;
    for (size_t k = 0; k < rounds_ + 2; ++k) {
      if (k < rounds_ && !scatter(k)) return false;
      if (k >= 1 && k - 1 < rounds_ && !reduce_mine(k - 1, /*passes_on=*/!scatters)) return false;
      if (k >= 2 && !scatters && (job_.root < 0 || is_root(me_)) && !gather(k - 2)) return false;
    }
    if (!ch_.await_readers()) return false;
    ch_.leave(job_, /*all_met=*/true);
    return true;
  }

 private:
  NVX_HD bool is_root(uint32_t p) const { return job_.root >= 0 && uint32_t(job_.root) == p; }
  NVX_HD Piece send(uint32_t p) const { return ch_.share(job_.send.of(p, ch_.ranks(), table_)); }

  NVX_HD bool has(uint32_t p, size_t k) const { return k * ch_.shape().chunk_bytes < send(p).bytes; }

  NVX_HD bool scatter(size_t k) {
    const auto whom = [&](uint32_t p) { return has(p, k); };
    if (!ch_.await_room(whom)) return false;
    for (uint32_t i = 0; i < ch_.others(); ++i) {
      const uint32_t p = ch_.other(i);
      const Piece piece = ch_.chunk_of(send(p), k);
      if (piece.bytes && !ch_.is_read_by(p)) copy(ex_, ch_.chunk_to(p), piece.data, piece.bytes);
    }
    ch_.post(whom);
    return true;
  }

  NVX_HD bool reduce_mine(size_t k, bool passes_on) {
    if (!has(me_, k)) return true;
    const auto all = [](uint32_t) { return true; };
    const auto root = [&](uint32_t p) { return is_root(p); };
    const bool straight_to_root = passes_on && job_.root >= 0 && !is_root(me_);
    const Piece own = ch_.chunk_of(send(me_), k);
    const size_t at = k * ch_.shape().chunk_bytes;
    if (!ch_.await_sources(at, own.bytes)) return false;
    if (straight_to_root && !ch_.await_room(root)) return false;
    const Piece out = straight_to_root ? Piece{ch_.target(uint32_t(job_.root), at), own.bytes}
                                       : ch_.chunk_of(ch_.share(job_.recv.of(me_, ch_.ranks(), table_)), k);
    const Fold fold{out.data, ch_.chunk_sources(own, at), ch_.factors(job_), job_.fingerprint.op, int(ch_.ranks()),
                    own.bytes};
    if (!ex_.all(reduce(ex_, job_.fingerprint.dtype, fold))) return false;
    ch_.release(all);
    if (straight_to_root) {
      if (!ch_.await_room(root))
        return false;  // there is space; this checks that the inputs read so far are still valid
      ch_.post(root);
    } else if (passes_on && job_.root < 0) {
      if (!ch_.await_room(all)) return false;
      for (uint32_t i = 0; i < ch_.others(); ++i) copy(ex_, ch_.target(ch_.other(i), at), out.data, out.bytes);
      ch_.post(all);
    }
    return true;
  }

  NVX_HD bool gather(size_t k) {
    const auto whom = [&](uint32_t p) { return has(p, k); };
    if (!ch_.await_chunks(whom)) return false;
    for (uint32_t i = 0; i < ch_.others(); ++i) {
      const uint32_t p = ch_.other(i);
      const Piece piece = ch_.chunk_of(ch_.share(job_.recv.of(p, ch_.ranks(), table_)), k);
      if (piece.bytes && !ch_.is_written_by(p)) copy(ex_, piece.data, ch_.chunk_from(p), piece.bytes);
    }
    ch_.release(whom);
    return true;
  }

  Exec& ex_;
  Channel& ch_;
  const Job& job_;
  PieceTable table_;
  uint32_t me_;
  size_t rounds_ = 0;
};

/// Which ranks wait for whose greetings in an exchange: all for all, or with a root the receivers for the senders.
struct Partners {
  Collective collective;
  int32_t root;
  uint32_t me;

  NVX_HD bool receives_from(uint32_t p) const {
    if (root < 0) return true;
    return collective == Collective::kGather ? uint32_t(root) == me : uint32_t(root) == p;
  }
  NVX_HD bool sends_to(uint32_t p) const {
    if (root < 0) return true;
    return collective == Collective::kGather ? uint32_t(root) == p : uint32_t(root) == me;
  }
  /// Whether lengths are compared pair by pair. For all-gather and broadcast the fingerprint contains them.
  NVX_HD bool pairwise() const {
    return collective == Collective::kAllToAll || collective == Collective::kGather ||
           collective == Collective::kScatter;
  }
};

/// Sends each piece to its receiver as packets.
template <class Exec, class Channel>
NVX_NOINLINE bool exchange_packets(Exec& ex, Channel& ch, const Job& job, PieceTable table) {
  const uint32_t me = ch.rank(), ranks = ch.ranks();
  const Partners partners{job.fingerprint.collective, job.root, me};
  if (!ch.enter(job, partners.pairwise(), table)) return false;
  for (uint32_t i = 0; i < ch.others(); ++i) {
    const uint32_t p = ch.other(i);
    const Piece piece = ch.share(job.send.of(p, ranks, table));
    if (partners.sends_to(p)) put_packets(ex, ch.packets_to(p), piece.data, piece.bytes, ch.stamp32());
  }
  const Piece own = ch.share(job.recv.of(me, ranks, table));
  if (own.bytes) copy(ex, own.data, ch.share(job.send.of(me, ranks, table)).data, own.bytes);
  const auto whom = [&](uint32_t p) { return partners.receives_from(p); };
  if (!ch.meet(job, partners.pairwise(), table, whom)) return false;
  bool ok = true;
  for (uint32_t i = 0; ok && i < ch.others(); ++i) {
    const uint32_t p = ch.other(i);
    const Piece piece = ch.share(job.recv.of(p, ranks, table));
    if (whom(p)) ok = get_packets(ex, piece.data, ch.packets_from(p), piece.bytes, ch.stamp32(), int(p));
  }
  if (!ex.all(ok)) return false;
  ch.leave(job, /*all_met=*/job.root < 0);
  return true;
}

/// Sends each piece to its receiver in chunks; a chunk is read while the next one is written. In kExchangePieces,
/// pieces that fit use packets: both ranks of a pair know the length of the piece and compare it before they use its
/// data. A sender that has mapped the receiver's result writes there, and posts once, when the whole piece is written.
/// To do so it must meet the receiver first. In a collective with a root, a sender with staging need not meet the
/// receiver before the slots are full; so there, a piece that fits the slots uses them.
template <class Exec, class Channel>
class ExchangeChunks {
 public:
  NVX_HD ExchangeChunks(Exec& ex, Channel& ch, const Job& job, PieceTable table)
      : ex_(ex), ch_(ch), job_(job), table_(table), partners_{job.fingerprint.collective, job.root, ch.rank()} {
    const size_t most = ch.shape().chunk_bytes;
    for (uint32_t i = 0; i < ch.others(); ++i) {
      const size_t out = ceil_div(send(ch.other(i)).bytes, most), in = ceil_div(recv(ch.other(i)).bytes, most);
      sends_ = out > sends_ ? out : sends_;
      receives_ = in > receives_ ? in : receives_;
    }
  }

  NVX_NOINLINE bool run() {
    if (!ch_.enter(job_, partners_.pairwise(), table_)) return false;
    put_small();
    if (!ch_.meet(job_, partners_.pairwise(), table_, [&](uint32_t p) { return partners_.receives_from(p); }))
      return false;
    if (!ch_.meet(job_, /*pairwise=*/false, table_, [&](uint32_t p) { return is_unmet(p) && ch_.may_reach(p); }))
      return false;
    const uint32_t me = ch_.rank();
    const Piece own = ch_.share(job_.recv.of(me, ch_.ranks(), table_));
    if (own.bytes) copy(ex_, own.data, ch_.share(job_.send.of(me, ch_.ranks(), table_)).data, own.bytes);
    if (!get_small()) return false;
    for (size_t k = 0; k < sends_ || k < receives_ + 1; ++k) {
      if (k < sends_ && !put_chunk(k)) return false;
      if (k >= 1 && k - 1 < receives_ && !get_chunk(k - 1)) return false;
    }
    ch_.leave(job_, /*all_met=*/job_.root < 0);
    return true;
  }

 private:
  NVX_HD bool is_small(const Piece& whole) const { return ch_.is_in_packets(job_, whole); }
  /// A receiver that this rank has not met.
  NVX_HD bool is_unmet(uint32_t p) const {
    return partners_.sends_to(p) && !partners_.receives_from(p) && !ch_.has_met(p);
  }
  /// The part for a peer that is sent in chunks, and the part from it that is received in chunks.
  NVX_HD Piece send(uint32_t p) const {
    const Piece whole = job_.send.of(p, ch_.ranks(), table_);
    return partners_.sends_to(p) && !is_small(whole) ? ch_.share(whole) : Piece{};
  }
  NVX_HD Piece recv(uint32_t p) const {
    const Piece whole = job_.recv.of(p, ch_.ranks(), table_);
    return partners_.receives_from(p) && !is_small(whole) ? ch_.share(whole) : Piece{};
  }
  /// Whether chunk k is posted. Every chunk is, except that a directly written piece is posted only with its last
  /// chunk.
  NVX_HD bool is_posted(const Piece& piece, size_t k, bool direct) const {
    const size_t most = ch_.shape().chunk_bytes;
    return k * most < piece.bytes && (!direct || piece.bytes <= (k + 1) * most);
  }

  NVX_HD void put_small() {
    for (uint32_t i = 0; i < ch_.others(); ++i) {
      const uint32_t p = ch_.other(i);
      const Piece whole = job_.send.of(p, ch_.ranks(), table_), piece = ch_.share(whole);
      if (partners_.sends_to(p) && is_small(whole))
        put_packets(ex_, ch_.packets_to(p), piece.data, piece.bytes, ch_.stamp32());
    }
  }

  NVX_HD bool get_small() {
    if (job_.algorithm != DeviceAlgorithm::kExchangePieces) return true;
    bool ok = true;
    for (uint32_t i = 0; ok && i < ch_.others(); ++i) {
      const uint32_t p = ch_.other(i);
      const Piece whole = job_.recv.of(p, ch_.ranks(), table_), piece = ch_.share(whole);
      if (partners_.receives_from(p) && is_small(whole))
        ok = get_packets(ex_, piece.data, ch_.packets_from(p), piece.bytes, ch_.stamp32(), int(p));
    }
    return ex_.all(ok);
  }

  NVX_HD bool put_chunk(size_t k) {
    const auto whom = [&](uint32_t p) { return is_posted(send(p), k, ch_.writes_to(p)); };
    // A rank that called another operation would never make space.
    const auto unmet = [&](uint32_t p) { return is_unmet(p) && ch_.chunk_of(send(p), k).bytes != 0; };
    if (k == kChunks && !ch_.meet(job_, /*pairwise=*/false, table_, unmet)) return false;
    if (!ch_.await_room(whom)) return false;
    for (uint32_t i = 0; i < ch_.others(); ++i) {
      const uint32_t p = ch_.other(i);
      const Piece piece = ch_.chunk_of(send(p), k);
      if (piece.bytes) copy(ex_, ch_.target(p, k * ch_.shape().chunk_bytes), piece.data, piece.bytes);
    }
    ch_.post(whom);
    return true;
  }

  NVX_HD bool get_chunk(size_t k) {
    const auto whom = [&](uint32_t p) { return is_posted(recv(p), k, ch_.is_written_by(p)); };
    if (!ch_.await_chunks(whom)) return false;
    for (uint32_t i = 0; i < ch_.others(); ++i) {
      const uint32_t p = ch_.other(i);
      const Piece piece = ch_.chunk_of(recv(p), k);
      if (piece.bytes && !ch_.is_written_by(p)) copy(ex_, piece.data, ch_.chunk_from(p), piece.bytes);
    }
    ch_.release(whom);
    return true;
  }

  Exec& ex_;
  Channel& ch_;
  const Job& job_;
  PieceTable table_;
  const Partners partners_;
  size_t sends_ = 0, receives_ = 0;  // chunks of the longest piece
};

/// Copies a block's share of this rank's own pieces, after the host has raised a counter. A kernel copies between host
/// and device memory here. A stream's copy behind a waiting kernel could occupy a copy engine that the awaited work
/// needs.
template <class Exec, class Channel>
NVX_NOINLINE bool move_own(Exec& ex, Channel& ch, const Job& job, PieceTable table) {
  if (!ch.enter(job, /*pairwise=*/false, table)) return false;
  if (!ch.await_host(job.awaited, job.awaits)) return false;
  for (uint32_t i = 0; i < job.recv.owns(); ++i) {
    const Piece to = ch.share(table[job.recv.index + i]);
    copy(ex, to.data, ch.share(table[job.send.index + i]).data, to.bytes);
  }
  ch.leave(job, /*all_met=*/false);
  return true;
}

/// Runs one operation of this block to its end. On false, the verdict is recorded, and nothing more may run on the
/// channel.
template <class Exec, class Channel>
NVX_HD bool run_reducing(Exec& ex, Channel& ch, const Job& job, PieceTable table) {
  switch (job.algorithm) {
    case DeviceAlgorithm::kReducePackets: return reduce_packets(ex, ch, job, table);
    case DeviceAlgorithm::kReducePacketsTwoShot: return reduce_packets_two_shot(ex, ch, job, table);
    case DeviceAlgorithm::kReduceChunks: return ReduceChunks(ex, ch, job, table).run();
    default: return false;
  }
}

template <class Exec, class Channel>
NVX_HD bool run_exchanging(Exec& ex, Channel& ch, const Job& job, PieceTable table) {
  switch (job.algorithm) {
    case DeviceAlgorithm::kExchangePackets: return exchange_packets(ex, ch, job, table);
    case DeviceAlgorithm::kExchangeChunks:
    case DeviceAlgorithm::kExchangePieces: return ExchangeChunks(ex, ch, job, table).run();
    case DeviceAlgorithm::kMoveOwn: return move_own(ex, ch, job, table);
    default: return false;
  }
}

template <class Exec, class Channel>
NVX_HD bool run_device_collective(Exec& ex, Channel& ch, const Job& job, PieceTable table) {
  return reduces(job.algorithm) ? run_reducing(ex, ch, job, table) : run_exchanging(ex, ch, job, table);
}

/// One lane's work in a launch: runs the operations of a rank in order with `run`, which is run_device_collective() or
/// a part of it. Returns whether all of them succeeded.
template <class Rules, class Machine, class Run>
NVX_HD bool run_jobs(const Machine& machine, const DeviceChannel& channel, const Job* jobs, uint32_t count,
                     PieceTable table, Run run) {
  for (uint32_t i = 0; i < count; ++i) {
    auto* rank = reinterpret_cast<RankState*>(channel.state + DeviceState::rank());
    TileExec<Machine> ex(machine, rank, channel.control, jobs[i].patience_ns, jobs[i].call);
    PushChannel<TileExec<Machine>, Rules> ch(ex, channel);
    if (!run(ex, ch, jobs[i], table)) {
      ch.give_up();
      return false;
    }
    if (i + 1 == count) ch.retire(count);
  }
  return true;
}

}  // namespace nvx::kernel
