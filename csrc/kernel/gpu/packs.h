#pragma once

#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "kernel/exec.h"
#include "kernel/gpu/device_pad.h"
#include "kernel/reduce/reduce.h"

/// The memory operations of a tile, one 16-byte pack per lane at a time: copies, and reductions of peers' chunks or
/// packets. User pointers may have any alignment; data in pads is aligned and padded to whole packs.
///
/// Pack i always belongs to lane i modulo the number of lanes, so a lane may read in one loop what it wrote in the loop
/// before.
namespace nvx::kernel {

template <class Word>
struct [[gnu::may_alias]] Aliased {
  Word word;
};

template <class Word>
NVX_HD Pack load_words(const std::byte* from) {
  struct Words {
    Word word[sizeof(Pack) / sizeof(Word)];
  } words;
  for (size_t i = 0; i < sizeof(Pack) / sizeof(Word); ++i) {
    words.word[i] = reinterpret_cast<const Aliased<Word>*>(from)[i].word;
  }
  return __builtin_bit_cast(Pack, words);
}

template <class Word>
NVX_HD void store_words(std::byte* to, const Pack& pack) {
  struct Words {
    Word word[sizeof(Pack) / sizeof(Word)];
  };
  const Words words = __builtin_bit_cast(Words, pack);
  for (size_t i = 0; i < sizeof(Pack) / sizeof(Word); ++i) {
    reinterpret_cast<Aliased<Word>*>(to)[i].word = words.word[i];
  }
}

NVX_HD inline bool is_aligned(const void* at) { return reinterpret_cast<uintptr_t>(at) % sizeof(Pack) == 0; }

/// The pack at any address of which only the first `bytes` bytes exist. Bytes beyond them are not accessed.
NVX_NOINLINE inline Pack load_odd(const std::byte* from, size_t bytes) {
  const auto address = reinterpret_cast<uintptr_t>(from);
  if (bytes >= sizeof(Pack) && address % 8 == 0) return load_words<uint64_t>(from);
  if (bytes >= sizeof(Pack) && address % 4 == 0) return load_words<uint32_t>(from);
  uint64_t words[2] = {0, 0};
  const size_t n = bytes < sizeof(Pack) ? bytes : sizeof(Pack);
  for (size_t i = 0; i < n; ++i) words[i / 8] |= uint64_t(from[i]) << (i % 8 * 8);
  return {{words[0], words[1]}};
}

NVX_NOINLINE inline void store_odd(std::byte* to, Pack pack, size_t bytes) {
  const auto address = reinterpret_cast<uintptr_t>(to);
  if (bytes >= sizeof(Pack) && address % 8 == 0) return store_words<uint64_t>(to, pack);
  if (bytes >= sizeof(Pack) && address % 4 == 0) return store_words<uint32_t>(to, pack);
  const size_t n = bytes < sizeof(Pack) ? bytes : sizeof(Pack);
  for (size_t i = 0; i < n; ++i) to[i] = std::byte(pack.words[i / 8] >> (i % 8 * 8));
}

/// The pack at `from`, in a piece that ends after `bytes`.
NVX_HD inline Pack load_pack(const std::byte* from, size_t bytes) {
  if (is_aligned(from) && bytes >= sizeof(Pack)) return *reinterpret_cast<const Pack*>(from);
  return load_odd(from, bytes);
}
NVX_HD inline void store_pack(std::byte* to, const Pack& pack, size_t bytes) {
  if (is_aligned(to) && bytes >= sizeof(Pack)) {
    *reinterpret_cast<Pack*>(to) = pack;
  } else {
    store_odd(to, pack, bytes);
  }
}

/// This lane's packs of a copy. The ranges are identical or disjoint.
NVX_NOINLINE inline void copy_packs(std::byte* to, const std::byte* from, size_t bytes, size_t lane, size_t lanes) {
  if (to == from) return;
  constexpr size_t kAtOnce = 4;  // loads in flight before the first store
  size_t i = lane;
  if (is_aligned(to) && is_aligned(from)) {
    const auto* source = reinterpret_cast<const Pack*>(from);
    auto* target = reinterpret_cast<Pack*>(to);
    for (; i + (kAtOnce - 1) * lanes < bytes / sizeof(Pack); i += kAtOnce * lanes) {
      const Pack a = source[i], b = source[i + lanes], c = source[i + 2 * lanes], d = source[i + 3 * lanes];
      target[i] = a, target[i + lanes] = b, target[i + 2 * lanes] = c, target[i + 3 * lanes] = d;
    }
  }
  for (; i * sizeof(Pack) < bytes; i += lanes) {
    const size_t at = i * sizeof(Pack);
    store_pack(to + at, load_pack(from + at, bytes - at), bytes - at);
  }
}

/// Copies a range. All lanes call it together.
template <class Exec>
NVX_HD void copy(const Exec& ex, std::byte* to, const std::byte* from, size_t bytes) {
  copy_packs(to, from, bytes, size_t(ex.lane()), size_t(ex.lanes()));
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

/// Sends a piece as packets. All lanes call it together.
template <class Exec>
NVX_NOINLINE void put_packets(const Exec& ex, Packet* to, const std::byte* from, size_t bytes, uint32_t stamp) {
  for (size_t i = size_t(ex.lane()); i * sizeof(Pack) < bytes; i += size_t(ex.lanes())) {
    const size_t at = i * sizeof(Pack);
    const Pack pack = load_pack(from + at, bytes - at);
    ex.put_packet(to + 2 * i, packet_of(pack.words[0], stamp));
    ex.put_packet(to + 2 * i + 1, packet_of(pack.words[1], stamp));
  }
}

/// Whether both packets of a pack have arrived.
template <class Exec>
NVX_HD bool peek_pack(const Exec& ex, const Packet* from, uint32_t stamp, Pack* pack, Stamp* seen) {
  const Packet first = ex.peek_packet(from), second = ex.peek_packet(from + 1);
  *pack = {{data_of(first), data_of(second)}};
  *seen = stamp_of(second.halves[1]);
  return is_stamped(first, stamp) && is_stamped(second, stamp);
}

/// Receives a piece from a peer's packets. All lanes call it together. The result is this lane's alone; combine it with
/// all().
template <class Exec>
NVX_NOINLINE bool get_packets(Exec& ex, std::byte* to, const Packet* from, size_t bytes, uint32_t stamp, int peer) {
  for (size_t i = size_t(ex.lane()); i * sizeof(Pack) < bytes; i += size_t(ex.lanes())) {
    Pack pack;
    PendingWait pending{peer, stamp, 0};
    if (!ex.wait(pending, [&] { return peek_pack(ex, from + 2 * i, stamp, &pack, &pending.seen); })) return false;
    store_pack(to + i * sizeof(Pack), pack, bytes - i * sizeof(Pack));
  }
  return true;
}

/// Whether the whole piece can be read as packs in place.
NVX_HD inline bool has_packs(const std::byte* data, size_t bytes) {
  return is_aligned(data) && bytes % sizeof(Pack) == 0;
}

/// The cells that the ranks write for this block in one part of this rank's pads.
struct Cells {
  const PeerPads* pads;
  size_t first;  ///< the offset of rank 0's cell in a pad
  size_t step;   ///< the distance to the next rank's cell

  NVX_HD const std::byte* of(int rank) const { return pads[rank].mine + first + size_t(rank) * step; }
};

/// The contributions of all ranks, this one's included: in packets, which may not have arrived yet, or in chunks that
/// have.
struct Sources {
  Cells cells;
  const PipeState* pipes;  ///< chunks: each peer's source; null for packets
  uint32_t stamp;
  const std::byte* own;  ///< chunks: this rank's; null for packets
  int me;
};

/// Packs of up to four ranks, loaded before the first one is used.
struct Ahead {
  static constexpr int kRanks = 4;
  Pack a, b, c, d;
};

NVX_HD inline const std::byte* source_of(const Sources& s, int rank) {
  if (rank == s.me && s.own) return s.own;
  return s.pipes ? s.pipes[rank].source : s.cells.of(rank);
}

/// Loads pack i of the ranks from `first` on, at most Ahead::kRanks of them.
template <class Exec>
NVX_HD bool load_ahead(Exec& ex, const Sources& s, int first, int ranks, size_t i, Ahead* packs) {
  const auto rank = [&](int j) { return first + j < ranks ? first + j : ranks - 1; };
  if (s.pipes) {
    const auto load = [&](int j) { return reinterpret_cast<const Pack*>(source_of(s, rank(j)))[i]; };
    *packs = {load(0), load(1), load(2), load(3)};
    return true;
  }
  PendingWait pending{first, s.stamp, 0};
  return ex.wait(pending, [&] {
    const auto peek = [&](int j, Pack* pack) {
      Stamp seen;
      const auto* from = reinterpret_cast<const Packet*>(source_of(s, rank(j))) + 2 * i;
      if (peek_pack(ex, from, s.stamp, pack, &seen)) return true;
      pending.peer = rank(j), pending.seen = seen;
      return false;
    };
    const bool a = peek(0, &packs->a), b = peek(1, &packs->b), c = peek(2, &packs->c), d = peek(3, &packs->d);
    return a & b & c & d;
  });
}

/// The multipliers for premul_sum: this rank's, and those in the others' greetings.
struct Factors {
  double own;
  int me;
  Cells greetings;

  template <class Exec>
  NVX_HD double of(const Exec& ex, int rank) const {
    if (rank == me) return own;
    const auto* from = reinterpret_cast<const Packet*>(greetings.of(rank));
    return __builtin_bit_cast(double, data_of(ex.peek_packet(from + kFactorWord)));
  }
};

/// Eight bools in a word: bools have bitwise operators only, which can process a word at once.
struct Bools {
  uint64_t bytes;
};
template <>
struct Rule<Bools> {
  using Acc = uint64_t;
  NVX_RULE static Acc widen(Bools x) {  // 1 in each byte that is not 0
    constexpr uint64_t kLow = 0x7f7f7f7f7f7f7f7f, kOnes = 0x0101010101010101;
    return (((x.bytes & kLow) + kLow) | x.bytes) >> 7 & kOnes;
  }
  NVX_RULE static Bools round(Acc a) { return {a}; }
};

/// The accumulators of a pack's elements. The operator is a run-time argument, checked once per pack: as a template
/// parameter it would make the kernels ten times as large.
template <class T>
class Accumulators {
 public:
  using Acc = typename Rule<T>::Acc;
  static constexpr int kCount = int(sizeof(Pack) / sizeof(T));

  NVX_HD void add(ReduceOp op, const Pack& pack, double factor, bool is_first) {
    const auto x = __builtin_bit_cast(Elements, pack);
    Acc next[kCount] = {};
    for (int k = 0; k < kCount; ++k) next[k] = Rule<T>::widen(x.at[k]);
    if constexpr (kScales) {
      if (op == ReduceOp::kPremulSum) {
        for (int k = 0; k < kCount; ++k) next[k] = next[k] * Acc(factor);
      }
    }
    if (is_first) {
      for (int k = 0; k < kCount; ++k) acc_[k] = next[k];
      return;
    }
    switch (op) {
      case ReduceOp::kSum:
      case ReduceOp::kAvg:
      case ReduceOp::kPremulSum: return each<ReduceOp::kSum>(next);
      case ReduceOp::kProduct: return each<ReduceOp::kProduct>(next);
      case ReduceOp::kMin: return each<ReduceOp::kMin>(next);
      case ReduceOp::kMax: return each<ReduceOp::kMax>(next);
      case ReduceOp::kBand: return each<ReduceOp::kBand>(next);
      case ReduceOp::kBor: return each<ReduceOp::kBor>(next);
      case ReduceOp::kBxor: return each<ReduceOp::kBxor>(next);
    }
  }

  NVX_HD Pack finish(ReduceOp op, int ranks) {
    if constexpr (!kSame<T, Bools> && !kIsComplex<T>) {
      if (op == ReduceOp::kAvg) {
        for (int k = 0; k < kCount; ++k) acc_[k] = divide(acc_[k], ranks);
      }
    }
    Elements out;
    for (int k = 0; k < kCount; ++k) out.at[k] = Rule<T>::round(acc_[k]);
    return __builtin_bit_cast(Pack, out);
  }

 private:
  struct Elements {
    T at[kCount];
  };
  static constexpr bool kFloats = kIsFloat<Acc>;
  static constexpr bool kScales = kFloats;
  /// reduce() below never asks for an operator that a type does not have or leaves to the unsigned type.
  static constexpr bool has(ReduceOp op) {
    const bool bitwise = op == ReduceOp::kBand || op == ReduceOp::kBor || op == ReduceOp::kBxor;
    if (kSame<T, Bools>) return bitwise;
    if (kIsComplex<T>) return op == ReduceOp::kProduct;
    if (kFloats) return !bitwise;
    return std::is_unsigned_v<T> || !(bitwise || op == ReduceOp::kProduct);
  }

  template <ReduceOp kOp>
  NVX_HD void each(const Acc* next) {
    if constexpr (has(kOp)) {
      for (int k = 0; k < kCount; ++k) acc_[k] = combine<kOp>(acc_[k], next[k]);
    }
  }

  Acc acc_[kCount] = {};
};

/// A reduction; each lane reduces its own packs.
struct Fold {
  std::byte* to;
  Sources sources;
  Factors factors;
  ReduceOp op;
  int ranks;
  size_t bytes;  ///< of a chunk, or of what packets hold; 32 bits count its packs
};

/// to[i] = op over the ranks' elements in absolute rank order, rounded once. The result is this lane's alone.
template <class T, class Exec>
NVX_NOINLINE bool fold(Exec& ex, const Fold& f, ReduceOp op) {
  const auto count = uint32_t(ceil_div(f.bytes, sizeof(Pack)));
  for (uint32_t i = uint32_t(ex.lane()); i < count; i += uint32_t(ex.lanes())) {
    Accumulators<T> sum;
    Ahead packs;
    const auto add = [&](int rank, const Pack& pack) {
      if (rank >= f.ranks) return;
      sum.add(op, pack, op == ReduceOp::kPremulSum ? f.factors.of(ex, rank) : 1, rank == 0);
    };
    // One after the other by name: an indexed array of packs would be placed in local memory.
    for (int r = 0; r < f.ranks; r += Ahead::kRanks) {
      if (!load_ahead(ex, f.sources, r, f.ranks, i, &packs)) return false;
      add(r, packs.a), add(r + 1, packs.b), add(r + 2, packs.c), add(r + 3, packs.d);
    }
    store_pack(f.to + i * sizeof(Pack), sum.finish(op, f.ranks), f.bytes - i * sizeof(Pack));
  }
  return true;
}

/// Where the sign does not matter, the signed type shares the code of the unsigned one; so do the bitwise operators.
template <class T, class Unsigned, class Exec>
NVX_HD bool fold_integers(Exec& ex, const Fold& f) {
  switch (f.op) {
    case ReduceOp::kAvg:
    case ReduceOp::kMin:
    case ReduceOp::kMax: return fold<T>(ex, f, f.op);
    case ReduceOp::kPremulSum: return false;
    default: return fold<Unsigned>(ex, f, f.op);
  }
}

template <class T, class Exec>
NVX_HD bool fold_floats(Exec& ex, const Fold& f) {
  const bool bitwise = f.op == ReduceOp::kBand || f.op == ReduceOp::kBor || f.op == ReduceOp::kBxor;
  return !bitwise && fold<T>(ex, f, f.op);
}

/// Complex numbers add and scale like twice as many real numbers.
template <class F, class Exec>
NVX_HD bool fold_complex(Exec& ex, const Fold& f) {
  switch (f.op) {
    case ReduceOp::kProduct: return fold<Complex<F>>(ex, f, f.op);
    case ReduceOp::kSum:
    case ReduceOp::kAvg:
    case ReduceOp::kPremulSum: return fold<F>(ex, f, f.op);
    default: return false;
  }
}

template <class Exec>
NVX_HD bool fold_bools(Exec& ex, const Fold& f) {
  switch (f.op) {
    case ReduceOp::kSum:
    case ReduceOp::kMax:
    case ReduceOp::kBor: return fold<Bools>(ex, f, ReduceOp::kBor);
    case ReduceOp::kProduct:
    case ReduceOp::kMin:
    case ReduceOp::kBand: return fold<Bools>(ex, f, ReduceOp::kBand);
    case ReduceOp::kBxor: return fold<Bools>(ex, f, ReduceOp::kBxor);
    default: return false;
  }
}

/// Reduces elements of this type. All lanes call it together. The result is this lane's alone. Returns false also if
/// the type does not have the operator, exactly when the host's loops do not have it.
template <class Exec>
NVX_NOINLINE bool reduce(Exec& ex, DType type, const Fold& f) {
  switch (type) {
    case DType::kBytes: return false;
    case DType::kBool: return fold_bools(ex, f);
    case DType::kU8: return fold_integers<uint8_t, uint8_t>(ex, f);
    case DType::kI8: return fold_integers<int8_t, uint8_t>(ex, f);
    case DType::kU16: return fold_integers<uint16_t, uint16_t>(ex, f);
    case DType::kI16: return fold_integers<int16_t, uint16_t>(ex, f);
    case DType::kU32: return fold_integers<uint32_t, uint32_t>(ex, f);
    case DType::kI32: return fold_integers<int32_t, uint32_t>(ex, f);
    case DType::kU64: return fold_integers<uint64_t, uint64_t>(ex, f);
    case DType::kI64: return fold_integers<int64_t, uint64_t>(ex, f);
    case DType::kF16: return fold_floats<F16>(ex, f);
    case DType::kBF16: return fold_floats<BF16>(ex, f);
    case DType::kF32: return fold_floats<float>(ex, f);
    case DType::kF64: return fold_floats<double>(ex, f);
    case DType::kC64: return fold_complex<float>(ex, f);
    case DType::kC128: return fold_complex<double>(ex, f);
    case DType::kF8E4M3FN: return fold_floats<F8E4M3FN>(ex, f);
    case DType::kF8E5M2: return fold_floats<F8E5M2>(ex, f);
    case DType::kF8E4M3FNUZ: return fold_floats<F8E4M3FNUZ>(ex, f);
    case DType::kF8E5M2FNUZ: return fold_floats<F8E5M2FNUZ>(ex, f);
    case DType::kF8E8M0FNU: return fold_floats<F8E8M0FNU>(ex, f);
  }
  return false;
}

}  // namespace nvx::kernel
