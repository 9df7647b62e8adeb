#pragma once

#include <atomic>
#include <climits>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "group/device/kernel_executor.h"
#include "support/gpu_processes.h"
#include "support/groups.h"
#include "support/simulated_device.h"
#include "support/simulated_stream.h"

/// Ranks with a KernelExecutor each, on GPUs that the host simulates.
namespace nvx::test {

/// The blocks of a GPU. A kernel that finds no space waits for one that ends.
class SimulatedRoom {
 public:
  explicit SimulatedRoom(int blocks) : blocks_(blocks), free_(blocks) {}
  int blocks() const { return blocks_; }
  void take(uint32_t blocks) {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [&] { return free_ >= int(blocks); });
    free_ -= int(blocks);
  }
  void give_back(uint32_t blocks) {
    const std::lock_guard lock(mutex_);
    free_ += int(blocks);
    changed_.notify_all();
  }

 private:
  const int blocks_;
  std::mutex mutex_;
  std::condition_variable changed_;
  int free_;
};

/// Runs kernels on threads, on streams (`SimulatedStream`), each of which has an order of its own.
class SimulatedLauncher : public kernel::KernelLauncher, public StreamOrder {
 public:
  SimulatedLauncher(std::shared_ptr<FakeDriver> driver, int device, std::shared_ptr<SimulatedRoom> room)
      : driver_(std::move(driver)), device_(device), room_(std::move(room)) {}
  Status launch(const kernel::DeviceChannel& channel, std::span<const kernel::Job> jobs,
                std::span<const kernel::Piece> table, const kernel::MulticastView& view, void* stream) override {
    NVX_TRY(refusal);
    NVX_TRY(check(channel, jobs, table, view));
    ++launches, by_switch += kernel::is_multicast(jobs);
    std::function<void()> kernel = spec(channel, jobs, table, view);
    if (channel.by_replays) {
      graph.push_back(std::move(kernel));
      return {};
    }
    ++*running_;
    if (!stream) return {};  // a kernel that never ends
    static_cast<SimulatedStream*>(stream)->post([kernel = std::move(kernel), running = running_] {
      kernel();
      --*running;
    });
    return {};
  }
  Status launch_on_stream(DeviceStream stream, const kernel::DeviceChannel& channel, std::span<const kernel::Job> jobs,
                          std::span<const kernel::Piece> table, const kernel::MulticastView& view) override {
    NVX_TRY(check(channel, jobs, table, view));
    const int trial = trials.fetch_add(int(jobs.size()));
    if (trial == 0) std::this_thread::sleep_for(delay);
    const std::chrono::milliseconds pause = trial < most_slow ? slow : std::chrono::milliseconds(0);
    const bool hangs = kernel::is_multicast(jobs) && hangs_in_switch;
    if (!kernel::is_multicast(jobs)) NVX_TRY(trial_refusal);
    if (jobs.size() > 1) NVX_TRY(refusal_of_several);
    driver_->run(driver_, stream,
                 [kernel = spec(channel, jobs, table, view), job = jobs.front(), pause, bends = bends, hangs] {
                   std::this_thread::sleep_for(pause);
                   if (!hangs) kernel();
                   if (job.algorithm == bends) *job.recv.base ^= std::byte{1};
                 });
    for (bool ended = !blocks; !ended; std::this_thread::sleep_for(std::chrono::milliseconds(1)))
      (void)driver_->drained(device_, stream, &ended);
    return {};
  }
  Status attributes(std::vector<kernel::KernelAttributes>* attributes) override {
    NVX_TRY(refusal);
    attributes->push_back({"simulated", 0, 0, room_->blocks()});
    return {};
  }

  Status follow(const LaunchStream&) override { return {}; }
  Status note(const LaunchStream&) override { return {}; }
  bool ended() override { return knows_ends && *running_ == 0; }
  bool passed(const kernel::TailEvent& event) override { return event.passed(); }

  Status refusal;                                ///< the answer to every call, if it fails
  Status trial_refusal;                          ///< the answer to trials, if it fails
  Status refusal_of_several;                     ///< the answer to trials of several operations in a launch
  bool blocks = false;                           ///< whether launches of a trial return when their kernels have ended
  std::chrono::milliseconds delay{0};            ///< before the first kernel
  std::chrono::milliseconds slow{0};             ///< before each kernel of a trial ...
  int most_slow = INT_MAX;                       ///< ... up to this many
  std::optional<kernel::DeviceAlgorithm> bends;  ///< the kernels of a trial whose first result is wrong
  std::atomic<int> trials{0};
  std::atomic<bool> knows_ends{true};  ///< whether it can detect that a kernel has ended
  std::atomic<int> launches{0}, by_switch{0};
  bool adds_wrongly = false;                 ///< this rank's switch
  bool hangs_in_switch = false;              ///< this rank's kernels that use multicast do nothing in a trial
  std::vector<std::function<void()>> graph;  ///< the captured launches

 private:
  static Status check(const kernel::DeviceChannel& channel, std::span<const kernel::Job> jobs,
                      std::span<const kernel::Piece> table, const kernel::MulticastView& view) {
    return kernel::is_multicast(jobs) ? kernel::check_multicast(channel, jobs[0], view)
                                      : kernel::check_launch(channel, jobs, table);
  }
  std::function<void()> spec(const kernel::DeviceChannel& channel, std::span<const kernel::Job> jobs,
                             std::span<const kernel::Piece> table, const kernel::MulticastView& view) const {
    InjectedFault fault;
    if (driver_->has_odd_kernels()) {
      fault.effect = [driver = driver_, device = device_](InjectedFault::Store store, const void* at) {
        switch (driver->access_of(device, at)) {
          case FakeDriver::PeerAccess::kLosesKernelStores: return InjectedFault::Effect::kDropped;
          case FakeDriver::PeerAccess::kLosesFlags:
            return store == InjectedFault::Store::kFlag ? InjectedFault::Effect::kDropped
                                                        : InjectedFault::Effect::kStored;
          case FakeDriver::PeerAccess::kCorruptsPackets: return InjectedFault::Effect::kCorrupted;
          default: return InjectedFault::Effect::kStored;
        }
      };
    }
    fault.parts = [driver = driver_](const void* at) { return driver->multicast(at); };
    fault.adds_wrongly = adds_wrongly;
    return [channel, fault, room = room_, view, jobs = std::vector<kernel::Job>(jobs.begin(), jobs.end()),
            table = std::vector<kernel::Piece>(table.begin(), table.end())] {
      room->take(channel.shape.blocks);
      if (kernel::is_multicast(jobs)) {
        (void)simulate_multicast(channel, jobs[0], view, /*lanes=*/2, fault);
      } else {
        (void)simulate_kernel(channel, jobs, table.data(), /*lanes=*/2, fault);
      }
      room->give_back(channel.shape.blocks);
    };
  }

  const std::shared_ptr<FakeDriver> driver_;
  const int device_;
  const std::shared_ptr<SimulatedRoom> room_;
  std::shared_ptr<std::atomic<int>> running_ = std::make_shared<std::atomic<int>>(0);
};

/// The GPUs and processes of a test, and how many ranks of a group have left.
class DeviceWorld {
 public:
  struct Shape {
    int ranks = 2;
    int gpus = 8;            ///< rank r is on GPU r % gpus
    bool processes = false;  ///< each rank is a process
    size_t arena = size_t(8) << 20;
    int resident = 64;
    std::chrono::milliseconds timeout = DeviceArena::kTimeout;  ///< of a process for its own devices
  };
  explicit DeviceWorld(const Shape& shape) : shape_(shape) {
    for (int p = 0; p < (shape.processes ? shape.ranks : 1); ++p)
      processes_.push_back(std::make_unique<Process>(std::min(shape.gpus, 8), shape.arena, shape.timeout));
    for (int g = 0; g < shape.gpus; ++g) rooms_.push_back(std::make_shared<SimulatedRoom>(shape.resident));
    for (int r = 0; r < shape.ranks; ++r)
      launchers_.push_back(
          std::make_shared<SimulatedLauncher>(process(r).driver, r % shape.gpus, rooms_[size_t(r % shape.gpus)]));
  }

  int ranks() const { return shape_.ranks; }
  Process& process(int rank) { return *processes_[shape_.processes ? size_t(rank) : 0]; }
  const std::shared_ptr<SimulatedLauncher>& launcher(int rank) { return launchers_[size_t(rank)]; }
  DeviceArena& arena(int rank) { return *process(rank).registry->made(rank % shape_.gpus); }

  ChannelOptions options(int rank) {
    ChannelOptions options;
    options.group = "g";
    options.rank = rank;
    options.ranks = shape_.ranks;
    options.device = rank % shape_.gpus;
    options.host = 7;
    options.blocks = 2;
    options.timeout = std::chrono::milliseconds(as_fast(500, 2000));
    options.drain_timeout = std::chrono::milliseconds(as_fast(2000, 10'000));
    options.peers_gone = [gone = gone_, all = shape_.ranks] { return *gone == all; };
    return options;
  }
  std::unique_ptr<KernelExecutor> make(int rank, Bootstrap& bootstrap, const ChannelOptions& options) {
    return std::make_unique<KernelExecutor>(*process(rank).registry, bootstrap, options, launcher(rank),
                                            launcher(rank));
  }
  void leave() { ++*gone_; }

 private:
  const Shape shape_;
  std::vector<std::unique_ptr<Process>> processes_;
  std::vector<std::shared_ptr<SimulatedRoom>> rooms_;  // by GPU
  std::vector<std::shared_ptr<SimulatedLauncher>> launchers_;
  std::shared_ptr<std::atomic<int>> gone_ = std::make_shared<std::atomic<int>>(0);
};

/// One rank of a test: its executor and its stream.
struct DeviceRank {
  DeviceRank(DeviceWorld& of, int number, std::unique_ptr<KernelExecutor> with)
      : world(of), rank(number), executor(std::move(with)) {}
  ~DeviceRank() {
    executor.reset();
    world.leave();
  }

  Status launch(std::vector<Operation>& operations, std::chrono::milliseconds timeout = std::chrono::seconds(60)) {
    std::vector<const Operation*> list;
    for (const Operation& o : operations) list.push_back(&o);
    return executor->launch(list, {.native = &stream}, timeout);
  }
  Status capture(std::vector<Operation>& operations, std::chrono::milliseconds timeout = std::chrono::seconds(60)) {
    std::vector<const Operation*> list;
    for (const Operation& o : operations) list.push_back(&o);
    return executor->launch(list, {.native = &stream, .capture = 1}, timeout);
  }
  void replay() {
    for (const auto& kernel : world.launcher(rank)->graph) stream.post(kernel);
  }
  /// Waits until all work has ended, successfully or not. Nothing is accessed afterwards.
  Status await() {
    (void)eventually(std::chrono::seconds(90), [&] {
      return stream.idle() && (executor->finished() == executor->launched() || !executor->verdict().ok());
    });
    return executor->verdict();
  }
  /// Runs specs in one call. Returns what is wrong with any of them, or an empty text.
  std::string perform(const std::vector<Spec>& specs) {
    std::vector<std::unique_ptr<Side>> sides;
    std::vector<Operation> operations;
    for (const Spec& spec : specs) {
      sides.push_back(std::make_unique<Side>(spec, rank, world.ranks()));
      operations.push_back(operation_of(spec, *sides.back(), world.ranks()));
      operations.back().number = ++number;
    }
    if (const Status begun = launch(operations); !begun.ok()) return begun.what();
    if (const Status ended = await(); !ended.ok()) return ended.what();
    for (size_t i = 0; i < sides.size(); ++i) {
      if (const std::string wrong = sides[i]->verdict(); !wrong.empty()) return describe(specs[i]) + ": " + wrong;
    }
    return "";
  }

  DeviceWorld& world;
  const int rank;
  uint64_t number = 0;
  SimulatedStream stream;  // destroyed before the executor, which waits for the work on it
  std::unique_ptr<KernelExecutor> executor;
};

inline bool contains(const std::string& text, const std::string& what) { return text.find(what) != std::string::npos; }

/// An in-place sum.
template <class T>
Operation all_reduce(std::vector<T>& data, DType dtype = DType::kI32) {
  Operation o;
  o.collective = kernel::Collective::kAllReduce;
  o.dtype = dtype;
  o.out = reinterpret_cast<std::byte*>(data.data());
  o.in = o.out;
  o.count = data.size();
  return o;
}

/// Why a `KernelExecutor` could not be made; nothing if it could.
inline std::optional<Error> failure_to_make(DeviceWorld& world, int rank, Bootstrap& bootstrap) {
  try {
    (void)world.make(rank, bootstrap, world.options(rank));
    return {};
  } catch (const Error& error) {
    return error;
  }
}

/// All ranks of a group as threads: each creates its executor and runs the body with it.
inline void with_executors(
    DeviceWorld& world, const std::function<void(DeviceRank&)>& body,
    const std::function<void(ChannelOptions&)>& change = [](ChannelOptions&) {}) {
  const SharedTable table(world.ranks());
  as_threads(world.ranks(), [&](int rank) {
    SharedBootstrap bootstrap(table, rank);
    ChannelOptions options = world.options(rank);
    change(options);
    DeviceRank one(world, rank, world.make(rank, bootstrap, options));
    body(one);
  });
}

}  // namespace nvx::test
