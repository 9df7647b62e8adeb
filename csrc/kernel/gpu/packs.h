#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "kernel/exec.h"
#include "kernel/gpu/device_pad.h"
#include "kernel/reduce/reduce.h"

/// The memory operations of a tile, one 16-byte pack per lane at a time: copies, and reductions of peers' chunks or
/// packets. User pointers may have any alignment; data in pads is aligned and padded to whole packs.
namespace nvx::kernel {

template <class Word>
struct [[gnu::may_alias]] Aliased {
  Word word;
};

/// Whether a piece can be read as packs in place.
NVX_HD inline bool has_packs(const void* at, size_t bytes) {
  return (reinterpret_cast<uintptr_t>(at) | bytes) % sizeof(Pack) == 0;
}
NVX_HD inline bool is_aligned(const void* at) { return reinterpret_cast<uintptr_t>(at) % sizeof(Pack) == 0; }

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

NVX_NOINLINE inline Pack load_odd(const std::byte* from, size_t bytes) {
  const auto address = reinterpret_cast<uintptr_t>(from);
  if (bytes >= sizeof(Pack) && address % 8 == 0) return load_units<uint64_t>(from, sizeof(Pack));
  if (bytes >= sizeof(Pack) && address % 4 == 0) return load_units<uint32_t>(from, sizeof(Pack));
  return load_units<uint8_t>(from, bytes);
}
NVX_NOINLINE inline void store_odd(std::byte* to, Pack pack, size_t bytes) {
  const auto address = reinterpret_cast<uintptr_t>(to);
  if (bytes >= sizeof(Pack) && address % 8 == 0) return store_units<uint64_t>(to, pack, sizeof(Pack));
  if (bytes >= sizeof(Pack) && address % 4 == 0) return store_units<uint32_t>(to, pack, sizeof(Pack));
  store_units<uint8_t>(to, pack, bytes);
}

/// The pack at `from`, in a piece that ends after `bytes`. Unit: of its address and length; void if a call may decide.
template <class Unit>
NVX_HD Pack load_pack(const std::byte* from, size_t bytes) {
  if (is_aligned(from) && bytes >= sizeof(Pack)) return *reinterpret_cast<const Pack*>(from);
  if constexpr (std::is_void_v<Unit>) {
    return load_odd(from, bytes);
  } else {
    return load_units<Unit>(from, bytes);
  }
}
template <class Unit>
NVX_HD void store_pack(std::byte* to, const Pack& pack, size_t bytes) {
  if (is_aligned(to) && bytes >= sizeof(Pack)) {
    *reinterpret_cast<Pack*>(to) = pack;
  } else if constexpr (std::is_void_v<Unit>) {
    store_odd(to, pack, bytes);
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

/// Sends a pack as packets, and looks whether both packets of a pack have arrived. `pack`: its number in the cell.
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
  uint32_t packs;  ///< of these, the whole packs at even addresses

  NVX_HD static Copy of(const std::byte* from, std::byte* to, size_t bytes) {
    return {from, to, from == to ? 0 : bytes,
            from == to || !is_aligned(from) || !is_aligned(to) ? 0 : uint32_t(bytes / sizeof(Pack))};
  }
};

/// A block's state of one rank during an operation, in memory that its lanes share. One lane writes it; the others
/// read it after their next sync() or all().
struct Peer {
  std::byte* theirs;  ///< see PeerPads
  const std::byte* mine;
  Piece send, recv;               ///< this block's share of the pieces for it and from it
  uint64_t due_to, due_from;      ///< the lengths of these pieces as a whole
  uint32_t packs_to, packs_from;  ///< in packets: packs of this block's share; else 0
  Stamp sent, taken;              ///< see PipeState

  // If pieces may bypass staging. Told to the peer:
  uint64_t pool;      ///< the address of its pool in this rank
  uint32_t granules;  ///< how much of it this rank has mapped
  // Concluded by both ranks from their greetings. Addresses are those of this block's share; null means to use
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
  std::byte* sum;           ///< where the sum goes; null: not there
};
static_assert(kMostRanks * sizeof(Peer) <= 48 << 10, "the shared memory of a block");

/// The packs of a copy at odd addresses, and its end. All lanes call it together. Pack i belongs to lane i modulo the
/// number of lanes, here and in copy_all() and in reductions.
template <class Unit, class Exec>
NVX_HD void copy_odd(const Exec& ex, const Copy& c) {
  if (c.packs * sizeof(Pack) == c.bytes) return;
  NVX_NO_UNROLL
  for (size_t i = size_t(ex.lane()); i * sizeof(Pack) < c.bytes; i += size_t(ex.lanes())) {
    const size_t at = i * sizeof(Pack);
    if (i >= c.packs) store_pack<Unit>(c.to + at, load_pack<Unit>(c.from + at, c.bytes - at), c.bytes - at);
  }
}

/// Copies a part of each peer. A lane reads the places of kAtOnce peers once, and loads its packs of all of them before
/// it stores the first one, so that their latencies overlap.
template <class Unit, int kAtOnce, class Exec>
NVX_HD void copy_all(const Exec& ex, const Peer* peers, Copy Peer::*which, uint32_t ranks) {
  part<!std::is_void_v<Unit>>([&] {
    NVX_NO_UNROLL
    for (uint32_t r = 0; r < ranks; r += kAtOnce) {
      const Pack* from[kAtOnce];
      Pack* to[kAtOnce];
      uint32_t counts[kAtOnce], most = 0;
      bool is_odd = false;
      NVX_UNROLL
      for (uint32_t j = 0; j < kAtOnce; ++j) {
        const Copy& c = peers[r + j < ranks ? r + j : r].*which;
        from[j] = reinterpret_cast<const Pack*>(c.from), to[j] = reinterpret_cast<Pack*>(c.to);
        counts[j] = r + j < ranks ? c.packs : 0;
        most = counts[j] > most ? counts[j] : most;
        is_odd |= c.packs * sizeof(Pack) != c.bytes;
      }
      NVX_NO_UNROLL
      for (uint32_t i = uint32_t(ex.lane()); i < most; i += uint32_t(ex.lanes())) {
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
      for (uint32_t p = r; is_odd && p < ranks && p < r + kAtOnce; ++p) copy_odd<Unit>(ex, peers[p].*which);
    }
  });
}

/// Copies a range. All lanes call it together.
template <class Unit, class Exec>
NVX_HD void copy(const Exec& ex, const Copy& c) {
  NVX_NO_UNROLL
  for (uint32_t i = uint32_t(ex.lane()); i < c.packs; i += uint32_t(ex.lanes()))
    reinterpret_cast<Pack*>(c.to)[i] = reinterpret_cast<const Pack*>(c.from)[i];
  copy_odd<Unit>(ex, c);
}

/// The packs that the ranks have in packets, counted through: pack i of rank p is number p << shift | i. Lanes share
/// them evenly, however few a rank has.
struct PacksInPackets {
  uint32_t ranks, shift;

  NVX_HD PacksInPackets(uint32_t ranks, uint32_t most)
      : ranks(ranks), shift(most < 2 ? 0 : 32 - uint32_t(__builtin_clz(most - 1))) {}
  NVX_HD uint32_t count() const { return ranks << shift; }
  NVX_HD uint32_t rank(uint32_t i) const { return i >> shift; }
  NVX_HD uint32_t pack(uint32_t i) const { return i & ((1u << shift) - 1); }
};

/// The multipliers for premul_sum: this rank's, and those in the others' greetings.
struct Factors {
  double own;
  int me;
  size_t greetings;  ///< the offset of rank 0's cell in this rank's pads
  size_t step;       ///< the distance to the next rank's cell
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

/// A reduction; each lane reduces its own packs. The contributions of all ranks, this one's included, are in packets,
/// which may not have arrived yet, or in chunks that have.
struct Fold {
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

/// Loads pack i of kAhead ranks from `rank` on, as far as there are so many. Chunks are whole packs at even addresses.
template <int kAhead, class Exec>
NVX_HD bool load_ahead(Exec& ex, const Fold& f, uint32_t rank, size_t i, Pack* packs) {
  const auto clamped = [&](int j) { return rank + j < f.ranks ? rank + j : f.ranks - 1; };
  if (!f.in_packets) {
    NVX_UNROLL
    for (int j = 0; j < kAhead; ++j) packs[j] = reinterpret_cast<const Pack*>(f.peers[clamped(j)].source)[i];
    return true;
  }
  PendingWait pending{int(rank), f.stamp, 0};
  return ex.wait(pending, [&] {
    bool all = true;
    NVX_UNROLL
    for (int j = 0; j < kAhead; ++j) {
      const uint32_t p = clamped(j);
      const auto* cell = reinterpret_cast<const Packet*>(f.peers[p].mine + f.first + p * f.step);
      Stamp seen;
      if (peek_pack(ex, cell, i, f.stamp, &packs[j], &seen)) continue;
      pending.peer = int(p), pending.seen = seen;
      all = false;
    }
    return all;
  });
}

/// Stores the sum of pack i wherever it belongs, without reading it again.
template <class Unit, class Exec>
NVX_HD void store_sum(const Exec& ex, const Fold& f, size_t i, const Pack& sum) {
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

/// The multiplier of a rank, from its greeting. It has come; a read that did not wait for its stamp would not keep the
/// peer from writing the greeting of a later epoch.
template <class Exec>
NVX_NOINLINE bool factor_of(Exec& ex, const Fold& f, uint32_t rank, double* factor) {
  *factor = f.factors.own;
  if (int(rank) == f.factors.me) return true;
  const auto* from = reinterpret_cast<const Packet*>(f.peers[rank].mine + f.factors.greetings + rank * f.factors.step);
  PendingWait pending{int(rank), f.stamp, 0};
  return ex.wait(pending, [&] {
    const Packet packet = ex.peek_packet(from + kFactorWord);
    *factor = __builtin_bit_cast(double, data_of(packet));
    return is_stamped(packet, f.stamp);
  });
}

/// Sums and averages of the chunks of at most kMost ranks: a lane reads the places of all ranks once. Chunks of others
/// are whole packs at even addresses.
template <class T, int kMost, class Exec>
NVX_HD void fold_few(const Exec& ex, const Fold& f) {
  const Pack* from[kMost];
  std::byte* to[kMost];  // from this rank on, so that not all ranks write to the same pad at once
  NVX_UNROLL
  for (uint32_t j = 0; j < kMost; ++j) {
    from[j] = reinterpret_cast<const Pack*>(f.peers[j < f.ranks ? j : 0].source);
    to[j] = j < f.ranks ? f.peers[f.me + j < f.ranks ? f.me + j : f.me + j - f.ranks].sum : nullptr;
  }
  const auto count = uint32_t(ceil_div(f.bytes, sizeof(Pack)));
  NVX_NO_UNROLL
  for (uint32_t i = uint32_t(ex.lane()); i < count; i += uint32_t(ex.lanes())) {
    Pack packs[kMost];
    NVX_UNROLL
    for (uint32_t j = 0; j < kMost; ++j) {
      if (j < f.ranks) packs[j] = from[j][i];
    }
    Sum<T> sum;
    NVX_UNROLL
    for (uint32_t j = 0; j < kMost; ++j) {
      if (j < f.ranks) sum.add(packs[j], j == 0);
    }
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

/// The op over the ranks' elements in absolute rank order, rounded once; for hot kernels: sums and averages only, with
/// kAhead loads in flight. The result is this lane's alone.
template <class T, int kAhead, class Exec>
NVX_HD bool fold_hot(Exec& ex, const Fold& f) {
  if constexpr (!kSame<T, F16>) {  // float16 takes too many instructions to widen
    if (!f.in_packets && f.ranks <= kAhead) {
      fold_few<T, kAhead>(ex, f);
      return true;
    }
  }
  const auto count = uint32_t(ceil_div(f.bytes, sizeof(Pack)));
  NVX_NO_UNROLL
  for (uint32_t i = uint32_t(ex.lane()); i < count; i += uint32_t(ex.lanes())) {
    Sum<T> sum;
    NVX_NO_UNROLL
    for (uint32_t r = 0; r < f.ranks; r += kAhead) {
      Pack packs[kAhead];
      if (!load_ahead<kAhead>(ex, f, r, i, packs)) return false;
      NVX_UNROLL
      for (int j = 0; j < kAhead; ++j) {
        if (r + j < f.ranks) sum.add(packs[j], r + j == 0);
      }
    }
    store_sum<T>(ex, f, i, sum.finish(f.op, int(f.ranks)));
  }
  return true;
}

// For general kernels: all types and operators, told apart at run time, one element at a time. Code for each of them
// would make these kernels ten times as large.

/// log2 of the bytes of each type's elements, two bits each. A complex number is two elements.
inline constexpr uint64_t kElementBytes = [] {
  uint64_t all = 0;
  for (size_t t = 0; t < kDTypeCount; ++t) {
    const size_t bytes = kDTypes[t].bytes / (DType(t) == DType::kC64 || DType(t) == DType::kC128 ? 2 : 1);
    all |= uint64_t(bytes == 8 ? 3 : bytes / 2) << 2 * t;
  }
  return all;
}();
NVX_HD inline uint32_t element_bits(DType type) { return 8u << (kElementBytes >> 2 * uint32_t(type) & 3); }

/// The types that accumulate as F, float or double.
template <class F>
struct Floats {
  using Acc = F;
  DType type;

  NVX_HD bool is_complex() const { return type == DType::kC64 || type == DType::kC128; }
  NVX_HD F widen(uint64_t x) const {
    if constexpr (sizeof(F) == sizeof(double)) return __builtin_bit_cast(double, x);
    return with_narrow(float_of(uint32_t(x)), [&](auto t) {
      using T = decltype(t);
      return T::widen({decltype(t.bits)(x)});
    });
  }
  NVX_HD uint64_t round(F a) const {
    if constexpr (sizeof(F) == sizeof(double)) return __builtin_bit_cast(uint64_t, a);
    return with_narrow(bits_of(a), [&](auto t) { return uint32_t(decltype(t)::round(a).bits); });
  }
  NVX_HD F combine(ReduceOp op, F a, F b) const {
    switch (op) {
      case ReduceOp::kProduct: return multiply(a, b);
      case ReduceOp::kMin: return lower(a, b);
      case ReduceOp::kMax: return higher(a, b);
      default: return add(a, b);
    }
  }
  NVX_HD F average(F a, uint32_t ranks) const { return divide(a, int(ranks)); }

 private:
  template <class Result, class What>
  NVX_HD Result with_narrow(Result otherwise, What what) const {
    switch (type) {
      case DType::kF16: return what(F16());
      case DType::kBF16: return what(BF16());
      case DType::kF8E4M3FN: return what(F8E4M3FN());
      case DType::kF8E5M2: return what(F8E5M2());
      case DType::kF8E4M3FNUZ: return what(F8E4M3FNUZ());
      case DType::kF8E5M2FNUZ: return what(F8E5M2FNUZ());
      case DType::kF8E8M0FNU: return what(F8E8M0FNU());
      default: return otherwise;
    }
  }
};

/// Integers and bools, in 64 bits: the lower bits of sums and products are those of any narrower type.
struct Integers {
  using Acc = uint64_t;
  DType type;

  NVX_HD bool is_complex() const { return false; }
  NVX_HD bool is_signed() const {
    return type == DType::kI8 || type == DType::kI16 || type == DType::kI32 || type == DType::kI64;
  }
  NVX_HD uint64_t widen(uint64_t x) const {
    const uint32_t above = 64 - element_bits(type);
    x <<= above;
    if (type == DType::kBool) return x != 0;
    return is_signed() ? uint64_t(int64_t(x) >> above) : x >> above;
  }
  NVX_HD uint64_t round(uint64_t a) const { return a; }
  NVX_HD uint64_t combine(ReduceOp op, uint64_t a, uint64_t b) const {
    const uint64_t sign = is_signed() ? uint64_t(1) << 63 : 0;
    const bool is_bool = type == DType::kBool, is_lower = (a ^ sign) < (b ^ sign);
    switch (op) {
      case ReduceOp::kProduct: return a * b;
      case ReduceOp::kMin: return is_lower ? a : b;
      case ReduceOp::kMax: return is_lower ? b : a;
      case ReduceOp::kBand: return a & b;
      case ReduceOp::kBor: return a | b;
      case ReduceOp::kBxor: return a ^ b;
      default: return is_bool ? a | b : a + b;
    }
  }
  NVX_HD uint64_t average(uint64_t a, uint32_t ranks) const {
    a = widen(a);
    const bool is_negative = is_signed() && int64_t(a) < 0;
    const uint64_t quotient = (is_negative ? -a : a) / ranks;
    return is_negative ? -quotient : quotient;
  }
};

inline constexpr int kPacksAhead = 4;

template <class Exec>
NVX_NOINLINE bool load_any(Exec& ex, const Fold& f, uint32_t rank, size_t i, Pack* packs) {
  return load_ahead<kPacksAhead>(ex, f, rank, i, packs);
}

/// Combines a rank's pack with the accumulators of its elements.
template <class Elements, class Acc = typename Elements::Acc>
NVX_HD void combine_pack(const Elements& elements, ReduceOp op, const Pack& pack, double factor, bool is_first,
                         Acc* sum) {
  const uint32_t bits = element_bits(elements.type);
  Acc x_before{}, a_before{};
  NVX_NO_UNROLL
  for (uint32_t k = 0, at = 0; at < 8 * sizeof(Pack); ++k, at += bits) {
    Acc x = elements.widen(pack.words[at / 64] >> at % 64);
    if constexpr (kIsFloat<Acc>) {
      if (op == ReduceOp::kPremulSum) x = x * Acc(factor);
    }
    const Acc a = sum[k];
    if (is_first) {
      sum[k] = x;
    } else if (op != ReduceOp::kProduct || !elements.is_complex()) {
      sum[k] = elements.combine(op, a, x);
    } else if (k % 2 != 0) {
      const auto product = multiply(Complex<Acc>{a_before, a}, Complex<Acc>{x_before, x});
      sum[k - 1] = product.re, sum[k] = product.im;
    }
    x_before = x, a_before = a;
  }
}

/// The pack of the rounded accumulators.
template <class Elements, class Acc = typename Elements::Acc>
NVX_HD Pack round_pack(const Elements& elements, ReduceOp op, uint32_t ranks, const Acc* sum) {
  const uint32_t bits = element_bits(elements.type);
  Pack out{};
  NVX_NO_UNROLL
  for (uint32_t k = 0, at = 0; at < 8 * sizeof(Pack); ++k, at += bits) {
    const uint64_t x = elements.round(op == ReduceOp::kAvg ? elements.average(sum[k], ranks) : sum[k]);
    out.words[at / 64] |= (x & ~uint64_t(0) >> (64 - bits)) << at % 64;
  }
  return out;
}

/// As fold_hot(), for any operator of a type.
template <class Elements, class Exec>
NVX_NOINLINE bool fold(Exec& ex, const Fold& f, Elements elements) {
  const auto count = uint32_t(ceil_div(f.bytes, sizeof(Pack)));
  NVX_NO_UNROLL
  for (uint32_t i = uint32_t(ex.lane()); i < count; i += uint32_t(ex.lanes())) {
    typename Elements::Acc sum[sizeof(Pack)] = {};
    Pack packs[kPacksAhead];
    NVX_NO_UNROLL
    for (uint32_t r = 0; r < f.ranks; ++r) {
      double factor = 1;
      if (r % kPacksAhead == 0 && !load_any(ex, f, r, i, packs)) return false;
      if (f.op == ReduceOp::kPremulSum && !factor_of(ex, f, r, &factor)) return false;
      combine_pack(elements, f.op, packs[r % kPacksAhead], factor, r == 0, sum);
    }
    store_sum<void>(ex, f, i, round_pack(elements, f.op, f.ranks, sum));
  }
  return true;
}

/// Reduces elements of this type, by an operator that the type has. All lanes call it together. The result is this
/// lane's alone.
template <class Exec>
NVX_HD bool reduce(Exec& ex, DType type, const Fold& f) {
  if (type == DType::kF64 || type == DType::kC128) return fold(ex, f, Floats<double>{type});
  return type < DType::kF16 ? fold(ex, f, Integers{type}) : fold(ex, f, Floats<float>{type});
}

}  // namespace nvx::kernel
