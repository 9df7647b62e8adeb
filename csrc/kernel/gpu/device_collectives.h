#pragma once

#include <cstddef>
#include <cstdint>

#include "kernel/gpu/push_channel.h"
#include "kernel/gpu/reduce_any.h"

/// The collectives inside a host for memory that is far from its reader, as between GPUs: all data is pushed to its
/// reader, which waits for it locally. There are two primitives: packets, which carry their own stamps, for small data;
/// chunks and counters for large data. The contract and the results are those of kernel/cpu/host_collectives.h, bit for
/// bit.
///
/// Every block does its share of every piece and is independent of the other blocks. All lanes of a tile take the same
/// path: a failure of one lane ends the tile. Between PushChannel::enter() and leave(), which run_jobs() calls.
///
/// Each algorithm is compiled twice: for any operation, distinguished at run time, and for the hot ones (HotOperation).
/// The results and everything that peers see are the same.
namespace nvx::kernel {

/// A pack of a peer's piece. Whole: it can be read in one access.
struct InPackets {
  uint32_t peer, pack;
  bool is_there, is_whole;
  const std::byte* from;
  size_t bytes;  ///< up to the end of the piece
};

/// The units in which a kernel accesses tensors at unaligned addresses.
template <class Kind>
struct UnitOf {
  using Type = void;
};
template <DeviceAlgorithm kAlgorithm, class T>
struct UnitOf<HotOperation<kAlgorithm, T>> {
  using Type = std::conditional_t<std::is_void_v<T>, uint8_t, T>;
};

/// Sends the pieces as packets. A lane has several packs in flight, of any peers.
template <class Kind, class Exec, class Channel>
NVX_HD void put_packets(const Exec& ex, Channel& ch, const Job& job) {
  using Unit = typename UnitOf<Kind>::Type;
  constexpr int kAtOnce = Kind::kHot ? 4 : 1;
  part<Kind::kHot>([&] {
    uint32_t most = 0;
    for (uint32_t p = 0; p < ch.ranks(); ++p) most = ch.peers()[p].packs_to > most ? ch.peers()[p].packs_to : most;
    const PacksInPackets packs(ch.ranks(), most);
    NVX_NO_UNROLL
    for (uint32_t first = uint32_t(ex.lane()); most != 0 && first < packs.count();
         first += kAtOnce * uint32_t(ex.lanes())) {
      Pack data[kAtOnce] = {};
      bool is_unaligned = false;
      const auto at = [&](int j) {
        const uint32_t n = first + uint32_t(j) * uint32_t(ex.lanes()), i = packs.pack(n);
        const uint32_t p = n < packs.count() ? ch.after(packs.rank(n)) : ch.rank();
        const Piece& piece = ch.peers()[p].send;
        const bool is_there = n < packs.count() && i < ch.peers()[p].packs_to && ch.sends_to(job, p);
        const size_t begin = i * sizeof(Pack);
        const bool is_whole = is_there && is_readable_pack(piece.data, piece.bytes - begin);
        return InPackets{p, i, is_there, is_whole, offset(piece.data, begin), piece.bytes - begin};
      };
      NVX_UNROLL
      for (int j = 0; j < kAtOnce; ++j) {
        const InPackets one = at(j);
        if (one.is_whole) data[j] = *reinterpret_cast<const Pack*>(one.from);
        is_unaligned |= one.is_there & !one.is_whole;
      }
      NVX_UNROLL
      for (int j = 0; j < kAtOnce; ++j) {
        const InPackets one = at(j);
        if (one.is_whole) put_pack(ex, ch.packets_to(one.peer), one.pack, data[j], ch.stamp32());
      }
      NVX_NO_UNROLL
      for (int j = 0; is_unaligned && j < kAtOnce; ++j) {
        const InPackets one = at(j);
        if (one.is_there && !one.is_whole)
          put_pack(ex, ch.packets_to(one.peer), one.pack, load_pack<Unit>(one.from, one.bytes), ch.stamp32());
      }
    }
  });
}

/// Receives the pieces from packets, which begin at `first` of a peer's. `ok`: whether this lane has been successful so
/// far. Returns whether all lanes have been.
template <class Kind, class Exec, class Channel>
NVX_HD bool get_packets(Exec& ex, Channel& ch, const Job& job, uint32_t first, bool ok = true) {
  using Unit = typename UnitOf<Kind>::Type;
  return part<Kind::kHot>([&] {
    uint32_t most = 0;
    for (uint32_t p = 0; p < ch.ranks(); ++p) most = ch.peers()[p].packs_from > most ? ch.peers()[p].packs_from : most;
    const PacksInPackets packs(ch.ranks(), most);
    NVX_NO_UNROLL
    for (uint32_t n = uint32_t(ex.lane()); ok && most != 0 && n < packs.count(); n += uint32_t(ex.lanes())) {
      const uint32_t p = ch.after(packs.rank(n)), i = packs.pack(n);
      if (p == ch.rank() || i >= ch.peers()[p].packs_from || !ch.receives_from(job, p)) continue;
      const Packet* const from = ch.packets_from(p);
      Pack pack;
      PendingWait pending{int(p), ch.stamp32(), 0};
      ok = ex.wait(pending, [&] { return peek_pack(ex, from, first + i, ch.stamp32(), &pack, &pending.seen); });
      const Piece& piece = ch.peers()[p].recv;
      if (ok) store_pack<Unit>(piece.data + i * sizeof(Pack), pack, piece.bytes - i * sizeof(Pack));
    }
    return ex.all(ok);
  });
}

/// The result is this lane's alone.
template <class Kind, class Exec>
NVX_HD bool reduce_as(Exec& ex, const Job& job, const Reduction& f) {
  if constexpr (Kind::kHot) {
    // A pack in packets takes twice the registers until it has arrived, and float16 many instructions to widen.
    constexpr int kAhead = Kind::kHasChunks && !kSame<typename Kind::Element, F16> ? 8 : 4;
    return reduce_hot<typename Kind::Element, kAhead>(ex, f);
  } else {
    return reduce(ex, job.fingerprint.dtype, f);
  }
}

/// Meets the peers and reduces the packets of all ranks; `second`: see Reduction. *ok: whether this lane has been
/// successful. Returns false on all lanes if the tile has failed.
template <class Kind, class Exec, class Channel>
NVX_HD bool meet_and_reduce(Exec& ex, Channel& ch, const Job& job, uint32_t second, bool* ok) {
  const Reduction f = ch.reduction(job, /*in_packets=*/true, second, ch.me().recv);
  if constexpr (Kind::kGathers) {
    const PacksInPackets packs(ch.ranks(), uint32_t(ceil_div(f.bytes, sizeof(Pack))));
    if (can_gather(ex, packs)) {
      if (!ch.meet(job, [&] { return gather_packs(ex, f, packs, ch.gathered()); })) return false;
      reduce_gathered<typename Kind::Element>(ex, f, packs, ch.gathered());
      return true;
    }
  }
  if (!ch.meet(job)) return false;
  *ok = reduce_as<Kind>(ex, job, f);
  return true;
}

/// One step: each rank sends its data to every reader, and the readers reduce in rank order. For all_reduce, reduce,
/// and reduce_scatter, in which each rank is sent only its own piece.
template <class Kind, class Exec, class Channel>
NVX_HD bool reduce_packets(Exec& ex, Channel& ch, const Job& job) {
  put_packets<Kind>(ex, ch, job);
  if (!ch.sends_to(job, ch.rank())) return true;
  bool ok = true;
  return meet_and_reduce<Kind>(ex, ch, job, /*second=*/0, &ok) && ex.all(ok);
}

/// all_reduce in two steps of packets: every rank reduces one slice and sends the result to all. Half of the packets
/// are for each step.
template <class Kind, class Exec, class Channel>
NVX_HD bool reduce_packets_two_shot(Exec& ex, Channel& ch, const Job& job) {
  const uint32_t second = ch.shape().packs() / 2;
  put_packets<Kind>(ex, ch, job);
  bool ok = true;
  return meet_and_reduce<Kind>(ex, ch, job, second, &ok) && get_packets<Kind>(ex, ch, job, second, ok);
}

/// For each chunk: send the other ranks their slices of this rank's input; reduce this rank's slice of all inputs and
/// send the sum on; store the sums from the others. The three stages run one chunk behind each other, all in one round:
/// a round waits once, for what the peers have published in their rounds before, and publishes once. Then four slots
/// are enough: at the start of round k a rank has sent 2k - 1 chunks, and a peer that has ended round k - 1 has
/// returned 2k - 3 of them. all_reduce sends sums to all ranks, reduce to the root, reduce_scatter to none. Inputs
/// that the reader has mapped are read in place, and sums are written directly to results that the writer has mapped.
/// Input and result may be the same memory even then: only rank p reads slice p, and a lane writes a pack of that slice
/// after it has read it from all ranks.
template <class Kind, class Exec, class Channel>
NVX_HD bool reduce_chunks(Exec& ex, Channel& ch, const Job& job) {
  using Unit = typename UnitOf<Kind>::Type;
  constexpr int kAtOnce = Kind::kHot ? 8 : 2;
  const int32_t root = Kind::root(job);
  const uint32_t me = ch.rank();
  const auto is_root = [&](uint32_t p) { return root >= 0 && uint32_t(root) == p; };
  const bool passes_on = job.fingerprint.collective != Collective::kReduceScatter;
  const bool has_result = root < 0 || is_root(me), gathers = passes_on && has_result;
  const size_t chunk = ch.shape().chunk_bytes;
  size_t most = 0;
  NVX_NO_UNROLL
  for (uint32_t p = 0; p < ch.ranks(); ++p) most = ch.peers()[p].send.bytes > most ? ch.peers()[p].send.bytes : most;
  if (!ch.meet(job)) return false;
  NVX_NO_UNROLL
  for (size_t k = 0; most != 0 && k * chunk < most + (passes_on ? 2 : 1) * chunk; ++k) {
    const Piece mine = k >= 1 ? ch.chunk_of(ch.me().send, k - 1) : Piece{};
    const size_t at = k >= 1 ? (k - 1) * chunk : 0;
    const auto plan = [&](uint32_t p, Peer& peer) {
      const Piece out = p != me ? ch.chunk_of(peer.send, k) : Piece{};
      const Piece back = k >= 2 && gathers && p != me ? ch.chunk_of(peer.recv, k - 2) : Piece{};
      const bool sums = mine.bytes != 0, passes = sums && passes_on && p != me && (root < 0 || is_root(p));
      const bool takes = sums && p != me;
      Peer& copies = ch.copies(p);
      copies.put = Copy::of(out.data, ch.slot_to(p, 0), peer.is_read ? 0 : out.bytes);
      peer.source = p == me ? mine.data : peer.in ? peer.in + at : ch.slot_from(p, 0);
      peer.sum = passes ? peer.out ? peer.out + at : ch.slot_to(p, out.bytes != 0) : nullptr;
      if (p == me && sums && has_result) peer.sum = ch.chunk_of(peer.recv, k - 1).data;
      // Odd addresses and lengths: a lane copies its packs to this rank's own slot, and then reads them there.
      if (p == me && !has_packs(mine.data, mine.bytes))
        copies.put = Copy::of(mine.data, ch.slot_to(p, 0), mine.bytes), peer.source = ch.slot_to(p, 0);
      copies.get = Copy::of(ch.slot_from(p, takes), back.data, peer.is_written ? 0 : back.bytes);
      peer.posts = uint32_t(out.bytes != 0) + passes;
      peer.takes = uint32_t(takes) + (back.bytes != 0);
    };
    if (!ch.await(plan)) return false;
    bool ok = true;
    NVX_NO_UNROLL  // one inlined copy of copy_all() for both directions
        for (uint32_t gets = 0; gets <= uint32_t(k >= 2 && gathers); ++gets) {
      copy_all<Unit, kAtOnce>(ex, ch.peers(), gets ? &Peer::get : &Peer::put, ch.ranks());
      if (gets == 0 && mine.bytes != 0)
        ok = reduce_as<Kind>(ex, job, ch.reduction(job, /*in_packets=*/false, /*second=*/0, {nullptr, mine.bytes}));
    }
    if (!ch.publish(ok)) return false;
  }
  return ch.await_readers();
}

/// Sends each piece to its receiver as packets.
template <class Kind, class Exec, class Channel>
NVX_HD bool exchange_packets(Exec& ex, Channel& ch, const Job& job) {
  put_packets<Kind>(ex, ch, job);
  if (!ch.meet(job)) return false;
  copy<typename UnitOf<Kind>::Type>(ex, Copy::of(ch.me().send.data, ch.me().recv.data, ch.me().recv.bytes));
  return get_packets<Kind>(ex, ch, job, 0);
}

/// Sends each piece to its receiver in chunks; a chunk is read while the next one is written. In kExchangePieces,
/// pieces that fit use packets: both ranks of a pair know the length of the piece and compare it before they use its
/// data. A sender that has mapped the receiver's result writes there, and posts once, when the whole piece is written.
/// To do so it must meet the receiver first; so in a collective with a root, a piece that fits the slots uses them.
template <class Kind, class Exec, class Channel>
NVX_HD bool exchange_chunks(Exec& ex, Channel& ch, const Job& job) {
  using Unit = typename UnitOf<Kind>::Type;
  constexpr int kAtOnce = Kind::kHot ? 8 : 2;
  const uint32_t me = ch.rank();
  const size_t chunk = ch.shape().chunk_bytes;
  // The part of a share that is sent or received in chunks.
  const auto out_of = [&](uint32_t p) {
    return ch.sends_to(job, p) && ch.peers()[p].packs_to == 0 ? ch.peers()[p].send : Piece{};
  };
  const auto in_of = [&](uint32_t p) {
    return p != me && ch.receives_from(job, p) && ch.peers()[p].packs_from == 0 ? ch.peers()[p].recv : Piece{};
  };
  // Every chunk is posted, except that a directly written piece is posted only with its last chunk.
  const auto is_posted = [&](const Piece& piece, size_t k, bool direct) {
    return k * chunk < piece.bytes && (!direct || piece.bytes <= (k + 1) * chunk);
  };
  size_t puts = ch.me().recv.bytes, gets = 0;
  NVX_NO_UNROLL
  for (uint32_t p = 0; p < ch.ranks(); ++p) {
    const size_t out = out_of(p).bytes, in = in_of(p).bytes;
    puts = out > puts ? out : puts, gets = in > gets ? in : gets;
  }
  if (Kind::has_pieces(job)) put_packets<Kind>(ex, ch, job);
  if (!ch.meet(job)) return false;
  if (Kind::has_pieces(job) && !get_packets<Kind>(ex, ch, job, 0)) return false;
  NVX_NO_UNROLL
  for (size_t k = 0; k * chunk < puts || (gets != 0 && k * chunk < gets + chunk); ++k) {
    const auto plan = [&](uint32_t p, Peer& peer) {
      const Piece out = ch.chunk_of(out_of(p), k), in = k >= 1 ? ch.chunk_of(in_of(p), k - 1) : Piece{};
      const bool writes = peer.out != nullptr;
      Peer& copies = ch.copies(p);
      copies.put = Copy::of(out.data, writes ? peer.out + k * chunk : ch.slot_to(p, 0), out.bytes);
      copies.get = Copy::of(ch.slot_from(p, 0), in.data, peer.is_written ? 0 : in.bytes);
      peer.posts = is_posted(out_of(p), k, writes);
      peer.takes = k >= 1 && is_posted(in_of(p), k - 1, peer.is_written);
      if (p != me) return;
      const Piece own = ch.chunk_of(peer.recv, k);
      if (own.bytes != 0) copies.put = Copy::of(peer.send.data + k * chunk, own.data, own.bytes);
    };
    if (!ch.await(plan)) return false;
    NVX_NO_UNROLL
    for (uint32_t gets = 0; gets < 2; ++gets)
      copy_all<Unit, kAtOnce>(ex, ch.peers(), gets ? &Peer::get : &Peer::put, ch.ranks());
    if (!ch.publish(true)) return false;
  }
  return true;
}

/// Copies a block's share of this rank's own pieces, after the host has raised a counter. A kernel copies between host
/// and device memory here. A stream's copy behind a waiting kernel could occupy a copy engine that the awaited work
/// needs.
template <class Exec, class Channel>
NVX_HD bool move_own(Exec& ex, Channel& ch, const Job& job, PieceTable table) {
  if (!ch.await_host(job.awaited, job.awaits)) return false;
  for (uint32_t i = 0; i < job.recv.owns(); ++i) {
    const Piece to = ch.share(table[job.recv.index + i]);
    copy<void>(ex, Copy::of(ch.share(table[job.send.index + i]).data, to.data, to.bytes));
  }
  return true;
}

/// Runs one operation of this block to its end. On false, the verdict is recorded, and nothing more may run on the
/// channel.
template <class Exec, class Channel>
NVX_HD bool run_device_collective(Exec& ex, Channel& ch, const Job& job, PieceTable table) {
  switch (job.algorithm) {
    case DeviceAlgorithm::kReducePackets: return reduce_packets<AnyOperation>(ex, ch, job);
    case DeviceAlgorithm::kReducePacketsTwoShot: return reduce_packets_two_shot<AnyOperation>(ex, ch, job);
    case DeviceAlgorithm::kReduceChunks: return reduce_chunks<AnyOperation>(ex, ch, job);
    case DeviceAlgorithm::kExchangePackets: return exchange_packets<AnyOperation>(ex, ch, job);
    case DeviceAlgorithm::kExchangeChunks:
    case DeviceAlgorithm::kExchangePieces: return exchange_chunks<AnyOperation>(ex, ch, job);
    case DeviceAlgorithm::kMoveOwn: return move_own(ex, ch, job, table);
    case DeviceAlgorithm::kReduceMulticast: break;
  }
  return false;
}

template <class Exec, class Channel, DeviceAlgorithm kAlgorithm, class T>
NVX_HD bool run_hot(Exec& ex, Channel& ch, const Job& job, HotOperation<kAlgorithm, T>) {
  using Kind = HotOperation<kAlgorithm, T>;
  if constexpr (kAlgorithm == DeviceAlgorithm::kReducePackets) return reduce_packets<Kind>(ex, ch, job);
  if constexpr (kAlgorithm == DeviceAlgorithm::kReducePacketsTwoShot) return reduce_packets_two_shot<Kind>(ex, ch, job);
  if constexpr (kAlgorithm == DeviceAlgorithm::kReduceChunks) return reduce_chunks<Kind>(ex, ch, job);
  if constexpr (kAlgorithm == DeviceAlgorithm::kExchangePackets) return exchange_packets<Kind>(ex, ch, job);
  if constexpr (kAlgorithm == DeviceAlgorithm::kExchangeChunks || kAlgorithm == DeviceAlgorithm::kExchangePieces)
    return exchange_chunks<Kind>(ex, ch, job);
}

/// The hot operations: calls what(HotOperation) with the one that the job is, and returns whether it is one. A launch
/// with a completion counter is not: its blocks must agree on when that is.
template <class What>
bool with_hot_operation(const DeviceChannel& channel, const Job& job, PieceTable table, What what) {
  using enum DeviceAlgorithm;
  if (channel.completion || job.root >= 0) return false;
  const auto as = [&]<DeviceAlgorithm kAlgorithm, class T = void>() {
    what(HotOperation<kAlgorithm, T>());
    return true;
  };
  const auto reduced = [&]<DeviceAlgorithm kAlgorithm>() {
    const ReduceOp op = job.fingerprint.op;
    if (op != ReduceOp::kSum && op != ReduceOp::kAvg) return false;
    for (const Pieces& pieces : {job.send, job.recv}) {
      if (!are_aligned(pieces, channel.shape.ranks, table, size_of(job.fingerprint.dtype))) return false;
    }
    switch (job.fingerprint.dtype) {
      case DType::kF32: return as.template operator()<kAlgorithm, float>();
      case DType::kBF16: return as.template operator()<kAlgorithm, BF16>();
      case DType::kF16: return as.template operator()<kAlgorithm, F16>();
      default: return false;
    }
  };
  switch (job.algorithm) {
    case kReducePackets: return reduced.template operator()<kReducePackets>();
    case kReducePacketsTwoShot: return reduced.template operator()<kReducePacketsTwoShot>();
    case kReduceChunks: return reduced.template operator()<kReduceChunks>();
    case kExchangePackets: return as.template operator()<kExchangePackets>();
    case kExchangeChunks: return as.template operator()<kExchangeChunks>();
    case kExchangePieces: return as.template operator()<kExchangePieces>();
    case kMoveOwn:
    case kReduceMulticast: return false;
  }
  return false;
}

/// One lane's work in a launch: runs the operations of a rank in order with `run`, which is run_device_collective() or
/// a part of it. `peers`: memory that the lanes of the tile share, for all ranks. Returns whether all of them
/// succeeded.
template <class Rules, class Kind = AnyOperation, class Machine, class Run>
NVX_HD bool run_jobs(const Machine& machine, const DeviceChannel& channel, Peer* peers, const Job* jobs, uint32_t count,
                     PieceTable table, Run run) {
  for (uint32_t i = 0; i < count; ++i) {
    const Job& job = jobs[i];
    auto* rank = reinterpret_cast<RankState*>(channel.state + DeviceState::rank());
    TileExec<Machine> ex(machine, rank, channel.control, job.timeout_ns, job.call);
    PushChannel<TileExec<Machine>, Rules, Kind> ch(ex, channel, peers);
    if (!ch.enter(job, table) || !run(ex, ch, job, table)) {
      ch.give_up();
      return false;
    }
    // In these, every rank has met every other one.
    const bool all_met = Kind::kHot || job.algorithm == DeviceAlgorithm::kReduceChunks ||
                         (job.root < 0 && job.algorithm != DeviceAlgorithm::kMoveOwn);
    ch.leave(job, all_met);
    if (i + 1 == count) ch.retire(count);
  }
  return true;
}

}  // namespace nvx::kernel
