#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <new>
#include <random>
#include <span>
#include <thread>
#include <vector>

#include "kernel/gpu/device_collectives.h"

/// The device algorithms without a device: each lane of each block of each rank is a host thread. Pads, states, epochs
/// and counters are the device's; only the Machine of a lane differs.
namespace nvx::test {

/// The barrier of a tile's lanes, and its shared state.
class Crossing {
 public:
  explicit Crossing(int lanes) : lanes_(lanes) {}

  /// Returns on all lanes when all have called it. Returns whether all passed true.
  bool meet(bool mine) {
    std::unique_lock lock(mutex_);
    all_ = all_ && mine;
    const uint64_t round = round_;
    if (++came_ == lanes_) {
      verdict_ = all_, all_ = true, came_ = 0, ++round_;
      met_.notify_all();
    } else {
      met_.wait(lock, [&] { return round_ != round; });
    }
    return verdict_;
  }

  /// True for one of as many calls as there are lanes.
  bool is_turn() { return turn_++ % uint32_t(lanes_) == 0; }
  /// Counts checks of the host, including this one.
  uint32_t count_look() { return ++looks_; }

 private:
  const int lanes_;
  std::atomic<uint32_t> turn_{0}, looks_{0};
  std::mutex mutex_;
  std::condition_variable met_;
  int came_ = 0;
  bool all_ = true;
  bool verdict_ = true;
  uint64_t round_ = 0;
};

/// A deliberate fault, and its lane.
struct Mischief {
  enum class Kind { kNone, kNoSync, kLoneVerdicts, kLostSignal, kRelaxedSignal } kind = Kind::kNone;
  uint32_t dawdle_us = 0;  ///< the longest random delay of this rank before its operations; 0: none
  uint64_t seed = 0;
  uint32_t abort_at = 0;  ///< the check of the host just before which its abort word is set; 0: none
  /// The fate of a packet or a flag that is stored there.
  enum class Store { kPacket, kFlag };
  enum class Fate { kArrives, kGoesAstray, kIsBent };
  std::function<Fate(Store, const void*)> fate = nullptr;
  std::function<void(uint32_t)> holds = nullptr;  ///< a lane calls it before it reports the result of its n-th await
};

class TwinMachine {
 public:
  static constexpr uint32_t kPollsPerCheck = 8;
  static constexpr uint64_t kCheckNs = 0;

  TwinMachine(int tile, int tiles, int lane, int lanes, Crossing& crossing, const Mischief& mischief)
      : tile_(tile),
        tiles_(tiles),
        lane_(lane),
        lanes_(lanes),
        crossing_(crossing),
        mischief_(mischief),
        random_(uint32_t(mischief.seed * 1009 + uint64_t(tile) * 31 + uint64_t(lane) + 1)) {}

  int lane() const { return lane_; }
  int lanes() const { return lanes_; }
  int tile() const { return tile_; }
  int tiles() const { return tiles_; }
  void sync() const {
    dawdle();
    is_fenced_ = false;
    if (mischief_.kind != Mischief::Kind::kNoSync) crossing_.meet(true);
  }
  bool all(bool mine) const {
    dawdle();
    is_fenced_ = false;
    ++awaits_;
    if (mischief_.holds) mischief_.holds(awaits_);
    // Before the first round of chunks, the lanes need what others have written to the memory that they share.
    const bool alone = mischief_.kind == Mischief::Kind::kLoneVerdicts && awaits_ > 4;
    return alone ? mine : crossing_.meet(mine);
  }
  bool is_check_leader() const { return crossing_.is_turn(); }

  kernel::Packet peek_packet(const kernel::Packet* from) const {
    auto* p = const_cast<kernel::Packet*>(from);
    return {{std::atomic_ref(p->halves[0]).load(std::memory_order_relaxed),
             std::atomic_ref(p->halves[1]).load(std::memory_order_relaxed)}};
  }
  void put_packet(kernel::Packet* to, const kernel::Packet& p) const {
    dawdle();
    const Mischief::Fate fate = fate_of(Mischief::Store::kPacket, to);
    if (fate == Mischief::Fate::kGoesAstray) return;
    const uint64_t bent = fate == Mischief::Fate::kIsBent;
    std::atomic_ref(to->halves[1]).store(p.halves[1] ^ bent, std::memory_order_relaxed);
    std::atomic_ref(to->halves[0]).store(p.halves[0], std::memory_order_relaxed);
  }

  template <class Word, class Value>
  void signal(Word& at, Value value) const {
    dawdle();
    if (mischief_.kind == Mischief::Kind::kLostSignal) return;
    if (fate_of(Mischief::Store::kFlag, &at) == Mischief::Fate::kGoesAstray) return;
    const bool relaxed = mischief_.kind == Mischief::Kind::kRelaxedSignal;
    std::atomic_ref(at).store(value, relaxed ? std::memory_order_relaxed : std::memory_order_release);
  }
  /// The fence is in the signals themselves: ThreadSanitizer knows no fences. A signal that no fence of its lane
  /// precedes since the last barrier is relaxed, and so a race.
  void fence() const { is_fenced_ = true; }
  void signal_behind(Stamp& at, Stamp value) const {
    if (is_fenced_) return signal(at, value);
    std::atomic_ref(at).store(value, std::memory_order_relaxed);
  }
  Stamp acquire(const Stamp& at) const {
    return std::atomic_ref(const_cast<Stamp&>(at)).load(std::memory_order_acquire);
  }
  uint32_t load_host(const uint32_t& at) const {
    if (crossing_.count_look() == mischief_.abort_at) store(const_cast<uint32_t&>(at), 1);
    return load(at);
  }
  uint64_t load_view(const uint64_t& at) const {
    return std::atomic_ref(const_cast<uint64_t&>(at)).load(std::memory_order_relaxed);
  }

  uint32_t load(const uint32_t& at) const {
    return std::atomic_ref(const_cast<uint32_t&>(at)).load(std::memory_order_relaxed);
  }
  template <class Word>
  void store_host(Word& at, Word value) const {
    std::atomic_ref(at).store(value, std::memory_order_relaxed);
  }
  void store(uint32_t& at, uint32_t value) const { std::atomic_ref(at).store(value, std::memory_order_relaxed); }
  bool claim(uint32_t& at) const {
    uint32_t free = 0;
    return std::atomic_ref(at).compare_exchange_strong(free, 1);
  }
  uint32_t add(uint32_t& at, uint32_t n = 1) const {
    return std::atomic_ref(at).fetch_add(n, std::memory_order_acq_rel);
  }

  uint64_t now_ns() const { return uint64_t(std::chrono::steady_clock::now().time_since_epoch().count()); }
  void relax() const { std::this_thread::yield(); }

 private:
  Mischief::Fate fate_of(Mischief::Store store, const void* at) const {
    return mischief_.fate ? mischief_.fate(store, at) : Mischief::Fate::kArrives;
  }
  void dawdle() const {
    if (mischief_.dawdle_us == 0) return;
    const uint32_t die = random_() % 8;
    if (die == 0) std::this_thread::sleep_for(std::chrono::microseconds(random_() % mischief_.dawdle_us));
    if (die == 1) std::this_thread::yield();
  }

  int tile_, tiles_, lane_, lanes_;
  Crossing& crossing_;
  const Mischief& mischief_;
  mutable std::minstd_rand random_;
  mutable uint32_t awaits_ = 0;
  mutable bool is_fenced_ = false;
};

using TwinExec = kernel::TileExec<TwinMachine>;

/// Which kernel of a launch is played: the hot one where there is one, as launches choose, or the general one.
enum class Played { kAsLaunched, kGeneral };

/// One kernel of one rank: runs jobs in order, with all lanes of all blocks at once. Returns how many lanes succeeded.
template <class Rules = kernel::PushRules>
int play_kernel(const kernel::DeviceChannel& channel, std::span<const kernel::Job> jobs, kernel::PieceTable table,
                int lanes, const Mischief& mischief = {}, Played played = Played::kAsLaunched) {
  const int blocks = int(channel.shape.blocks);
  const kernel::DeviceChannel ready = channel.prepared();
  std::vector<std::unique_ptr<Crossing>> crossings;
  for (int b = 0; b < blocks; ++b) crossings.push_back(std::make_unique<Crossing>(lanes));
  std::vector<kernel::Peer> peers(size_t(blocks) * channel.shape.ranks);
  std::atomic<int> well{0};
  const auto play = [&](auto run_lane) {
    const auto lane = [&](int b, int l) {
      const TwinMachine machine(b, blocks, l, lanes, *crossings[size_t(b)], mischief);
      well += run_lane(machine, peers.data() + size_t(b) * channel.shape.ranks);
    };
    std::vector<std::thread> threads;
    for (int i = 1; i < blocks * lanes; ++i) threads.emplace_back(lane, i / lanes, i % lanes);
    lane(0, 0);
    for (std::thread& t : threads) t.join();
  };
  const bool hot =
      played == Played::kAsLaunched && jobs.size() == 1 &&
      kernel::with_hot_operation(channel, jobs[0], table, [&]<class Kind>(Kind kind) {
        play([&](const TwinMachine& machine, kernel::Peer* shared) {
          return kernel::run_jobs<Rules, Kind>(machine, ready, shared, jobs.data(), 1, table,
                                               [kind](auto& ex, auto& ch, const kernel::Job& job, kernel::PieceTable) {
                                                 return kernel::run_hot(ex, ch, job, kind);
                                               });
        });
      });
  if (hot) return well;
  play([&](const TwinMachine& machine, kernel::Peer* shared) {
    return kernel::run_jobs<Rules>(machine, ready, shared, jobs.data(), uint32_t(jobs.size()), table,
                                   [](auto& ex, auto& ch, const kernel::Job& job, kernel::PieceTable pieces) {
                                     return kernel::run_device_collective(ex, ch, job, pieces);
                                   });
  });
  return well;
}

/// The memory of all ranks of a channel, and threads that run their kernels.
class Twins {
 public:
  struct Shape {
    kernel::DeviceShape device;
    int lanes = 2;
    uint32_t first_epoch = 0;
    Stamp first_chunk = 0;
    bool (*apart)(int a, int b) = [](int, int) { return false; };  ///< pairs that use separate memory
    std::function<const kernel::PoolView*(int)> views = nullptr;   ///< of pools, by rank
  };

  explicit Twins(const Shape& shape) : shape_(shape), mischief_(shape.device.ranks) {
    const kernel::DeviceState state{shape.device};
    for (int r = 0; r < ranks(); ++r) {
      for (int sender = 0; sender < ranks(); ++sender)
        pads_.push_back(is_apart(r, sender) || r == sender ? make_pad() : Memory());
      states_.push_back(make(state.bytes()));
      controls_.push_back(std::make_unique<kernel::Control>());
    }
    for (int r = 0; r < ranks(); ++r) {
      std::vector<kernel::PeerPads> peers;
      for (int p = 0; p < ranks(); ++p) peers.push_back({meeting_place(p, r), meeting_place(r, p)});
      kernel::format_state(shape.device, shape.first_epoch, shape.first_chunk, peers.data(), states_[size_t(r)].get());
    }
  }

  int ranks() const { return int(shape_.device.ranks); }
  const kernel::DeviceShape& shape() const { return shape_.device; }
  kernel::Control& control(int rank) { return *controls_[size_t(rank)]; }
  Mischief& mischief(int rank) { return mischief_[size_t(rank)]; }
  kernel::RankState& state(int rank) { return *reinterpret_cast<kernel::RankState*>(states_[size_t(rank)].get()); }
  /// All of a rank's pad, as used by the ranks without separate memory.
  std::span<const std::byte> pad(int rank) const { return {memory(rank, rank).get(), pad_bytes()}; }
  kernel::DeviceChannel channel(int rank) {
    return {shape_.device, uint32_t(rank), states_[size_t(rank)].get(), controls_[size_t(rank)].get(),
            shape_.views ? shape_.views(rank) : nullptr};
  }
  bool guards_are_whole() const {
    const auto is_whole = [](const Memory& memory, size_t bytes) {
      return !memory || std::all_of(&memory[bytes], &memory[bytes + kGuard], [](std::byte b) { return b == kPaint; });
    };
    bool whole = true;
    for (const Memory& pad : pads_) whole = whole && is_whole(pad, pad_bytes());
    for (const Memory& state : states_) whole = whole && is_whole(state, kernel::DeviceState{shape_.device}.bytes());
    return whole;
  }
  /// Whether each pair has written only to its own memory.
  bool pairs_are_apart() const {
    const Memory fresh = make_pad();
    bool apart = true;
    for (int owner = 0; owner < ranks(); ++owner) {
      for (int i = 0; i < ranks() * ranks(); ++i) {
        const int seen_by = i / ranks(), writer = i % ranks();
        const Memory& here = memory(owner, seen_by);
        if (here && here.get() != meeting_place(owner, writer)) {
          for_each_cell(writer,
                        [&](size_t at, size_t n) { apart &= std::equal(&here[at], &here[at + n], &fresh[at]); });
        }
      }
    }
    return apart;
  }

  /// One kernel of one rank. Returns how many of its lanes succeeded.
  template <class Rules = kernel::PushRules>
  int launch(int rank, const std::vector<kernel::Job>& jobs, kernel::PieceTable table,
             Played played = Played::kAsLaunched) {
    return play_kernel<Rules>(channel(rank), jobs, table, shape_.lanes, mischief(rank), played);
  }
  int lanes_in_all() const { return int(shape_.device.blocks) * shape_.lanes; }

 private:
  static constexpr size_t kGuard = 4096;
  static constexpr std::byte kPaint{0xA5};
  struct Free {
    void operator()(std::byte* p) const { ::operator delete[](p, std::align_val_t(4096)); }
  };
  using Memory = std::unique_ptr<std::byte[], Free>;
  static Memory make(size_t bytes) {
    Memory memory(new (std::align_val_t(4096)) std::byte[bytes + kGuard]{});
    std::fill_n(&memory[bytes], kGuard, kPaint);
    return memory;
  }
  size_t pad_bytes() const { return kernel::DevicePad{shape_.device}.bytes(); }
  Memory make_pad() const {
    Memory pad = make(pad_bytes());
    kernel::format_pad(shape_.device, shape_.first_epoch, shape_.first_chunk, pad.get());
    return pad;
  }

  bool is_apart(int a, int b) const { return a != b && shape_.apart(std::min(a, b), std::max(a, b)); }
  const Memory& memory(int owner, int seen_by) const { return pads_[size_t(owner * ranks() + seen_by)]; }
  /// The memory that `sender` writes for `owner`.
  std::byte* meeting_place(int owner, int sender) const {
    return memory(owner, is_apart(owner, sender) ? sender : owner).get();
  }
  /// Calls what(offset, bytes) for all cells of a sender in a pad.
  template <class What>
  void for_each_cell(int sender, What what) const {
    const kernel::DevicePad pad{shape_.device};
    for (uint32_t part = 0; part < uint32_t(kernel::Part::kEnd); ++part) {
      for (uint32_t b = 0; b < shape_.device.blocks; ++b)
        what(pad.offset(kernel::Part(part), b, uint32_t(sender)), pad.cell(kernel::Part(part)));
    }
  }

  Shape shape_;
  std::vector<Mischief> mischief_;
  std::vector<Memory> pads_;  ///< by owner and viewer: its own, and a separate one where a peer uses one
  std::vector<Memory> states_;
  std::vector<std::unique_ptr<kernel::Control>> controls_;
};

}  // namespace nvx::test
