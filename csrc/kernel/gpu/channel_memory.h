#pragma once

#include <cstddef>
#include <cstdint>

#include "kernel/gpu/job.h"
#include "kernel/gpu/packs.h"

namespace nvx::kernel {

/// The places in memory of one block of a channel: its cells in the pads, and the rank's own state. Each lane has its
/// own object.
class ChannelMemory {
 public:
  /// The numbers are those of PushRules.
  NVX_HD ChannelMemory(const DeviceChannel& at, Peer* peers, uint32_t block, uint32_t slots, uint32_t stamp_mask)
      : at_(at), peers_(peers), ranks_(at.shape.ranks), block_(block), slots_(slots), stamp_mask_(stamp_mask) {}

  NVX_HD uint32_t rank() const { return at_.rank; }
  NVX_HD uint32_t ranks() const { return ranks_; }
  NVX_HD uint32_t stamp32() const { return epoch_ & stamp_mask_; }
  NVX_HD const DeviceShape& shape() const { return at_.shape; }
  NVX_HD const Divisor& by_ranks() const { return at_.by_ranks; }
  /// Valid after enter(). Conclusions from arrivals are valid after meet().
  NVX_HD Peer* peers() const { return in_block(peers_); }
  NVX_HD Peer& me() const { return peers_[rank()]; }
  /// The i-th rank after this one. Each rank begins there, so that not all ranks access the same pad at once.
  NVX_HD uint32_t after(uint32_t i) const { return rank() + i < ranks_ ? rank() + i : rank() + i - ranks_; }

  /// Where a round's copies for and from a rank are: by their order, so that this rank begins with the one after it.
  NVX_HD Peer& copies(uint32_t p) const { return peers_[p > rank() ? p - rank() - 1 : p + ranks_ - rank() - 1]; }

  /// Shared memory for gather_packs(), behind the peers' states.
  NVX_HD Pack* gathered() const { return in_block(reinterpret_cast<Pack*>(peers_ + ranks_)); }

  /// This block's share of a piece.
  NVX_HD Piece share(const Piece& piece) const { return Pieces::slice(piece, block_, at_.by_blocks); }
  /// Chunk k of such a share; empty beyond its end.
  NVX_HD Piece chunk_of(const Piece& piece, size_t k) const {
    const size_t most = at_.shape.chunk_bytes, at = k * most;
    if (at >= piece.bytes) return Piece{};
    return Piece{piece.data + at, piece.bytes - at < most ? piece.bytes - at : most};
  }

  /// The packets of this epoch: to write for `to`, and to read from `from`.
  NVX_HD Packet* packets_to(uint32_t to) const { return cell_to<Packet>(packets(), to); }
  NVX_HD const Packet* packets_from(uint32_t from) const { return cell_from<Packet>(packets(), from); }
  /// The slot of the i-th chunk from now on that this rank writes for a peer, or reads from it.
  NVX_HD std::byte* slot_to(uint32_t to, uint32_t i) const {
    return cell_to<std::byte>(Part::kStaging, to) + size_t((peers_[to].sent + i) % kChunks) * at_.shape.chunk_bytes;
  }
  NVX_HD const std::byte* slot_from(uint32_t from, uint32_t i) const {
    return cell_from<std::byte>(Part::kStaging, from) +
           size_t((peers_[from].taken + i) % kChunks) * at_.shape.chunk_bytes;
  }

  NVX_HD uint32_t slot() const { return epoch_ % slots_; }
  NVX_HD Part packets() const { return DevicePad::of(Part::kPackets, slot()); }
  NVX_HD Part arrivals() const { return DevicePad::of(Part::kArrivals, slot()); }

  NVX_HD Packet* arrivals_to(uint32_t to) const { return cell_to<Packet>(arrivals(), to); }
  NVX_HD const Packet* arrivals_from(uint32_t from) const { return cell_from<Packet>(arrivals(), from); }
  NVX_HD PeerCounters& counters_at(uint32_t to) const { return *cell_to<PeerCounters>(Part::kCounters, to); }
  NVX_HD const PeerCounters& counters_from(uint32_t from) const {
    return *cell_from<PeerCounters>(Part::kCounters, from);
  }
  NVX_HD BlockState& own() const {
    return *reinterpret_cast<BlockState*>(at_.state + DeviceState{at_.shape}.blocks() + block_ * sizeof(BlockState));
  }
  NVX_HD PipeState& pipe(uint32_t peer) const {
    return *reinterpret_cast<PipeState*>(at_.state + DeviceState{at_.shape}.pipe(block_, peer));
  }
  /// The reduction of a share: of the packets of all ranks, whose sums are sent on from packet `second` on, if it is
  /// not 0; or of a round's chunks.
  NVX_HD Reduction reduction(const Job& job, bool in_packets, uint32_t second, const Piece& out) const {
    const Factors factors{job.factor, int(rank()), at_.offset(arrivals(), block_, 0), at_.cells[size_t(arrivals())]};
    return {peers_,
            ranks_,
            rank(),
            in_packets,
            at_.offset(packets(), block_, 0),
            at_.cells[size_t(packets())],
            stamp32(),
            at_.offset(packets(), block_, rank()),
            second,
            out.bytes,
            out.data,
            factors,
            job.fingerprint.op};
  }

  /// Gives every packet that this block can write in this epoch the stamp of the one before, for which its buffer never
  /// waits. This epoch was entered, so every peer is done with epoch - kBuffers: `last_met` is set to that, so that it
  /// never falls half its range behind.
  template <class Lane>
  NVX_HD void restamp(const Lane& lane) {
    NVX_NO_UNROLL
    for (uint32_t p = uint32_t(lane.lane()); p < ranks_; p += uint32_t(lane.lanes())) {
      if (int32_t(pipe(p).last_met - (epoch_ - kBuffers)) < 0) pipe(p).last_met = epoch_ - kBuffers;
    }
    const Packet stale = packet_of(0, (epoch_ - 1) & stamp_mask_);
    for (uint32_t p = 0; p < ranks_; ++p) {
      NVX_NO_UNROLL
      for (uint32_t j = uint32_t(lane.lane()); j < kArrivalPackets; j += uint32_t(lane.lanes()))
        lane.put_packet(arrivals_to(p) + j, stale);
      NVX_NO_UNROLL
      for (uint32_t j = uint32_t(lane.lane()); j < DevicePad{at_.shape}.packets(); j += uint32_t(lane.lanes()))
        lane.put_packet(packets_to(p) + j, stale);
    }
  }

 protected:
  /// This block's cell of a part: in a peer's pad, which this rank writes, and in this rank's, which the peer writes.
  template <class T>
  NVX_HD T* cell_to(Part part, uint32_t to) const {
    return reinterpret_cast<T*>(peers_[to].theirs + at_.offset(part, block_, rank()));
  }
  template <class T>
  NVX_HD const T* cell_from(Part part, uint32_t from) const {
    return reinterpret_cast<const T*>(peers_[from].mine + at_.offset(part, block_, from));
  }

  const DeviceChannel& at_;
  Peer* peers_;
  uint32_t ranks_;
  uint32_t block_;
  uint32_t slots_;
  uint32_t stamp_mask_;
  uint32_t epoch_ = 0;
};

}  // namespace nvx::kernel
