#pragma once

#include <algorithm>
#include <functional>
#include <memory>
#include <new>
#include <span>
#include <vector>

#include "kernel/gpu/device_collectives.h"
#include "kernel/gpu/launch_cuda.h"
#include "kernel/gpu/signals.h"

/// The device algorithms without a device: each lane of each block of each rank is a host thread. Pads, states, epochs
/// and counters are the device's; only the Machine of a lane differs.
namespace nvx::test {

/// A deliberate fault, and its lane.
struct InjectedFault {
  enum class Kind { kNone, kNoSync, kLoneVerdicts, kLostSignal, kRelaxedSignal } kind = Kind::kNone;
  uint32_t delay_us = 0;  ///< the longest random delay of this rank before its operations; 0: none
  uint64_t seed = 0;
  uint32_t abort_at = 0;  ///< the check of the host just before which its abort word is set; 0: none
  /// The effect on a packet or a flag that is stored there.
  enum class Store { kPacket, kFlag };
  enum class Effect { kStored, kDropped, kCorrupted };
  std::function<Effect(Store, const void*)> effect = nullptr;
  /// The bytes of all ranks at an address of a multicast object.
  std::function<std::vector<std::byte*>(const void*)> parts = nullptr;
  bool adds_wrongly = false;                      ///< the switch
  std::function<void(uint32_t)> holds = nullptr;  ///< a lane calls it before it reports the result of its n-th await
};

/// The rules of the kernel that a thread simulates. As variables, all rules share one compilation of the kernels.
struct LaneRules {
  static inline thread_local uint32_t kSlots, kStampMask, kRestampEvery;
  static inline thread_local bool kCredits, kMeets, kAnnouncedFirst, kReachIsAnnounced, kReachEnds, kReadersFirst,
      kReportsFailure;

  template <class Rules>
  static void follow() {
    kSlots = Rules::kSlots, kStampMask = Rules::kStampMask, kRestampEvery = Rules::kRestampEvery;
    kCredits = Rules::kCredits, kMeets = Rules::kMeets;
    kAnnouncedFirst = Rules::kAnnouncedFirst, kReachIsAnnounced = Rules::kReachIsAnnounced,
    kReachEnds = Rules::kReachEnds;
    kReadersFirst = Rules::kReadersFirst, kReportsFailure = Rules::kReportsFailure;
  }
};

/// The kernel that a launch simulates: the hot one where there is one, as launches choose, or the general one.
enum class KernelChoice { kAsLaunched, kGeneral };

/// One kernel of one rank: runs jobs in order, with all lanes of all blocks at once. Returns how many lanes succeeded.
int simulate_kernel(const kernel::DeviceChannel& channel, std::span<const kernel::Job> jobs, kernel::PieceTable table,
                    int lanes, const InjectedFault& fault = {}, KernelChoice choice = KernelChoice::kAsLaunched,
                    void (*follow_rules)() = LaneRules::follow<kernel::PushRules>);

/// One kernel of reduce_multicast() of one rank, likewise. `fault.parts` is the switch.
int simulate_multicast(const kernel::DeviceChannel& channel, const kernel::Job& job, const kernel::MulticastView& view,
                       int lanes, const InjectedFault& fault,
                       void (*follow_rules)() = LaneRules::follow<kernel::PushRules>);

/// The kernel of signals, on this thread. False if it gave up.
bool simulate_signals(const kernel::DeviceChannel& channel, const kernel::SignalJob& job);

/// The memory of all ranks of a channel, and threads that run their kernels.
class SimulatedDevices {
 public:
  struct Shape {
    kernel::DeviceShape device;
    int lanes = 2;
    uint32_t first_epoch = 0;
    Stamp first_chunk = 0;
    bool (*apart)(int a, int b) = [](int, int) { return false; };  ///< pairs that use separate memory
    std::function<const kernel::PoolView*(int)> views = nullptr;   ///< of pools, by rank
  };

  explicit SimulatedDevices(const Shape& shape) : shape_(shape), faults_(shape.device.ranks) {
    const kernel::DeviceState state{shape.device};
    for (int r = 0; r < ranks(); ++r) {
      for (int sender = 0; sender < ranks(); ++sender)
        pads_.push_back(is_apart(r, sender) || r == sender ? make_pad() : Memory());
      states_.push_back(make(state.bytes()));
      controls_.push_back(std::make_unique<kernel::Control>());
    }
    for (int r = 0; r < ranks(); ++r) {
      std::vector<kernel::PeerPads> peers;
      for (int p = 0; p < ranks(); ++p) peers.push_back({shared_pad(p, r), shared_pad(r, p)});
      kernel::format_state(shape.device, shape.first_epoch, shape.first_chunk, peers.data(), states_[size_t(r)].get());
    }
  }

  int ranks() const { return int(shape_.device.ranks); }
  const kernel::DeviceShape& shape() const { return shape_.device; }
  kernel::Control& control(int rank) { return *controls_[size_t(rank)]; }
  InjectedFault& fault(int rank) { return faults_[size_t(rank)]; }
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
        if (here && here.get() != shared_pad(owner, writer)) {
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
             KernelChoice choice = KernelChoice::kAsLaunched) {
    return simulate_kernel(channel(rank), jobs, table, shape_.lanes, fault(rank), choice, LaneRules::follow<Rules>);
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
  std::byte* shared_pad(int owner, int sender) const {
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
  std::vector<InjectedFault> faults_;
  std::vector<Memory> pads_;  ///< by owner and viewer: its own, and a separate one where a peer uses one
  std::vector<Memory> states_;
  std::vector<std::unique_ptr<kernel::Control>> controls_;
};

}  // namespace nvx::test
