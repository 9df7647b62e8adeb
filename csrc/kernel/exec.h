#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "base/flag.h"
#include "kernel/gpu/device_pad.h"
#include "kernel/reduce/level.h"
#include "kernel/verdict.h"

#if defined(__CUDACC__)
#include <cuda/atomic>
#define NVX_HD __host__ __device__
#define NVX_APART __host__ __device__ __noinline__
#else
#define NVX_HD
#define NVX_APART __attribute__((noinline))
#endif
// NVX_APART marks functions that are not inlined, so that they are compiled once for all kernels: otherwise each kernel
// would take minutes to compile.

namespace nvx::kernel {

/// The verbs of the CPU's algorithms (kernel/cpu/direct.h), for the one thread of the host that a rank runs them on.
/// Bulk work is done by the wide loops of the instruction-set level (kernel/reduce/level.h).
class CpuExec {
 public:
  CpuExec(size_t width, ReduceFn reduce, const double* factors, const WaitRules& rules)
      : level_(level()), width_(width), reduce_(reduce), factors_(factors), rules_(rules) {}

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
    verdict_ = Verdict::wait(how, peer, want, flag.value.load(std::memory_order_relaxed));
    return false;
  }

  void copy(void* dst, const void* src, size_t bytes) const {
    if (bytes != 0 && dst != src) keep_(dst, src, bytes);
  }

  /// Copies to where other ranks will read.
  void stage(void* dst, const void* src, size_t bytes) const {
    if (bytes != 0) stage_(dst, src, bytes);
  }

  /// How stage() writes from now on, on a machine that has both policies.
  void stage_by(CachePolicy policy) { stage_ = level_.copy_by(policy); }
  /// How copy() writes from now on: to memory that this rank alone will read.
  void keep_by(CachePolicy policy) { keep_ = level_.copy_by(policy); }
  bool stages_past() const { return stage_ == level_.copy_past; }
  bool has_choice() const { return level_.copy_past != nullptr; }

  /// From now on waits are timed, for waited().
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

  /// Callers that run two bulk verbs over the same data alternate between them after this many bytes, so that the
  /// second finds the data in the nearest cache.
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
struct PendingWait {
  int peer;
  Stamp wanted;
  Stamp seen;
};

/// The greetings of two ranks that do not agree.
struct Quarrel {
  uint64_t mine[kGreetingWords];
  uint64_t theirs[kGreetingWords];
};

/// The verbs of the device algorithms (kernel/gpu/device_collectives.h), for one lane of a tile of many. Machine is
/// what a lane is made of: a thread of a CUDA block, or a thread of the host that plays one. Each lane waits for
/// itself, and every wait ends; what that means for the tile, its lanes decide together by all().
template <class Machine>
class TileExec : public Machine {
 public:
  /// call: the number by which verdicts name the operation.
  NVX_HD TileExec(const Machine& machine, RankState* rank, Control* control, uint64_t patience_ns, uint32_t call)
      : Machine(machine),
        rank_(rank),
        control_(control),
        patience_ns_(patience_ns),
        call_(call),
        began_ns_(Machine::now_ns()),
        next_look_ns_(began_ns_ + Machine::kLookNs) {}

  /// The host's abort word, read by one lane of the tile; the other lanes get 0. Ask early, as the answer has to come
  /// over the bus.
  NVX_HD uint32_t ask_host() const { return is_lookout() ? Machine::load_host(control_->abort) : 0; }

  /// How far a peer's pool is mapped; any lane may ask. Ask as early as for the abort word. base never changes once it
  /// is set and mapped only grows, so the two need not be read at the same moment.
  NVX_HD PoolView ask_host(const PoolView& at) const {
    return {Machine::load_host(at.base), Machine::load_host(at.mapped)};
  }

  /// Opens an operation and tells the host so; verdicts name it by this epoch. The answer is this lane's alone: false
  /// where its rank has failed before, or where the host has asked not to begin.
  NVX_HD bool begin(uint32_t epoch, uint32_t abort) {
    epoch_ = epoch;
    if (is_lookout() && Machine::tile() == 0) Machine::store_host(control_->begun, epoch);
    return !has_failed() && (abort == 0 || fail(alarm()));
  }

  /// To be asked between chunks, as there may be no wait there that would notice a failure or an abort. The answer is
  /// this lane's alone.
  NVX_HD bool goes_on() {
    if (!is_lookout()) return true;
    return !has_failed() && (!hears_abort(Machine::now_ns()) || fail(alarm()));
  }

  /// Waits until ready() holds. False if the wait ended otherwise; the verdict then says why.
  template <class Ready>
  NVX_HD bool wait(PendingWait& pending, Ready ready) {
    for (uint32_t turn = 1; !ready(); ++turn) {
      Machine::relax();
      if (turn % Machine::kGlance != 0) continue;
      const Waited end = look();
      if (end == Waited::kReached) continue;
      return ready() || fail(Verdict::wait(end, pending.peer, pending.wanted, pending.seen));
    }
    return true;
  }

  /// Waits until a peer has raised its counter that far. What the peer had written before is then visible to this lane,
  /// and to the other lanes of the tile after their next sync() or all().
  NVX_HD bool wait_for(const Stamp& counter, Stamp want, int peer, Stamp* seen = nullptr) {
    PendingWait pending{peer, want, 0};
    const bool ok = wait(pending, [&] { return reached(pending.seen = Machine::acquire(counter), want); });
    if (seen) *seen = pending.seen;
    return ok;
  }

  /// Records the verdict if it is the rank's first, which also ends the waits of all of the rank's lanes. Always
  /// returns false.
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

  /// Counts pieces that go without staging. Only the first block does, as each block has a share of every piece.
  NVX_HD void count_direct(uint32_t pieces) {
    if (pieces != 0 && Machine::tile() == 0) Machine::add(rank_->direct, pieces);
  }

  /// Called by one lane of each block, once a launch. The last block tells the host that this epoch has ended; before
  /// that, where a graph has begun the launch, it adds its operations to the count of replayed ones. told: see
  /// DeviceChannel.
  NVX_HD void count_out(uint32_t epoch, uint32_t replayed, Stamp* told, Stamp tells) {
    if (Machine::add(rank_->left) + 1 != uint32_t(Machine::tiles())) return;
    Machine::store(rank_->left, 0);
    if (replayed != 0) {
      Machine::store(rank_->replayed, Machine::load(rank_->replayed) + replayed);
      Machine::signal(control_->replayed, Machine::load(rank_->replayed));
    }
    if (Machine::load(rank_->direct) != 0) Machine::store_host(control_->direct, Machine::load(rank_->direct));
    Machine::signal(control_->finished, epoch);
    if (told) Machine::signal(*told, tells);
  }

 private:
  NVX_HD static Verdict alarm() { return Verdict::wait(Waited::kAlarmed, -1, 0, 0); }

  /// Whether this rank has failed: in this block or another one, in this operation or an earlier one.
  NVX_HD bool has_failed() const { return Machine::load(rank_->failed) != 0; }
  /// Whether this is the lane that looks around for the tile where all lanes pass. It is the last one, which has the
  /// least to do.
  NVX_HD bool is_lookout() const { return Machine::lane() == Machine::lanes() - 1; }

  /// Whether the host wants the operation to end. The host is really asked once every kLookNs only.
  NVX_HD bool hears_abort(uint64_t now_ns) {
    if (now_ns < next_look_ns_) return false;
    next_look_ns_ = now_ns + Machine::kLookNs;
    return Machine::load_host(control_->abort) != 0;
  }

  /// Whether to give up a wait. kReached: keep waiting. Each waiting lane checks whether its rank failed; one of those
  /// waiting together also checks the clock and the host's abort word. Giving up fails the rank, which the others see.
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
  static constexpr uint32_t kGlance = 32;       ///< a waiting lane looks around after this many turns
  static constexpr uint64_t kLookNs = 100'000;  ///< how often such a look goes to the host, over the bus

  __device__ CudaMachine(int tile, int tiles) : tile_(tile), tiles_(tiles) {}

  __device__ int lane() const { return int(threadIdx.x); }
  __device__ int lanes() const { return int(blockDim.x); }
  __device__ int tile() const { return tile_; }
  __device__ int tiles() const { return tiles_; }
  __device__ void sync() const { __syncthreads(); }
  __device__ bool all(bool mine) const { return __syncthreads_and(mine); }
  /// True for exactly one of the lanes of a warp that are here at the same time, whichever these are. So a lane that
  /// waits alone speaks for itself.
  __device__ bool speaks() const { return int(threadIdx.x % warpSize) == __ffs(int(__activemask())) - 1; }

  /// Reads both halves in one access of 16 bytes. Only each half by itself is promised to be whole.
  __device__ Packet peek_packet(const Packet* from) const {
    Packet p;
    asm volatile("ld.relaxed.sys.v2.u64 {%0, %1}, [%2];" : "=l"(p.halves[0]), "=l"(p.halves[1]) : "l"(from) : "memory");
    return p;
  }
  __device__ void put_packet(Packet* to, const Packet& p) const {
    asm volatile("st.relaxed.sys.v2.u64 [%0], {%1, %2};" ::"l"(to), "l"(p.halves[0]), "l"(p.halves[1]) : "memory");
  }

  /// What this lane's tile wrote before its last sync() or all() is visible to whoever acquires the value, on any
  /// device.
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
