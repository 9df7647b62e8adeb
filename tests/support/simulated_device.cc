#include "support/simulated_device.h"

#include <unistd.h>

#include <cstring>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <random>
#include <thread>

#include "kernel/gpu/multicast.h"

namespace nvx::test {
namespace {

/// The barrier of a tile's lanes, and its shared state.
class Crossing {
 public:
  explicit Crossing(int lanes) : lanes_(lanes) {}

  /// Returns on all lanes when all have called it. Returns whether all passed true.
  bool cross(bool mine) {
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

class HostMachine {
 public:
  static constexpr uint32_t kPollsPerCheck = 8;
  static constexpr uint64_t kCheckNs = 0;

  HostMachine(int tile, int tiles, int lane, int lanes, Crossing& crossing, const InjectedFault& fault)
      : tile_(tile),
        tiles_(tiles),
        lane_(lane),
        lanes_(lanes),
        crossing_(crossing),
        faults_(fault),
        random_(uint32_t(fault.seed * 1009 + uint64_t(tile) * 31 + uint64_t(lane) + 1)) {}

  int lane() const { return lane_; }
  int lanes() const { return lanes_; }
  int tile() const { return tile_; }
  int tiles() const { return tiles_; }
  void sync() const {
    delay_randomly();
    is_fenced_ = false;
    if (faults_.kind != InjectedFault::Kind::kNoSync) crossing_.cross(true);
  }
  bool all(bool mine) const {
    delay_randomly();
    is_fenced_ = false;
    ++awaits_;
    if (faults_.holds) faults_.holds(awaits_);
    // Before the first round of chunks, the lanes need what others have written to the memory that they share.
    const bool alone = faults_.kind == InjectedFault::Kind::kLoneVerdicts && awaits_ > 4;
    return alone ? mine : crossing_.cross(mine);
  }
  bool is_check_leader() const { return crossing_.is_turn(); }

  kernel::Packet peek_packet(const kernel::Packet* from) const {
    auto* p = const_cast<kernel::Packet*>(from);
    return {{std::atomic_ref(p->halves[0]).load(std::memory_order_relaxed),
             std::atomic_ref(p->halves[1]).load(std::memory_order_relaxed)}};
  }
  void put_packet(kernel::Packet* to, const kernel::Packet& p) const {
    delay_randomly();
    const InjectedFault::Effect effect = effect_on(InjectedFault::Store::kPacket, to);
    if (effect == InjectedFault::Effect::kDropped) return;
    const uint64_t bent = effect == InjectedFault::Effect::kCorrupted;
    std::atomic_ref(to->halves[1]).store(p.halves[1] ^ bent, std::memory_order_relaxed);
    std::atomic_ref(to->halves[0]).store(p.halves[0], std::memory_order_relaxed);
  }

  template <class Word, class Value>
  void signal(Word& at, Value value) const {
    delay_randomly();
    if (faults_.kind == InjectedFault::Kind::kLostSignal) return;
    if (effect_on(InjectedFault::Store::kFlag, &at) == InjectedFault::Effect::kDropped) return;
    const bool relaxed = faults_.kind == InjectedFault::Kind::kRelaxedSignal;
    std::atomic_ref(at).store(value, relaxed ? std::memory_order_relaxed : std::memory_order_release);
  }
  /// The fence is in the signals themselves: ThreadSanitizer ignores fences. A signal that no fence of its lane
  /// precedes since the last barrier is relaxed, and so a race.
  void fence() const { is_fenced_ = true; }
  void signal_behind(Stamp& at, Stamp value) const {
    if (is_fenced_) return signal(at, value);
    std::atomic_ref(at).store(value, std::memory_order_relaxed);
  }
  template <class Word>
  Word acquire(const Word& at) const {
    return std::atomic_ref(const_cast<Word&>(at)).load(std::memory_order_acquire);
  }
  uint32_t load_host(const uint32_t& at) const {
    if (crossing_.count_look() == faults_.abort_at) store(const_cast<uint32_t&>(at), 1);
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

  /// The switch adds in another order than ranks do: from the part on that the address chooses.
  template <class T>
  kernel::Pack sum_of_parts(const std::byte* at) const {
    delay_randomly();
    const std::vector<std::byte*> parts = faults_.parts(at);
    constexpr size_t kCount = sizeof(kernel::Pack) / sizeof(T);
    float sums[kCount] = {};
    for (size_t j = 0; j < parts.size(); ++j) {
      T values[kCount];
      std::memcpy(values, parts[(j + uintptr_t(at) / sizeof(kernel::Pack)) % parts.size()], sizeof values);
      for (size_t i = 0; i < kCount; ++i) sums[i] += kernel::Rule<T>::widen(values[i]);
    }
    T rounded[kCount];
    for (size_t i = 0; i < kCount; ++i) rounded[i] = kernel::Rule<T>::round(faults_.adds_wrongly ? -1 : sums[i]);
    kernel::Pack pack;
    std::memcpy(&pack, rounded, sizeof pack);
    return pack;
  }
  void store_to_parts(std::byte* at, const kernel::Pack& pack) const {
    delay_randomly();
    for (std::byte* part : faults_.parts(at)) std::memcpy(part, &pack, sizeof pack);
  }
  void fence_parts() const {}

  uint64_t now_ns() const { return uint64_t(std::chrono::steady_clock::now().time_since_epoch().count()); }
  /// A lane that has waited long sleeps. Lanes that only yield keep threads of low priority from the cores, and the
  /// awaited rank may need one of these: khugepaged holds a process's mmap_lock while it scans it.
  void relax() const {
    constexpr uint32_t kAtOnce = 1024;
    if (++relaxed_ < kAtOnce) return std::this_thread::yield();
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }

 private:
  InjectedFault::Effect effect_on(InjectedFault::Store store, const void* at) const {
    return faults_.effect ? faults_.effect(store, at) : InjectedFault::Effect::kStored;
  }
  void delay_randomly() const {
    if (faults_.delay_us == 0) return;
    const uint32_t die = random_() % 8;
    if (die == 0) std::this_thread::sleep_for(std::chrono::microseconds(random_() % faults_.delay_us));
    if (die == 1) std::this_thread::yield();
  }

  int tile_, tiles_, lane_, lanes_;
  Crossing& crossing_;
  const InjectedFault& faults_;
  mutable std::minstd_rand random_;
  mutable uint32_t awaits_ = 0, relaxed_ = 0;
  mutable bool is_fenced_ = false;
};

using RunLane = std::function<bool(const HostMachine& machine, kernel::Peer* shared)>;

/// The threads beside a thread that simulates kernels: new ones for each kernel would take longer than most kernels.
/// They are synchronised with that thread alone, as new ones would be.
class LaneThreads {
 public:
  LaneThreads() = default;
  LaneThreads(const LaneThreads&) = delete;
  ~LaneThreads() {
    for (const auto& one : threads_) one->give(nullptr, /*ends=*/true);
    for (const auto& one : threads_) one->thread.join();
  }

  /// Those of this thread. A forked child has none of its parent's.
  static LaneThreads& mine() {
    static thread_local std::unique_ptr<LaneThreads> mine;
    if (mine && mine->process_ != getpid()) (void)mine.release();
    if (!mine) mine = std::make_unique<LaneThreads>();
    return *mine;
  }

  /// Runs lane(0) .. lane(count - 1) at once, the first on this thread.
  void run(int count, const std::function<void(int)>& lane) {
    for (int i = 1; i < count; ++i) {
      if (i > int(threads_.size())) threads_.push_back(std::make_unique<One>(i));
      threads_[size_t(i) - 1]->give(&lane, /*ends=*/false);
    }
    lane(0);
    for (int i = 1; i < count; ++i) threads_[size_t(i) - 1]->await();
  }

 private:
  struct One {
    explicit One(int number) : thread([this, number] { work(number); }) {}
    void give(const std::function<void(int)>* lane, bool is_last) {
      {
        const std::lock_guard lock(mutex);
        given = lane, ends = is_last;
      }
      changed.notify_one();
    }
    void await() {
      std::unique_lock lock(mutex);
      changed.wait(lock, [&] { return !given; });
    }
    void work(int number) {
      std::unique_lock lock(mutex);
      for (;;) {
        changed.wait(lock, [&] { return given || ends; });
        if (!given) return;
        const auto& lane = *given;
        lock.unlock();
        lane(number);
        lock.lock();
        given = nullptr;
        changed.notify_one();
      }
    }

    std::mutex mutex;
    std::condition_variable changed;
    const std::function<void(int)>* given = nullptr;
    bool ends = false;
    std::thread thread;  // last: it uses all of these
  };

  const pid_t process_ = getpid();
  std::vector<std::unique_ptr<One>> threads_;
};

}  // namespace

namespace {

/// All lanes of all blocks at once. Returns how many of them succeeded.
int simulate_lanes(const kernel::DeviceChannel& channel, int lanes, const InjectedFault& fault, void (*follow_rules)(),
                   const RunLane& run_lane) {
  const int blocks = int(channel.shape.blocks);
  std::vector<std::unique_ptr<Crossing>> crossings;
  for (int b = 0; b < blocks; ++b) crossings.push_back(std::make_unique<Crossing>(lanes));
  // As on a device: the memory that a block's lanes share.
  const size_t shared_bytes = kernel::shared_bytes(channel.shape.ranks, /*gathers=*/true);
  std::vector<kernel::Pack> shared(size_t(blocks) * (shared_bytes / sizeof(kernel::Pack)));
  std::atomic<int> well{0};
  LaneThreads::mine().run(blocks * lanes, [&](int i) {
    follow_rules();
    const int b = i / lanes;
    const HostMachine machine(b, blocks, i % lanes, lanes, *crossings[size_t(b)], fault);
    well += run_lane(machine, reinterpret_cast<kernel::Peer*>(reinterpret_cast<std::byte*>(shared.data()) +
                                                              size_t(b) * shared_bytes));
  });
  return well;
}

}  // namespace

int simulate_kernel(const kernel::DeviceChannel& channel, std::span<const kernel::Job> jobs, kernel::PieceTable table,
                    int lanes, const InjectedFault& fault, KernelChoice choice, void (*follow_rules)()) {
  const kernel::DeviceChannel ready = channel.prepared();
  int well = 0;
  const auto simulate = [&](const RunLane& run_lane) {
    well = simulate_lanes(channel, lanes, fault, follow_rules, run_lane);
  };
  const bool hot = choice == KernelChoice::kAsLaunched && jobs.size() == 1 &&
                   kernel::with_hot_operation(channel, jobs[0], table, [&]<class Kind>(Kind kind) {
                     simulate([&](const HostMachine& machine, kernel::Peer* shared) {
                       return kernel::run_jobs<LaneRules, Kind>(
                           machine, ready, shared, jobs.data(), 1, table,
                           [kind](auto& ex, auto& ch, const kernel::Job& job, kernel::PieceTable) {
                             return kernel::run_hot(ex, ch, job, kind);
                           });
                     });
                   });
  if (hot) return well;
  simulate([&](const HostMachine& machine, kernel::Peer* shared) {
    return kernel::run_jobs<LaneRules>(machine, ready, shared, jobs.data(), uint32_t(jobs.size()), table,
                                       [](auto& ex, auto& ch, const kernel::Job& job, kernel::PieceTable pieces) {
                                         return kernel::run_device_collective(ex, ch, job, pieces);
                                       });
  });
  return well;
}

int simulate_multicast(const kernel::DeviceChannel& channel, const kernel::Job& job, const kernel::MulticastView& view,
                       int lanes, const InjectedFault& fault, void (*follow_rules)()) {
  const kernel::DeviceChannel ready = channel.prepared();
  int well = 0;
  kernel::with_multicast_type(job, [&]<class T>(T) {
    well = simulate_lanes(channel, lanes, fault, follow_rules, [&](const HostMachine& machine, kernel::Peer* shared) {
      return kernel::run_jobs<LaneRules, kernel::MulticastOperation<T>>(
          machine, ready, shared, &job, 1, nullptr,
          [&](auto& ex, auto& ch, const kernel::Job& one, kernel::PieceTable) {
            return kernel::reduce_multicast<T>(ex, ch, one, view);
          });
    });
  });
  return well;
}

bool simulate_signals(const kernel::DeviceChannel& channel, const kernel::SignalJob& job) {
  Crossing crossing(1);
  const InjectedFault none;
  return kernel::run_signals(HostMachine(0, 1, 0, 1, crossing, none), channel, job);
}

}  // namespace nvx::test
