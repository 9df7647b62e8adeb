#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "kernel/exec.h"
#include "kernel/gpu/device_pad.h"
#include "kernel/piece.h"
#include "kernel/reduce/reduce.h"

/// The memory operations of a tile, one 16-byte pack per lane at a time: copies, and reductions of peers' chunks or
/// packets. User pointers may have any alignment; data in pads is aligned and padded to whole packs.
namespace nvx::kernel {

template <class Word>
struct [[gnu::may_alias]] Aliased {
  Word word;
};

NVX_HD inline bool is_aligned(const void* at) { return reinterpret_cast<uintptr_t>(at) % sizeof(Pack) == 0; }
/// Whether the pack at `at`, in a piece that ends after `bytes`, can be read in one access. Nobody uses bytes behind
/// the end.
NVX_HD inline bool is_readable_pack(const void* at, size_t bytes) {
  return is_aligned(at) && (kReadsBehindEnd || bytes >= sizeof(Pack));
}
/// Whether a piece can be read as packs in place.
NVX_HD inline bool has_packs(const void* at, size_t bytes) {
  return (reinterpret_cast<uintptr_t>(at) | bytes) % sizeof(Pack) == 0;
}

/// The pack at any address of which only the first `bytes` bytes exist, in units that divide both. Bytes beyond them
/// are not accessed.
template <class Unit>
NVX_HD Pack load_units(const std::byte* from, size_t bytes) {
  constexpr size_t kUnits = sizeof(Pack) / sizeof(Unit);
  struct Units {
    Unit at[kUnits];
  } units{};
  NVX_UNROLL
  for (size_t i = 0; i < kUnits; ++i) {
    if (i * sizeof(Unit) < bytes) units.at[i] = reinterpret_cast<const Aliased<Unit>*>(from)[i].word;
  }
  return __builtin_bit_cast(Pack, units);
}
template <class Unit>
NVX_HD void store_units(std::byte* to, const Pack& pack, size_t bytes) {
  constexpr size_t kUnits = sizeof(Pack) / sizeof(Unit);
  struct Units {
    Unit at[kUnits];
  };
  const Units units = __builtin_bit_cast(Units, pack);
  NVX_UNROLL
  for (size_t i = 0; i < kUnits; ++i) {
    if (i * sizeof(Unit) < bytes) reinterpret_cast<Aliased<Unit>*>(to)[i].word = units.at[i];
  }
}

NVX_NOINLINE inline Pack load_unaligned(const std::byte* from, size_t bytes) {
  const auto address = reinterpret_cast<uintptr_t>(from);
  if (bytes >= sizeof(Pack) && address % 8 == 0) return load_units<uint64_t>(from, sizeof(Pack));
  if (bytes >= sizeof(Pack) && address % 4 == 0) return load_units<uint32_t>(from, sizeof(Pack));
  return load_units<uint8_t>(from, bytes);
}
NVX_NOINLINE inline void store_unaligned(std::byte* to, Pack pack, size_t bytes) {
  const auto address = reinterpret_cast<uintptr_t>(to);
  if (bytes >= sizeof(Pack) && address % 8 == 0) return store_units<uint64_t>(to, pack, sizeof(Pack));
  if (bytes >= sizeof(Pack) && address % 4 == 0) return store_units<uint32_t>(to, pack, sizeof(Pack));
  store_units<uint8_t>(to, pack, bytes);
}

/// The pack at `from`, in a piece that ends after `bytes`. Unit: a type whose size
/// divides address and length; void: a call finds one.
template <class Unit>
NVX_HD Pack load_pack(const std::byte* from, size_t bytes) {
  if (is_aligned(from) && bytes >= sizeof(Pack)) return *reinterpret_cast<const Pack*>(from);
  if constexpr (std::is_void_v<Unit>) {
    return load_unaligned(from, bytes);
  } else {
    return load_units<Unit>(from, bytes);
  }
}
template <class Unit>
NVX_HD void store_pack(std::byte* to, const Pack& pack, size_t bytes) {
  if (is_aligned(to) && bytes >= sizeof(Pack)) {
    *reinterpret_cast<Pack*>(to) = pack;
  } else if constexpr (std::is_void_v<Unit>) {
    store_unaligned(to, pack, bytes);
  } else {
    store_units<Unit>(to, pack, bytes);
  }
}

/// Each half of a packet carries four bytes of data, so a pack takes two packets.
NVX_HD inline uint32_t stamp_of(uint64_t half) { return uint32_t(half >> 32); }
NVX_HD inline uint64_t data_of(const Packet& p) { return (p.halves[0] & 0xffffffffu) | p.halves[1] << 32; }
NVX_HD inline bool is_stamped(const Packet& p, uint32_t stamp) {
  return stamp_of(p.halves[0]) == stamp && stamp_of(p.halves[1]) == stamp;
}
NVX_HD inline Packet packet_of(uint64_t data, uint32_t stamp) {
  const uint64_t above = uint64_t(stamp) << 32;
  return {{(data & 0xffffffffu) | above, data >> 32 | above}};
}

/// Sends a pack as packets, and checks whether both packets of a pack have arrived. `pack`: its number in the cell.
template <class Exec>
NVX_HD void put_pack(const Exec& ex, Packet* cell, size_t pack, const Pack& data, uint32_t stamp) {
  Packet* const to = cell + first_packet(pack);
  ex.put_packet(to, packet_of(data.words[0], stamp));
  ex.put_packet(to + kRowPacks, packet_of(data.words[1], stamp));
}
template <class Exec>
NVX_HD bool peek_pack(const Exec& ex, const Packet* cell, size_t pack, uint32_t stamp, Pack* data, Stamp* seen) {
  const Packet* const from = cell + first_packet(pack);
  const Packet first = ex.peek_packet(from), second = ex.peek_packet(from + kRowPacks);
  *data = {{data_of(first), data_of(second)}};
  *seen = stamp_of(second.halves[1]);
  return is_stamped(first, stamp) && is_stamped(second, stamp);
}

/// A copy between ranges that are identical or disjoint.
struct Copy {
  const std::byte* from;
  std::byte* to;
  size_t bytes;
  uint32_t packs;  ///< of these, the whole packs at aligned addresses

  NVX_HD static Copy of(const std::byte* from, std::byte* to, size_t bytes) {
    return {from, to, from == to ? 0 : bytes,
            from == to || !is_aligned(from) || !is_aligned(to) ? 0 : uint32_t(bytes / sizeof(Pack))};
  }
};

/// A block's state of one rank during an operation, in memory that its lanes share. One lane writes it; the others
/// read it after their next sync() or all().
struct alignas(Pack) Peer {
  std::byte* theirs;  ///< see PeerPads
  const std::byte* mine;
  Piece send, recv;               ///< this block's share of the pieces for it and from it
  uint64_t due_to, due_from;      ///< the lengths of these pieces as a whole
  uint32_t packs_to, packs_from;  ///< in packets: packs of this block's share; else 0
  Stamp sent, taken;              ///< see PipeState

  // If pieces may bypass staging. Announced to the peer:
  uint64_t pool;      ///< the address of its pool in this rank
  uint32_t granules;  ///< how much of it this rank has mapped
  // Concluded by both ranks from their arrivals. Addresses are those of this block's share; null means to use
  // staging.
  uint32_t is_written : 1;  ///< the peer writes directly to this rank's result
  uint32_t is_read : 1;     ///< the peer reads this rank's input directly
  std::byte* out;           ///< in the peer's result: the destination of this rank's data
  const std::byte* in;      ///< this rank's slice of the peer's input

  uint64_t place_to, place_from;  ///< of these pieces in this rank's pool; 0: none

  // In a round of chunks. `put` and `get` are of another rank: see PushChannel::copies().
  uint32_t posts, takes;  ///< chunks that this rank writes for the peer, and reads from it
  Copy put, get;
  const std::byte* source;  ///< to reduce
  std::byte* sum;           ///< where this rank stores its sum at the peer; null: it does not
};

/// The packs that a lane gathers, and those that a block of 512 lanes gathers in shared memory, behind its peers'
/// states, if there are few ranks.
inline constexpr uint32_t kGatheredByLane = 2, kMostGathered = kGatheredByLane * 512, kGatheringRanks = 64;
/// The shared memory of a block. `gathers`: of a kernel that may gather packs.
constexpr size_t shared_bytes(uint32_t ranks, bool gathers) {
  return ranks * sizeof(Peer) + (gathers && ranks <= kGatheringRanks ? kMostGathered * sizeof(Pack) : 0);
}
inline constexpr size_t kMostSharedBytes = shared_bytes(kMostRanks, /*gathers=*/true);
static_assert(kMostSharedBytes <= 48 << 10 && shared_bytes(kGatheringRanks, true) <= kMostSharedBytes);

/// The packs of a copy at unaligned addresses, and its end. All lanes call it together. Pack i belongs to lane i modulo
/// the number of lanes, here and in copy_all() and in reductions.
template <class Unit, class Exec>
NVX_HD void copy_unaligned(const Exec& ex, const Copy& c) {
  if (c.packs * sizeof(Pack) == c.bytes) return;
  NVX_NO_UNROLL
  for (size_t i = size_t(ex.lane()); i * sizeof(Pack) < c.bytes; i += size_t(ex.lanes())) {
    const size_t at = i * sizeof(Pack);
    if (i >= c.packs) store_pack<Unit>(c.to + at, load_pack<Unit>(c.from + at, c.bytes - at), c.bytes - at);
  }
}

/// The exponent of the least power of two that is not below n.
NVX_HD constexpr uint32_t log2_up(uint32_t n) { return n < 2 ? 0 : 32 - uint32_t(__builtin_clz(n - 1)); }

/// Copies a part of each peer. A lane loads kAtOnce packs before it stores the first one, so that their latencies
/// overlap: one pack of each peer, or several if there are fewer peers. The last part is this rank's own, which is
/// mostly empty, so no slot is kept for it. kAtOnce is a power of two.
template <class Unit, int kAtOnce, class Exec>
NVX_HD void copy_all(const Exec& ex, const Peer* peers, Copy Peer::*which, uint32_t ranks) {
  constexpr uint32_t kMostShift = log2_up(kAtOnce);
  part<!std::is_void_v<Unit>>([&] {
    const auto lanes = uint32_t(ex.lanes());
    uint32_t shift;
    NVX_NO_UNROLL
    for (uint32_t r = 0; r < ranks; r += 1u << shift) {
      // Slot j has the pack j >> shift of the peer r + (j & (1 << shift) - 1).
      shift = log2_up(ranks - r - 1);
      if (shift > kMostShift) shift = kMostShift;
      const Pack* from[kAtOnce];
      Pack* to[kAtOnce];
      uint32_t counts[kAtOnce], most = 0;
      bool is_unaligned = false;
      NVX_UNROLL
      for (uint32_t j = 0; j < kAtOnce; ++j) {
        const uint32_t p = r + (j & ((1u << shift) - 1)), ahead = (j >> shift) * lanes;
        const Copy& c = peers[p < ranks ? p : r].*which;
        from[j] = reinterpret_cast<const Pack*>(offset(c.from, ahead * sizeof(Pack)));
        to[j] = reinterpret_cast<Pack*>(offset(c.to, ahead * sizeof(Pack)));
        counts[j] = p < ranks && ahead < c.packs ? c.packs - ahead : 0;
        most = counts[j] > most ? counts[j] : most;
        is_unaligned |= c.packs * sizeof(Pack) != c.bytes;
      }
      NVX_NO_UNROLL
      for (uint32_t i = uint32_t(ex.lane()); i < most; i += lanes << (kMostShift - shift)) {
        Pack packs[kAtOnce] = {};
        NVX_UNROLL
        for (uint32_t j = 0; j < kAtOnce; ++j) {
          if (i < counts[j]) packs[j] = from[j][i];
        }
        NVX_UNROLL
        for (uint32_t j = 0; j < kAtOnce; ++j) {
          if (i < counts[j]) to[j][i] = packs[j];
        }
      }
      NVX_NO_UNROLL
      for (uint32_t p = r; is_unaligned && p < ranks && p < r + (1u << shift); ++p)
        copy_unaligned<Unit>(ex, peers[p].*which);
    }
  });
}

/// Copies a range. All lanes call it together.
template <class Unit, class Exec>
NVX_HD void copy(const Exec& ex, const Copy& c) {
  NVX_NO_UNROLL
  for (uint32_t i = uint32_t(ex.lane()); i < c.packs; i += uint32_t(ex.lanes()))
    reinterpret_cast<Pack*>(c.to)[i] = reinterpret_cast<const Pack*>(c.from)[i];
  copy_unaligned<Unit>(ex, c);
}

/// The packs that the ranks have in packets, counted through: pack i of rank p is number p << shift | i. Lanes share
/// them evenly, however few a rank has.
struct PacksInPackets {
  uint32_t ranks, shift;

  NVX_HD PacksInPackets(uint32_t ranks, uint32_t most) : ranks(ranks), shift(log2_up(most)) {}
  NVX_HD uint32_t count() const { return ranks << shift; }
  NVX_HD uint32_t rank(uint32_t i) const { return i >> shift; }
  NVX_HD uint32_t pack(uint32_t i) const { return i & ((1u << shift) - 1); }
};

/// The multipliers for premul_sum: this rank's, and those in the others' arrivals.
struct Factors {
  double own;
  int me;
  size_t arrivals;  ///< the offset of rank 0's cell in this rank's pads
  size_t step;      ///< the distance to the next rank's cell
};

/// The sum of packs of T, in registers, for hot kernels.
template <class T>
class Sum {
 public:
  NVX_HD void add(const Pack& pack, bool is_first) {
    const auto x = __builtin_bit_cast(Elements, pack);
    for (int k = 0; k < kCount; ++k) {
      const Acc next = Rule<T>::widen(x.at[k]);
      acc_[k] = is_first ? next : kernel::add(acc_[k], next);
    }
  }

  NVX_HD Pack finish(ReduceOp op, int ranks) {
    if (op == ReduceOp::kAvg) {
      for (int k = 0; k < kCount; ++k) acc_[k] = divide(acc_[k], ranks);
    }
    Elements out;
    for (int k = 0; k < kCount; ++k) out.at[k] = Rule<T>::round(acc_[k]);
    return __builtin_bit_cast(Pack, out);
  }

 private:
  using Acc = typename Rule<T>::Acc;
  static constexpr int kCount = int(sizeof(Pack) / sizeof(T));
  struct Elements {
    T at[kCount];
  };

  Acc acc_[kCount] = {};
};

/// A reduction, of which each lane does its own packs. The inputs of all ranks, this one's included, are in packets,
/// which may not have arrived yet, or in chunks that have.
struct Reduction {
  const Peer* peers;
  uint32_t ranks;
  uint32_t me;
  bool in_packets;
  // In packets:
  size_t first, step;  ///< the offset of rank 0's cell in this rank's pads, and the distance to the next rank's
  uint32_t stamp;
  size_t cell;      ///< the offset of this rank's cell in the other ranks' pads
  uint32_t second;  ///< the number in the cell at which the sums are sent on; 0: they are not

  size_t bytes;   ///< of a chunk, or of what packets hold; 32 bits count its packs
  std::byte* to;  ///< of packets; sums of chunks go to each Peer::sum
  Factors factors;
  ReduceOp op;
};

/// Loads packs of the ranks from `rank` on, as far as there are so many. Slot j gets pack i + (j & (1 << shift) - 1) *
/// lanes of the rank `rank` + (j >> shift). Chunks are whole packs at aligned addresses.
template <int kAhead, class Exec>
NVX_HD bool load_ahead(Exec& ex, const Reduction& f, uint32_t rank, uint32_t i, uint32_t count, uint32_t shift,
                       Pack* packs) {
  const auto clamped = [&](uint32_t p) { return p < f.ranks ? p : f.ranks - 1; };
  if (!f.in_packets) {
    NVX_UNROLL
    for (uint32_t j = 0; j < kAhead; ++j) {
      const uint32_t at = i + (j & ((1u << shift) - 1)) * uint32_t(ex.lanes());
      packs[j] = reinterpret_cast<const Pack*>(f.peers[clamped(rank + (j >> shift))].source)[at < count ? at : i];
    }
    return true;
  }
  PendingWait pending{int(rank), f.stamp, 0};
  return ex.wait(pending, [&] {
    bool all = true;
    NVX_UNROLL
    for (uint32_t j = 0; j < kAhead; ++j) {
      const uint32_t p = clamped(rank + j);
      const auto* cell = reinterpret_cast<const Packet*>(f.peers[p].mine + f.first + p * f.step);
      Stamp seen;
      if (peek_pack(ex, cell, i, f.stamp, &packs[j], &seen)) continue;
      pending.peer = int(p), pending.seen = seen;
      all = false;
    }
    return all;
  });
}

/// Stores the sum of pack i in this rank's result and at all peers that get it.
template <class Unit, class Exec>
NVX_HD void store_sum(const Exec& ex, const Reduction& f, size_t i, const Pack& sum) {
  part<!std::is_void_v<Unit>>([&] {
    const size_t at = i * sizeof(Pack);
    if (f.to) store_pack<Unit>(f.to + at, sum, f.bytes - at);
    NVX_NO_UNROLL
    for (uint32_t j = 0; j < f.ranks && (f.second != 0 || !f.in_packets); ++j) {
      const uint32_t p = f.me + j < f.ranks ? f.me + j : f.me + j - f.ranks;
      if (!f.in_packets) {
        if (f.peers[p].sum) store_pack<Unit>(f.peers[p].sum + at, sum, f.bytes - at);
      } else if (p != f.me) {
        put_pack(ex, reinterpret_cast<Packet*>(f.peers[p].theirs + f.cell), f.second + i, sum, f.stamp);
      }
    }
  });
}

/// The multiplier of a rank, from its arrival, which meet() has seen. This waits for the stamp again: a read without a
/// wait would not keep the peer from writing the arrival of a later epoch.
template <class Exec>
NVX_NOINLINE bool factor_of(Exec& ex, const Reduction& f, uint32_t rank, double* factor) {
  *factor = f.factors.own;
  if (int(rank) == f.factors.me) return true;
  const auto* from = reinterpret_cast<const Packet*>(f.peers[rank].mine + f.factors.arrivals + rank * f.factors.step);
  PendingWait pending{int(rank), f.stamp, 0};
  return ex.wait(pending, [&] {
    const Packet packet = ex.peek_packet(from + kFactorWord);
    *factor = __builtin_bit_cast(double, data_of(packet));
    return is_stamped(packet, f.stamp);
  });
}

/// How many of kMost packs in flight each rank gets, as the exponent of a power of two. Opaque, so that the compiler
/// computes the slots again in each round: kept over all rounds, they would take registers that the copies need, and
/// spill.
template <int kMost>
NVX_HD uint32_t packs_each(uint32_t ranks) {
  const uint32_t most = log2_up(kMost), least = log2_up(ranks);
  return opaque(least < most ? most - least : 0);
}

/// Sums and averages of the chunks of at most kMost ranks. A lane reads the places of all ranks once, and loads kMost
/// packs at once: one of each rank, or several if there are fewer. Chunks of others are whole packs at aligned
/// addresses.
template <class T, int kMost, class Exec>
NVX_HD void reduce_few(const Exec& ex, const Reduction& f) {
  // Slot j has the pack j & steps - 1 of the rank j >> shift.
  const uint32_t shift = packs_each<kMost>(f.ranks), steps = 1u << shift;
  const auto lanes = uint32_t(ex.lanes()), count = uint32_t(ceil_div(f.bytes, sizeof(Pack)));
  const Pack* from[kMost];
  std::byte* to[kMost];  // from this rank on, so that not all ranks write to the same pad at once
  NVX_UNROLL
  for (uint32_t j = 0; j < kMost; ++j) {
    const std::byte* const source = f.peers[j >> shift < f.ranks ? j >> shift : 0].source;
    from[j] = reinterpret_cast<const Pack*>(offset(source, (j & (steps - 1)) * lanes * sizeof(Pack)));
    to[j] = j < f.ranks ? f.peers[f.me + j < f.ranks ? f.me + j : f.me + j - f.ranks].sum : nullptr;
  }
  NVX_NO_UNROLL
  for (uint32_t first = uint32_t(ex.lane()); first < count; first += lanes << shift) {
    Pack packs[kMost];
    NVX_UNROLL
    for (uint32_t j = 0; j < kMost; ++j) {
      if (j >> shift < f.ranks && first + (j & (steps - 1)) * lanes < count) packs[j] = from[j][first];
    }
    NVX_NO_UNROLL
    for (uint32_t i = first, step = 0; step < steps && i < count; i += lanes, ++step) {
      Sum<T> sum;
      NVX_UNROLL
      for (uint32_t j = 0; j < kMost; ++j) {
        if ((j & (steps - 1)) == 0 && j >> shift < f.ranks) sum.add(packs[j], j == 0);
      }
      // The next pack of each rank is where this one was.
      NVX_UNROLL
      for (uint32_t j = 0; j + 1 < kMost; ++j) packs[j] = packs[j + 1];
      const Pack out = sum.finish(f.op, int(f.ranks));
      const size_t at = i * sizeof(Pack);
      const bool is_whole = at + sizeof(Pack) <= f.bytes;
      if (to[0]) store_pack<T>(to[0] + at, out, f.bytes - at);
      NVX_UNROLL
      for (int j = 1; j < kMost; ++j) {
        if (is_whole && to[j]) *reinterpret_cast<Pack*>(to[j] + at) = out;
      }
      NVX_NO_UNROLL
      for (uint32_t p = 0; !is_whole && p < f.ranks; ++p) {
        if (p != f.me && f.peers[p].sum) store_pack<T>(f.peers[p].sum + at, out, f.bytes - at);
      }
    }
  }
}

/// Whether the packets of all ranks are few enough for gather_packs().
template <class Exec>
NVX_HD bool can_gather(const Exec& ex, const PacksInPackets& packs) {
  return packs.ranks <= kGatheringRanks && packs.count() <= kMostGathered &&
         packs.count() <= kGatheredByLane * uint32_t(ex.lanes());
}

/// Waits for the packs of all ranks, each lane for its own, so that all of them arrive within one latency, and puts
/// them into shared memory. The result is this lane's alone.
template <class Exec>
NVX_HD bool gather_packs(Exec& ex, const Reduction& f, const PacksInPackets& packs, Pack* gathered) {
  constexpr int kEach = int(kGatheredByLane);
  const auto count = uint32_t(ceil_div(f.bytes, sizeof(Pack)));
  PendingWait pending{0, f.stamp, 0};
  return ex.wait(pending, [&] {
    Pack pack[kEach];
    bool is_there[kEach], all = true;
    NVX_UNROLL
    for (int j = 0; j < kEach; ++j) {
      const uint32_t n = uint32_t(ex.lane()) + uint32_t(j) * uint32_t(ex.lanes());
      const uint32_t p = packs.rank(n), i = packs.pack(n);
      is_there[j] = n < packs.count() && i < count;
      if (!is_there[j]) continue;
      const auto* cell = reinterpret_cast<const Packet*>(f.peers[p].mine + f.first + p * f.step);
      Stamp seen;
      if (peek_pack(ex, cell, i, f.stamp, &pack[j], &seen)) continue;
      pending.peer = int(p), pending.seen = seen;
      all = false;
    }
    NVX_UNROLL
    for (int j = 0; j < kEach; ++j) {
      if (all && is_there[j]) gathered[ex.lane() + j * ex.lanes()] = pack[j];
    }
    return all;
  });
}

/// Adds the packs that the lanes have gathered, behind a barrier.
template <class T, class Exec>
NVX_HD void reduce_gathered(const Exec& ex, const Reduction& f, const PacksInPackets& packs, const Pack* gathered) {
  constexpr uint32_t kAhead = 4;
  const auto count = uint32_t(ceil_div(f.bytes, sizeof(Pack)));
  NVX_NO_UNROLL
  for (uint32_t i = uint32_t(ex.lane()); i < count; i += uint32_t(ex.lanes())) {
    Sum<T> sum;
    NVX_NO_UNROLL
    for (uint32_t r = 0; r < f.ranks; r += kAhead) {
      Pack pack[kAhead];
      NVX_UNROLL
      for (uint32_t j = 0; j < kAhead; ++j) pack[j] = gathered[(r + j < f.ranks ? r + j : r) << packs.shift | i];
      NVX_UNROLL
      for (uint32_t j = 0; j < kAhead; ++j) {
        if (r + j < f.ranks) sum.add(pack[j], r + j == 0);
      }
    }
    store_sum<T>(ex, f, i, sum.finish(f.op, int(f.ranks)));
  }
}

/// The op over the ranks' elements in absolute rank order, rounded once; for hot kernels: sums and averages only, with
/// kAhead loads in flight. The result is this lane's alone.
template <class T, int kAhead, class Exec>
NVX_HD bool reduce_hot(Exec& ex, const Reduction& f) {
  if constexpr (!kSame<T, F16>) {  // float16 takes too many instructions to widen
    if (!f.in_packets && f.ranks <= kAhead) {
      reduce_few<T, kAhead>(ex, f);
      return true;
    }
  }
  const auto lanes = uint32_t(ex.lanes()), count = uint32_t(ceil_div(f.bytes, sizeof(Pack)));
  const uint32_t shift = kSame<T, F16> && !f.in_packets ? packs_each<kAhead>(f.ranks) : 0, steps = 1u << shift;
  Pack packs[kAhead];
  uint32_t step = 0;
  NVX_NO_UNROLL
  for (uint32_t i = uint32_t(ex.lane()); i < count; i += lanes, step = (step + 1) & (steps - 1)) {
    Sum<T> sum;
    NVX_NO_UNROLL
    for (uint32_t r = 0; r < f.ranks; r += kAhead) {
      if (step == 0 && !load_ahead<kAhead>(ex, f, r, i, count, shift, packs)) return false;
      NVX_UNROLL
      for (uint32_t j = 0; j < kAhead; ++j) {
        if ((j & (steps - 1)) == 0 && r + (j >> shift) < f.ranks) sum.add(packs[j], r + j == 0);
      }
    }
    // The next pack of each rank is where this one was.
    NVX_UNROLL
    for (uint32_t j = 0; j + 1 < kAhead; ++j) packs[j] = packs[j + 1];
    store_sum<T>(ex, f, i, sum.finish(f.op, int(f.ranks)));
  }
  return true;
}

}  // namespace nvx::kernel
