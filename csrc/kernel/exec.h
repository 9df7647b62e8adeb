#pragma once

#include <cstddef>
#include <cstdint>

#include "base/flag.h"
#include "kernel/gpu/device_pad.h"
#include "kernel/reduce/level.h"
#include "kernel/verdict.h"

#if defined(__CUDACC__)
#include <cuda/atomic>
#define NVX_HD __host__ __device__
#define NVX_NOINLINE __host__ __device__ __noinline__
#define NVX_UNROLL _Pragma("unroll")
#define NVX_NO_UNROLL _Pragma("unroll 1")
#else
#define NVX_HD
#define NVX_NOINLINE __attribute__((noinline))
#define NVX_UNROLL
#define NVX_NO_UNROLL
#endif
#define NVX_COLD NVX_NOINLINE  // seldom called: waits, failures, restamping
// NVX_NOINLINE functions are not inlined, so that all kernels share one compiled copy. Inlined, each kernel would take
// minutes to compile.

namespace nvx::kernel {

template <class Body>
NVX_NOINLINE auto call(Body& body) {
  return body();
}
/// A part of the algorithms: inline in hot kernels; in general ones a function that all its callers share.
template <bool kHot, class Body>
NVX_HD auto part(Body body) {
  if constexpr (kHot)
    return body();
  else
    return call(body);
}

/// `data + bytes`, also for an empty piece without memory: the host's language forbids an offset to null.
template <class Byte>
NVX_HD Byte* offset(Byte* data, size_t bytes) {
#ifdef __CUDA_ARCH__
  return data + bytes;
#else
  return reinterpret_cast<Byte*>(reinterpret_cast<uintptr_t>(data) + bytes);
#endif
}

/// Whether an aligned access of 16 bytes may read beyond the end of a piece. On a device it stays in one page; the
/// host's tools watch every byte.
#ifdef __CUDA_ARCH__
inline constexpr bool kReadsBehindEnd = true;
#else
inline constexpr bool kReadsBehindEnd = false;
#endif

/// `n`, opaque to the compiler: it hoists no computation from it out of a loop.
NVX_HD inline uint32_t opaque(uint32_t n) {
#ifdef __CUDA_ARCH__
  asm volatile("" : "+r"(n));
#endif
  return n;
}

/// `at`, which points to the block's shared memory: a hint to the compiler.
template <class T>
NVX_HD T* in_block(T* at) {
#ifdef __CUDA_ARCH__
  __builtin_assume(__isShared(at));
#endif
  return at;
}

/// The operations in which the CPU algorithms (kernel/cpu/host_collectives.h) are written, for the one host thread that
/// runs a rank. The loops of the instruction-set level (kernel/reduce/level.h) do the bulk work.
class CpuExec {
 public:
  CpuExec(size_t width, ReduceFn reduce, const double* factors, const WaitRules& rules)
      : level_(level()), width_(width), reduce_(reduce), factors_(factors), rules_(rules) {}

  size_t width() const { return width_; }

  void signal(Flag& flag, Stamp value) const { nvx::signal(flag, value); }

  /// Acquire: on true, everything that the flag's writer wrote before it signalled the stamp is visible. On false the
  /// wait ended without the stamp; verdict() gives the cause, and the algorithm must return.
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

  /// Copies to memory that other ranks will read.
  void stage(void* dst, const void* src, size_t bytes) const {
    if (bytes != 0) stage_(dst, src, bytes);
  }

  /// Sets how stage() writes, on a machine that has both policies.
  void stage_by(CachePolicy policy) { stage_ = level_.copy_by(policy); }
  /// Sets how copy() writes, which is to memory that this rank alone reads.
  void keep_by(CachePolicy policy) { keep_ = level_.copy_by(policy); }
  bool keeps_past() const { return keep_ == level_.copy_past; }
  bool stages_past() const { return stage_ == level_.copy_past; }
  bool has_choice() const { return level_.copy_past != nullptr; }

  /// Starts to measure the time in wait(), for waited().
  void measure() { measures_ = true; }
  Clock::duration waited() const { return waited_; }

  /// dst[i] = op over the ranks' srcs in absolute rank order, rounded once.
  void reduce(void* dst, const void* const* srcs, int ranks, size_t n) const {
    if (n != 0) reduce_(dst, srcs, ranks, n, factors_);
  }

  bool fail(const Verdict& verdict) {
    verdict_ = verdict;
    return false;
  }
  const Verdict& verdict() const { return verdict_; }
  /// Fails the operation because of a peer that has failed or left.
  bool alarm(int peer) {
    if (rules_.watch) rules_.watch->record_abort(peer);
    return fail(Verdict::wait(Waited::kAlarmed, peer, 0, 0));
  }

  /// A caller that runs two bulk operations over the same data alternates between them at this block size, so that the
  /// second one finds the data in the nearest cache.
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

/// The subject of a lane's wait, and the last value it read.
struct PendingWait {
  int peer;
  Stamp wanted;
  Stamp seen;
};

/// The arrivals of this rank and of a peer, which differ.
struct ArrivalPair {
  uint64_t mine[kArrivalWords];
  uint64_t theirs[kArrivalWords];
};

/// The operations in which the device algorithms (kernel/gpu/device_collectives.h) are written, for one lane of a tile.
/// Machine is a thread of a CUDA block, or a host thread that simulates one. Each lane waits by itself and every wait
/// ends. The lanes of a tile combine their results with all(). Cold functions take values only: an object whose address
/// they took would have to be in memory instead of registers.
template <class Machine>
class TileExec : public Machine {
 public:
  using Lane = Machine;

  /// `call` identifies the operation in verdicts.
  NVX_HD TileExec(const Machine& machine, RankState* rank, Control* control, uint64_t timeout_ns, uint32_t call)
      : Machine(machine), rank_(rank), control_(control), call_(call) {
    const uint64_t began_ns = Machine::now_ns();
    late_ns_ = timeout_ns != 0 ? began_ns + timeout_ns : UINT64_MAX;
    // Reads of the host's abort word are served one after another, at about a microsecond each, whichever blocks they
    // come from. So the warps of a block take turns, and blocks read at different times.
    constexpr uint32_t kTimes = 32;
    const uint32_t warp = uint32_t(Machine::lane()) / kWarp, time = uint32_t(Machine::tile()) % kTimes;
    next_check_ns_ = began_ns + Machine::kCheckNs * (1 + warp) + Machine::kCheckNs / kTimes * time;
  }

  /// The host's abort word, read by one lane of the first block; all others get 0. The read crosses the bus: call it
  /// early, and not_aborted() as late as its result is needed.
  NVX_HD uint32_t load_abort() const {
    return checks_for_abort() && Machine::tile() == 0 ? Machine::load_host(control_->abort) : 0;
  }
  NVX_HD bool not_aborted(uint32_t abort) { return abort == 0 || fail(Verdict::wait(Waited::kAlarmed, -1, 0, 0)); }

  /// How far a peer's pool is mapped. `base` never changes once set, and `mapped` only grows, so the two reads need not
  /// be atomic together.
  NVX_HD PoolView read(const PoolView& at) const {
    return {Machine::load_view(at.base), Machine::load_view(at.mapped)};
  }

  /// Begins an operation: verdicts name it by this epoch, and the host can read it in `Control::begun`. Returns false
  /// on this lane if its rank has failed before.
  NVX_HD bool begin(uint32_t epoch) {
    epoch_ = epoch;
    if (checks_for_abort() && Machine::tile() == 0) Machine::store_host(control_->begun, epoch);
    return !has_failed();
  }

  /// Call between chunks, where there may be no wait that would notice a failure or an abort. The result is this lane's
  /// alone.
  NVX_HD bool may_continue() {
    if (!checks_for_abort()) return true;
    if (has_failed()) return false;
    const uint64_t now_ns = Machine::now_ns();
    if (now_ns < next_check_ns_) return true;
    next_check_ns_ = now_ns + check_interval_ns(*this);
    return not_aborted(Machine::load_host(control_->abort));
  }

  /// Waits until ready() holds. On false, the verdict gives the cause.
  template <class Ready>
  NVX_HD bool wait(PendingWait& pending, Ready ready) {
    for (uint32_t poll = 1; !ready(); ++poll) {
      Machine::relax();
      if (poll % Machine::kPollsPerCheck != 0) continue;
      const WaitCheck check = check_wait(*this, rank_, control_, late_ns_, next_check_ns_);
      next_check_ns_ = check.next_check_ns;
      if (check.end == Waited::kReached) continue;
      return ready() || fail(Verdict::wait(check.end, pending.peer, pending.wanted, pending.seen));
    }
    return true;
  }

  /// Acquire: waits until a peer has raised its counter to `want`. Everything that the peer wrote before is then
  /// visible to this lane, and to the other lanes of the tile after their next sync() or all().
  NVX_HD bool wait_for(const Stamp& counter, Stamp want, int peer, Stamp* seen = nullptr) {
    PendingWait pending{peer, want, 0};
    const bool ok = wait(pending, [&] { return reached(pending.seen = Machine::acquire(counter), want); });
    if (seen) *seen = pending.seen;
    return ok;
  }

  /// Records the verdict if it is the rank's first failure, which also ends the waits of all lanes of the rank. Always
  /// returns false.
  NVX_HD bool fail(const Verdict& verdict, const ArrivalPair* arrivals = nullptr) {
    record(*this, rank_, control_, epoch_, call_, verdict.cause, verdict.how, verdict.peer, verdict.wanted,
           verdict.seen, arrivals);
    return false;
  }

  /// Counts pieces that bypass staging. Only the first block counts, because each block has a share of every piece.
  NVX_HD void count_direct(uint32_t pieces) {
    if (pieces != 0 && Machine::tile() == 0) Machine::add(rank_->direct, pieces);
  }

  /// One lane of each block calls this once per launch, with the block's progress. It is for watching only: the store
  /// is not ordered behind what the block has written here and to peers. All of that is complete when the stream has
  /// passed the launch; memory is used again, and a rank leaves, only then.
  NVX_HD void end_block(BlockEnd end, bool counts_direct) {
    if (counts_direct && Machine::tile() == 0) Machine::store_host(control_->direct, Machine::load(rank_->direct));
    Machine::store_host(control_->ended[Machine::tile()], end.word());
  }

  /// Release: one lane of each block calls this when its block has ended. The last one sets the counter, if any.
  NVX_HD void complete(Stamp* completion, Stamp value) {
    if (!completion || Machine::add(rank_->left) + 1 != uint32_t(Machine::tiles())) return;
    Machine::store(rank_->left, 0);
    Machine::signal(*completion, value);
  }

 private:
  struct WaitCheck {
    Waited end;  // kReached: go on
    uint64_t next_check_ns;
  };

  static constexpr uint32_t kWarp = 32;
  /// One warp of a block reads the host's abort word per kCheckNs.
  NVX_HD static uint64_t check_interval_ns(const Machine& lane) {
    return Machine::kCheckNs * ceil_div(uint32_t(lane.lanes()), kWarp);
  }

  /// Whether this rank has failed, in any block and any operation.
  NVX_HD bool has_failed() const { return Machine::load(rank_->failed) != 0; }
  /// Whether this lane checks for aborts on behalf of the tile. It is the last lane, which has the least work.
  NVX_HD bool checks_for_abort() const { return Machine::lane() == Machine::lanes() - 1; }

  /// Decides whether to give up a wait. Each waiting lane checks whether its rank failed. One of the lanes that wait
  /// together also checks the clock and, in its turn, the host's abort word. Giving up fails the rank, which the
  /// other lanes see.
  NVX_COLD static WaitCheck check_wait(Machine lane, const RankState* rank, const Control* control, uint64_t late_ns,
                                       uint64_t next_check_ns) {
    if (lane.load(rank->failed) != 0) return {Waited::kAlarmed, next_check_ns};
    if (!lane.is_check_leader()) return {Waited::kReached, next_check_ns};
    const uint64_t now_ns = lane.now_ns();
    if (now_ns >= next_check_ns) {
      next_check_ns = now_ns + check_interval_ns(lane);
      if (lane.load_host(control->abort) != 0) return {Waited::kAlarmed, next_check_ns};
    }
    return {now_ns > late_ns ? Waited::kTimedOut : Waited::kReached, next_check_ns};
  }

  NVX_COLD static void record(Machine lane, RankState* rank, Control* control, uint32_t epoch, uint32_t call,
                              Verdict::Cause cause, Waited how, int peer, Stamp wanted, Stamp seen,
                              const ArrivalPair* arrivals) {
    if (!lane.claim(rank->failed)) return;
    DeviceVerdict& out = control->verdict;
    out.cause = cause;
    out.how = how;
    out.peer = peer;
    out.block = uint32_t(lane.tile());
    out.epoch = epoch;
    out.call = call;
    out.wanted = wanted;
    out.seen = seen;
    for (uint32_t i = 0; arrivals && i < kArrivalWords; ++i) {
      out.mine[i] = arrivals->mine[i];
      out.theirs[i] = arrivals->theirs[i];
    }
    lane.signal(out.state, DeviceVerdict::kReadable);
  }

  RankState* rank_;
  Control* control_;
  uint32_t call_;
  uint64_t late_ns_;
  uint64_t next_check_ns_;
  uint32_t epoch_ = 0;
};

#if defined(__CUDACC__)
/// Whether the architecture that is compiled for has instructions for multicast objects.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
inline constexpr bool kHasMulticast = true;
#else
inline constexpr bool kHasMulticast = false;
#endif

/// A thread of a CUDA block. The blocks of a rank may be a part of the grid.
class CudaMachine {
 public:
  static constexpr uint32_t kPollsPerCheck = 32;  ///< a waiting lane checks for failures once per this many polls
  static constexpr uint64_t kCheckNs = 100'000;   ///< the interval of checks of the host's abort word, over the bus

  __device__ CudaMachine(int tile, int tiles) : tile_(tile), tiles_(tiles) {}

  __device__ int lane() const { return int(threadIdx.x); }
  __device__ int lanes() const { return int(blockDim.x); }
  __device__ int tile() const { return tile_; }
  __device__ int tiles() const { return tiles_; }
  __device__ void sync() const { __syncthreads(); }
  __device__ bool all(bool mine) const { return __syncthreads_and(mine); }
  /// True for exactly one of the lanes of a warp that execute this together. A lane that waits alone represents itself.
  __device__ bool is_check_leader() const { return int(threadIdx.x % warpSize) == __ffs(int(__activemask())) - 1; }

  /// Reads both halves in one 16-byte access. Each half by itself is atomic, the pair is not.
  __device__ Packet peek_packet(const Packet* from) const {
    Packet p;
    asm volatile("ld.relaxed.sys.v2.u64 {%0, %1}, [%2];" : "=l"(p.halves[0]), "=l"(p.halves[1]) : "l"(from) : "memory");
    return p;
  }
  __device__ void put_packet(Packet* to, const Packet& p) const {
    asm volatile("st.relaxed.sys.v2.u64 [%0], {%1, %2};" ::"l"(to), "l"(p.halves[0]), "l"(p.halves[1]) : "memory");
  }

  /// Release, system scope: everything that this lane's tile wrote before its last sync() or all() is visible to a
  /// thread on any device that acquires the value.
  __device__ void signal(Stamp& at, Stamp value) const {
    system_ref<Stamp>(at).store(value, cuda::std::memory_order_release);
  }
  __device__ void signal(uint32_t& at, uint32_t value) const {
    system_ref<uint32_t>(at).store(value, cuda::std::memory_order_release);
  }
  /// Release, system scope, for the calls of signal_behind() that follow: they publish everything that this lane's
  /// tile wrote before its last sync() or all(). One fence serves any number of flags.
  __device__ void fence() const { asm volatile("fence.acq_rel.sys;" ::: "memory"); }
  __device__ void signal_behind(Stamp& at, Stamp value) const {
    system_ref<Stamp>(at).store(value, cuda::std::memory_order_relaxed);
  }
  template <class Word>
  __device__ Word acquire(const Word& at) const {
    return system_ref<Word>(const_cast<Word&>(at)).load(cuda::std::memory_order_acquire);
  }
  template <class Word>
  __device__ Word load_host(const Word& at) const {
    return system_ref<Word>(const_cast<Word&>(at)).load(cuda::std::memory_order_relaxed);
  }
  /// Part of a PoolView, which a copy of the host may be changing.
  __device__ uint64_t load_view(const uint64_t& at) const { return load_host(at); }
  template <class Word>
  __device__ void store_host(Word& at, Word value) const {
    system_ref<Word>(at).store(value, cuda::std::memory_order_relaxed);
  }

  // Shared by the blocks of this rank: device scope.
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
#endif

}  // namespace nvx::kernel
