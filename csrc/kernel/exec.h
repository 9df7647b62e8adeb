#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "base/flag.h"
#include "kernel/device_pad.h"
#include "kernel/level.h"
#include "kernel/verdict.h"

#if defined(__CUDACC__)
#include <cuda/atomic>
#define NVX_HD __host__ __device__
#define NVX_APART __host__ __device__ __noinline__
#else
#define NVX_HD
#define NVX_APART __attribute__((noinline))
#endif
// NVX_APART: compiled once for all kernels, which would take minutes each otherwise.

namespace nvx::kernel {

/// The verbs of an algorithm, played by one thread of the host: one tile of one lane, bulk work by the level's wide
/// loops.
class CpuExec {
 public:
  CpuExec(size_t width, ReduceFn reduce, const double* factors, const WaitRules& rules)
      : level_(level()), width_(width), reduce_(reduce), factors_(factors), rules_(rules) {}

  int lane() const { return 0; }
  int lanes() const { return 1; }
  int tile() const { return 0; }
  int tiles() const { return 1; }
  void sync() const {}
  bool all(bool mine) const { return mine; }

  /// Bytes of one element.
  size_t width() const { return width_; }

  void signal(Flag& flag, Stamp value) const { nvx::signal(flag, value); }

  /// False when the wait ended without the stamp; the verdict then says why, and the algorithm must return.
  bool wait(Flag& flag, Stamp want, int peer) {
    if (reached(flag.value.load(std::memory_order_seq_cst), want)) return true;
    const auto began = measures_ ? Clock::now() : Clock::time_point();
    const Waited how = nvx::wait(flag, want, peer, rules_);
    if (measures_) waited_ += Clock::now() - began;
    if (how == Waited::kReached) return true;
    verdict_ = {Verdict::Cause::kWait, how, peer, want, flag.value.load(std::memory_order_relaxed), 0, 0};
    return false;
  }

  void copy(void* dst, const void* src, size_t bytes) const {
    if (bytes != 0 && dst != src) keep_(dst, src, bytes);
  }

  /// Copies to where other ranks will read.
  void stage(void* dst, const void* src, size_t bytes) const {
    if (bytes != 0) stage_(dst, src, bytes);
  }

  /// Which way stage() goes from now on, where the machine has two.
  void stage_by(Way way) { stage_ = level_.copy_by(way); }
  /// Which way copy() goes from now on: to where this rank alone will read.
  void keep_by(Way way) { keep_ = level_.copy_by(way); }
  bool has_ways() const { return level_.copy_past != nullptr; }

  /// Tells from now on how long waits take.
  void measure() { measures_ = true; }
  Clock::duration waited() const { return waited_; }

  /// dst[i] = op over the ranks' srcs, in absolute rank order, rounded once.
  void reduce(void* dst, const void* const* srcs, int ranks, size_t n) const {
    if (n != 0) reduce_(dst, srcs, ranks, n, factors_);
  }

  bool fail(const Verdict& verdict) {
    verdict_ = verdict;
    return false;
  }
  const Verdict& verdict() const { return verdict_; }

  /// Bytes after which alternating between two bulk verbs keeps the data in the nearest cache.
  static constexpr size_t kBlock = 16 << 10;

 private:
  const Level& level_;
  size_t width_;
  ReduceFn reduce_;
  const double* factors_;
  const WaitRules& rules_;
  CopyFn stage_ = level_.copy;
  CopyFn keep_ = level_.copy;
  bool measures_ = false;
  Clock::duration waited_{};
  Verdict verdict_;
};

/// What a lane waits for, and what it has seen instead.
struct Awaited {
  int peer;
  Stamp wanted;
  Stamp seen;
};

/// What two ranks that do not agree have said to each other.
struct Quarrel {
  uint64_t mine[kGreetingWords];
  uint64_t theirs[kGreetingWords];
};

/// The verbs of the pushed algorithms (kernel/pushed.h), for one lane of a tile of many. Machine is what a lane is made
/// of: a thread of a CUDA block, or a thread of the host that plays one. A wait is one lane's, and ends; what it means
/// for the tile, the tile decides with all().
template <class Machine>
class TileExec : public Machine {
 public:
  /// call: what verdicts name the operation by.
  NVX_HD TileExec(const Machine& machine, RankState* rank, Control* control, uint64_t patience_ns, uint32_t call)
      : Machine(machine),
        rank_(rank),
        control_(control),
        patience_ns_(patience_ns),
        call_(call),
        began_ns_(Machine::now_ns()),
        next_look_ns_(began_ns_ + Machine::kLookNs) {}

  /// The host's abort word, for one lane of the tile; 0 for the others. Worth asking for early: it comes over the bus.
  NVX_HD uint32_t ask_host() const { return is_lookout() ? Machine::load_host(control_->abort) : 0; }

  /// How far a peer's pool is mapped, for any lane. Worth asking for as early. base never changes once it is there, and
  /// mapped only grows: the two need not be of one moment.
  NVX_HD PoolView ask_host(const PoolView& at) const {
    return {Machine::load_host(at.base), Machine::load_host(at.mapped)};
  }

  /// Opens an operation, which verdicts name by its epoch, and tells the host so. A lane's verdict: false where its
  /// rank has failed before, or the host has said not to begin.
  NVX_HD bool begin(uint32_t epoch, uint32_t abort) {
    epoch_ = epoch;
    if (is_lookout() && Machine::tile() == 0) Machine::store_host(control_->begun, epoch);
    return !has_failed() && (abort == 0 || fail(alarm()));
  }

  /// For between chunks, where no wait may come to look around. A lane's verdict.
  NVX_HD bool goes_on() {
    if (!is_lookout()) return true;
    return !has_failed() && (!hears_abort(Machine::now_ns()) || fail(alarm()));
  }

  /// Until ready() holds. False: it does not, and the verdict says why.
  template <class Ready>
  NVX_HD bool wait(Awaited& awaited, Ready ready) {
    for (uint32_t turn = 1; !ready(); ++turn) {
      Machine::relax();
      if (turn % Machine::kGlance != 0) continue;
      const Waited end = look();
      if (end == Waited::kReached) continue;
      return ready() || fail({Verdict::Cause::kWait, end, awaited.peer, awaited.wanted, awaited.seen, 0, 0});
    }
    return true;
  }

  /// Until a peer has raised its counter that far. What it wrote before is then visible to this lane, and to the tile
  /// once they have met.
  NVX_HD bool wait_for(const Stamp& counter, Stamp want, int peer, Stamp* seen = nullptr) {
    Awaited awaited{peer, want, 0};
    const bool ok = wait(awaited, [&] { return reached(awaited.seen = Machine::acquire(counter), want); });
    if (seen) *seen = awaited.seen;
    return ok;
  }

  /// Keeps the verdict if it is the rank's first, and so ends the waits of all its lanes. Always false.
  NVX_APART bool fail(const Verdict& verdict, const Quarrel* quarrel = nullptr) {
    if (!Machine::claim(rank_->failed)) return false;
    DeviceVerdict& told = control_->verdict;
    told.cause = verdict.cause;
    told.how = verdict.how;
    told.peer = verdict.peer;
    told.block = uint32_t(Machine::tile());
    told.epoch = epoch_;
    told.call = call_;
    told.wanted = verdict.wanted;
    told.seen = verdict.seen;
    for (uint32_t i = 0; quarrel && i < kGreetingWords; ++i) {
      told.mine[i] = quarrel->mine[i];
      told.theirs[i] = quarrel->theirs[i];
    }
    Machine::signal(told.state, DeviceVerdict::kReadable);
    return false;
  }

  /// Pieces that go without staging: the first block counts them.
  NVX_HD void count_direct(uint32_t pieces) {
    if (pieces != 0 && Machine::tile() == 0) Machine::add(rank_->direct, pieces);
  }

  /// By one lane of each block, once a launch. The last of them tells the host that this epoch has ended, and before
  /// that how many operations of the launch a graph has begun.
  NVX_HD void count_out(uint32_t epoch, uint32_t replayed) {
    if (Machine::add(rank_->left) + 1 != uint32_t(Machine::tiles())) return;
    Machine::store(rank_->left, 0);
    if (replayed != 0) {
      Machine::store(rank_->replayed, Machine::load(rank_->replayed) + replayed);
      Machine::signal(control_->replayed, Machine::load(rank_->replayed));
    }
    if (Machine::load(rank_->direct) != 0) Machine::store_host(control_->direct, Machine::load(rank_->direct));
    Machine::signal(control_->finished, epoch);
  }

 private:
  NVX_HD static Verdict alarm() { return {Verdict::Cause::kWait, Waited::kAlarmed, -1, 0, 0, 0, 0}; }

  /// Another block of this rank has failed, or another lane, or an operation before this one.
  NVX_HD bool has_failed() const { return Machine::load(rank_->failed) != 0; }
  /// The one lane that looks around for the tile when all lanes come by. The last one has the least to do.
  NVX_HD bool is_lookout() const { return Machine::lane() == Machine::lanes() - 1; }

  /// Whether the host wants this to end, as far as it is due to be asked.
  NVX_HD bool hears_abort(uint64_t now_ns) {
    if (now_ns < next_look_ns_) return false;
    next_look_ns_ = now_ns + Machine::kLookNs;
    return Machine::load_host(control_->abort) != 0;
  }

  /// Whether to give up a wait; kReached: not yet. Each lane that waits looks at its rank, and one of those that wait
  /// together at the clock and the host too: what it finds fails the rank, which is how the others learn of it.
  NVX_APART Waited look() {
    if (has_failed()) return Waited::kAlarmed;
    if (!Machine::speaks()) return Waited::kReached;
    const uint64_t now_ns = Machine::now_ns();
    if (hears_abort(now_ns)) return Waited::kAlarmed;
    const bool late = patience_ns_ != 0 && now_ns - began_ns_ > patience_ns_;
    return late ? Waited::kTimedOut : Waited::kReached;
  }

  RankState* rank_;
  Control* control_;
  uint64_t patience_ns_;
  uint32_t call_;
  uint64_t began_ns_;
  uint64_t next_look_ns_;
  uint32_t epoch_ = 0;
};

#if defined(__CUDACC__)
/// A thread of a CUDA block. A rank's blocks may be some of a grid's.
class CudaMachine {
 public:
  static constexpr uint32_t kGlance = 32;       ///< turns of a wait after which it looks around
  static constexpr uint64_t kLookNs = 100'000;  ///< after which a lane that does looks across the bus, at the host

  __device__ CudaMachine(int tile, int tiles) : tile_(tile), tiles_(tiles) {}

  __device__ int lane() const { return int(threadIdx.x); }
  __device__ int lanes() const { return int(blockDim.x); }
  __device__ int tile() const { return tile_; }
  __device__ int tiles() const { return tiles_; }
  __device__ void sync() const { __syncthreads(); }
  __device__ bool all(bool mine) const { return __syncthreads_and(mine); }
  /// For one of those lanes of a warp that are here at once, whichever they are: who waits alone speaks for itself.
  __device__ bool speaks() const { return int(threadIdx.x % warpSize) == __ffs(int(__activemask())) - 1; }

  /// Both halves in one access of 16 bytes, which promises no more than each half's being whole.
  __device__ Packet peek_packet(const Packet* from) const {
    Packet p;
    asm volatile("ld.relaxed.sys.v2.u64 {%0, %1}, [%2];" : "=l"(p.halves[0]), "=l"(p.halves[1]) : "l"(from) : "memory");
    return p;
  }
  __device__ void put_packet(Packet* to, const Packet& p) const {
    asm volatile("st.relaxed.sys.v2.u64 [%0], {%1, %2};" ::"l"(to), "l"(p.halves[0]), "l"(p.halves[1]) : "memory");
  }

  /// What this lane's tile wrote before it last met is visible to whoever acquires the value, on any device.
  __device__ void signal(Stamp& at, Stamp value) const {
    system_ref<Stamp>(at).store(value, cuda::std::memory_order_release);
  }
  __device__ void signal(uint32_t& at, uint32_t value) const {
    system_ref<uint32_t>(at).store(value, cuda::std::memory_order_release);
  }
  __device__ Stamp acquire(const Stamp& at) const {
    return system_ref<Stamp>(const_cast<Stamp&>(at)).load(cuda::std::memory_order_acquire);
  }
  template <class Word>
  __device__ Word load_host(const Word& at) const {
    return system_ref<Word>(const_cast<Word&>(at)).load(cuda::std::memory_order_relaxed);
  }
  __device__ void store_host(uint32_t& at, uint32_t value) const {
    system_ref<uint32_t>(at).store(value, cuda::std::memory_order_relaxed);
  }

  // Among the blocks of this rank.
  __device__ uint32_t load(const uint32_t& at) const {
    return device_ref(const_cast<uint32_t&>(at)).load(cuda::std::memory_order_relaxed);
  }
  __device__ void store(uint32_t& at, uint32_t value) const {
    device_ref(at).store(value, cuda::std::memory_order_relaxed);
  }
  __device__ bool claim(uint32_t& at) const {
    uint32_t free = 0;
    return device_ref(at).compare_exchange_strong(free, 1, cuda::std::memory_order_acq_rel,
                                                  cuda::std::memory_order_relaxed);
  }
  __device__ uint32_t add(uint32_t& at, uint32_t n = 1) const {
    return device_ref(at).fetch_add(n, cuda::std::memory_order_acq_rel);
  }

  __device__ uint64_t now_ns() const {
    uint64_t ns;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(ns));
    return ns;
  }
  __device__ void relax() const {}

 private:
  template <class Word>
  using system_ref = cuda::atomic_ref<Word, cuda::thread_scope_system>;
  using device_ref = cuda::atomic_ref<uint32_t, cuda::thread_scope_device>;

  int tile_;
  int tiles_;
};

using CudaExec = TileExec<CudaMachine>;
#endif

}  // namespace nvx::kernel
