#pragma once

#include <atomic>
#include <cstring>
#include <memory>
#include <new>
#include <random>
#include <thread>
#include <vector>

#include "kernel/cpu/channel.h"
#include "kernel/cpu/host_collectives.h"
#include "kernel/cpu/run_on_cpu.h"

/// The kernels without a group: pads and staging of all ranks in plain memory, one channel each.
namespace nvx::test {

using kernel::Channel;
using kernel::CpuExec;

/// The memory of all ranks. Guard bytes that no kernel may write are checked.
class Channels {
 public:
  static constexpr size_t kLease = 24 << 10;  // small: a few KiB use several chunks

  explicit Channels(int ranks, uint32_t first_epoch = 0, size_t lease_bytes = kLease, bool rotates = true)
      : lease_bytes_(lease_bytes), rotates_(rotates) {
    const kernel::PadLayout layout{size_t(ranks)};
    for (int r = 0; r < ranks; ++r) {
      const size_t bytes = layout.bytes() + lease_bytes + kGuard;
      arenas_.emplace_back(new (std::align_val_t(4096)) std::byte[bytes]{});
      std::byte* base = arenas_.back().get();
      std::memset(base + layout.bytes() + lease_bytes, kPaint, kGuard);
      memory_.push_back({base, layout.bytes() + lease_bytes, base, [] { return everything(); }});
    }
    begin(first_epoch);
  }
  Channels(const Channels&) = delete;

  /// Resets everything except the contents of slots and staging.
  void begin(uint32_t first_epoch) {
    const kernel::PadLayout layout(memory_.size());
    channels_.clear();
    for (int r = 0; r < int(memory_.size()); ++r) {
      std::memset(memory_[size_t(r)].pad, 0, layout.slots());
      const kernel::Pad p = pad(r);
      for (Flag* flag : {&p.done(), &p.staged(), &p.reduced(), &p.fetched()}) flag->value = stamp(first_epoch, 0);
      for (uint32_t e = 0; e < kernel::kEpochs; ++e) p.arrival(e).flag.value = stamp(first_epoch, 0);
      channels_.push_back(std::make_unique<Channel>(r, memory_, first_epoch, rotates_));
      lease(r);
    }
  }

  /// The rank stages its data, as it does unless it lends data.
  void lease(int rank) { (*this)[rank].lease(kernel::PadLayout(memory_.size()).bytes(), lease_bytes_); }
  /// The rank lends its data, which may be anywhere, in an algorithm that leases.
  void lend(int rank, const std::byte* data) {
    (*this)[rank].lend(uintptr_t(data) - uintptr_t(everything().data()), lease_bytes_);
  }

  int size() const { return int(channels_.size()); }
  Channel& operator[](int rank) { return *channels_[size_t(rank)]; }
  std::span<const kernel::PeerMemory> memory() const { return memory_; }
  kernel::Pad pad(int rank) { return {memory_[size_t(rank)].pad, memory_.size()}; }

  bool guards_are_whole() const {
    for (const kernel::PeerMemory& memory : memory_) {
      for (size_t i = 0; i < kGuard; ++i) {
        if (memory.arena[memory.arena_bytes + i] != std::byte(kPaint)) return false;
      }
    }
    return true;
  }

 private:
  static std::span<std::byte> everything() { return {reinterpret_cast<std::byte*>(4096), size_t(1) << 62}; }

  static constexpr size_t kGuard = 4096;
  static constexpr int kPaint = 0xA5;
  struct Free {
    void operator()(std::byte* p) const { ::operator delete[](p, std::align_val_t(4096)); }
  };

  size_t lease_bytes_;
  bool rotates_;
  std::vector<std::unique_ptr<std::byte[], Free>> arenas_;
  std::vector<kernel::PeerMemory> memory_;
  std::vector<std::unique_ptr<Channel>> channels_;
};

/// An Exec with random delays before its operations, so that ranks arrive in every order.
class SlowExec : public CpuExec {
 public:
  SlowExec(const CpuExec& plain, uint32_t seed) : CpuExec(plain), random_(seed) {}

  void signal(Flag& flag, Stamp value) {
    delay_randomly();
    CpuExec::signal(flag, value);
  }
  bool wait(Flag& flag, Stamp want, int peer) {
    delay_randomly();
    return CpuExec::wait(flag, want, peer);
  }
  void copy(void* dst, const void* src, size_t bytes) {
    delay_randomly();
    CpuExec::copy(dst, src, bytes);
  }
  void reduce(void* dst, const void* const* srcs, int ranks, size_t n) {
    delay_randomly();
    CpuExec::reduce(dst, srcs, ranks, n);
  }

 private:
  void delay_randomly() {
    const uint32_t die = random_() % 8;
    if (die == 0) std::this_thread::sleep_for(std::chrono::microseconds(random_() % 300));
    if (die == 1) std::this_thread::yield();
  }

  std::minstd_rand random_;
};

/// A watch that alarms on request.
class Alarm : public Watch {
 public:
  bool should_abort(int) override { return on.load(); }
  void record_abort(int) override { ++recorded; }
  std::atomic<bool> on{false};
  std::atomic<int> recorded{0};
};

inline WaitRules rules_of(std::chrono::milliseconds span, Watch* watch = nullptr) {
  return {Deadline::after(span), {}, watch};
}

}  // namespace nvx::test
