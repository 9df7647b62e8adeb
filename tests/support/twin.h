#pragma once

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

#include "kernel/pushed.h"

/// The pushed algorithms without a device: each lane of each block of each rank is a thread of the host. Pads, states,
/// epochs and counters are the device's; only what a lane is made of differs.
namespace nvx::test {

/// Where the lanes of a tile meet.
class Crossing {
 public:
  explicit Crossing(int lanes) : lanes_(lanes) {}

  /// Returns on all lanes when all have come: whether all said yes.
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

 private:
  const int lanes_;
  std::mutex mutex_;
  std::condition_variable met_;
  int came_ = 0;
  bool all_ = true;
  bool verdict_ = true;
  uint64_t round_ = 0;
};

/// What may be done wrong on purpose, and by whom.
struct Mischief {
  enum class Kind { kNone, kNoSync, kLostSignal } kind = Kind::kNone;
  uint32_t dawdle_us = 0;  ///< the most that this rank dawdles before its verbs; 0: never
  uint64_t seed = 0;
};

class TwinMachine {
 public:
  static constexpr uint32_t kGlance = 8, kLook = 16;

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
    if (mischief_.kind != Mischief::Kind::kNoSync) crossing_.meet(true);
  }
  bool all(bool mine) const {
    dawdle();
    return crossing_.meet(mine);
  }

  kernel::Packet peek_packet(const kernel::Packet* from) const {
    auto* p = const_cast<kernel::Packet*>(from);
    return {{std::atomic_ref(p->halves[0]).load(std::memory_order_relaxed),
             std::atomic_ref(p->halves[1]).load(std::memory_order_relaxed)}};
  }
  void put_packet(kernel::Packet* to, const kernel::Packet& p) const {
    dawdle();
    std::atomic_ref(to->halves[1]).store(p.halves[1], std::memory_order_relaxed);
    std::atomic_ref(to->halves[0]).store(p.halves[0], std::memory_order_relaxed);
  }

  template <class Word, class Value>
  void signal(Word& at, Value value) const {
    dawdle();
    if (mischief_.kind == Mischief::Kind::kLostSignal) return;
    std::atomic_ref(at).store(value, std::memory_order_release);
  }
  Stamp acquire(const Stamp& at) const {
    return std::atomic_ref(const_cast<Stamp&>(at)).load(std::memory_order_acquire);
  }
  uint32_t load_host(const uint32_t& at) const { return load(at); }

  uint32_t load(const uint32_t& at) const {
    return std::atomic_ref(const_cast<uint32_t&>(at)).load(std::memory_order_relaxed);
  }
  void store(uint32_t& at, uint32_t value) const { std::atomic_ref(at).store(value, std::memory_order_relaxed); }
  bool claim(uint32_t& at) const {
    uint32_t free = 0;
    return std::atomic_ref(at).compare_exchange_strong(free, 1);
  }
  uint32_t add(uint32_t& at) const { return std::atomic_ref(at).fetch_add(1, std::memory_order_acq_rel); }

  uint64_t now_ns() const { return uint64_t(std::chrono::steady_clock::now().time_since_epoch().count()); }
  void relax() const { std::this_thread::yield(); }

 private:
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
};

using TwinExec = kernel::TileExec<TwinMachine>;

/// The memory of all ranks of a channel, and threads that play their kernels.
class Twins {
 public:
  struct Shape {
    kernel::DeviceShape device;
    int lanes = 2;
    uint32_t first_epoch = 0;
    Stamp first_chunk = 0;
  };

  explicit Twins(const Shape& shape) : shape_(shape), mischief_(shape.device.ranks) {
    const kernel::DevicePad pad{shape.device};
    const kernel::DeviceState state{shape.device};
    for (uint32_t r = 0; r < shape.device.ranks; ++r) {
      pads_.push_back(make(pad.bytes() + kGuard));
      states_.push_back(make(state.bytes() + kGuard));
      std::memset(pads_[r].get() + pad.bytes(), kPaint, kGuard);
      std::memset(states_[r].get() + state.bytes(), kPaint, kGuard);
      controls_.push_back(std::make_unique<kernel::Control>());
      raw_pads_.push_back(pads_[r].get());
    }
    for (uint32_t r = 0; r < shape.device.ranks; ++r) {
      kernel::format_pad(shape.device, shape.first_epoch, shape.first_chunk, pads_[r].get());
      kernel::format_state(shape.device, shape.first_epoch, shape.first_chunk, raw_pads_.data(), states_[r].get());
    }
  }

  int ranks() const { return int(shape_.device.ranks); }
  const kernel::DeviceShape& shape() const { return shape_.device; }
  kernel::Control& control(int rank) { return *controls_[size_t(rank)]; }
  Mischief& mischief(int rank) { return mischief_[size_t(rank)]; }
  kernel::RankState& state(int rank) { return *reinterpret_cast<kernel::RankState*>(states_[size_t(rank)].get()); }
  /// All of a rank's pad.
  std::span<const std::byte> pad(int rank) const {
    return {pads_[size_t(rank)].get(), kernel::DevicePad{shape_.device}.bytes()};
  }
  kernel::DeviceChannel channel(int rank) {
    return {shape_.device, uint32_t(rank), states_[size_t(rank)].get(), controls_[size_t(rank)].get()};
  }
  bool guards_are_whole() const {
    const kernel::DevicePad pad{shape_.device};
    const kernel::DeviceState state{shape_.device};
    for (size_t r = 0; r < pads_.size(); ++r) {
      for (size_t i = 0; i < kGuard; ++i) {
        if (pads_[r][pad.bytes() + i] != std::byte(kPaint) || states_[r][state.bytes() + i] != std::byte(kPaint))
          return false;
      }
    }
    return true;
  }

  /// One kernel of one rank: jobs one after the other, by all lanes of all blocks at once. How many lanes said that it
  /// ended well.
  template <class Rules = kernel::PushRules>
  int launch(int rank, const std::vector<kernel::Job>& jobs, kernel::PieceTable table) {
    const kernel::DeviceChannel at = channel(rank);
    const int blocks = int(shape_.device.blocks), lanes = shape_.lanes;
    std::vector<std::unique_ptr<Crossing>> crossings;
    for (int b = 0; b < blocks; ++b) crossings.push_back(std::make_unique<Crossing>(lanes));
    std::atomic<int> well{0};
    const auto lane = [&](int b, int l) {
      const TwinMachine machine(b, blocks, l, lanes, *crossings[size_t(b)], mischief(rank));
      const auto run = [](auto& ex, auto& ch, const kernel::Job& job, kernel::PieceTable pieces) {
        return kernel::run_pushed(ex, ch, job, pieces);
      };
      well += kernel::run_jobs<Rules>(machine, at, jobs.data(), uint32_t(jobs.size()), table, run);
    };
    std::vector<std::thread> threads;
    for (int i = 1; i < blocks * lanes; ++i) threads.emplace_back(lane, i / lanes, i % lanes);
    lane(0, 0);
    for (std::thread& t : threads) t.join();
    return well;
  }
  int lanes_in_all() const { return int(shape_.device.blocks) * shape_.lanes; }

 private:
  static constexpr size_t kGuard = 4096;
  static constexpr int kPaint = 0xA5;
  struct Free {
    void operator()(std::byte* p) const { ::operator delete[](p, std::align_val_t(4096)); }
  };
  using Memory = std::unique_ptr<std::byte[], Free>;
  static Memory make(size_t bytes) { return Memory(new (std::align_val_t(4096)) std::byte[bytes]{}); }

  Shape shape_;
  std::vector<Mischief> mischief_;
  std::vector<Memory> pads_, states_;
  std::vector<std::unique_ptr<kernel::Control>> controls_;
  std::vector<std::byte*> raw_pads_;
};

}  // namespace nvx::test
