#include "torch/relay_path.h"

#include <ATen/ops/empty.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <atomic>

#include "base/contain.h"
#include "memory/beside_captures.h"
#include "torch/store.h"
#include "torch/work.h"

namespace nvx {
namespace {

/// One operation's. All of its steps are kernels that follow each other on one stream of the group's, as all ranks of
/// the host launch them. What goes between host memory and the device is moved by kernels, too. So nothing has to be
/// given to the device later, when something else that waits for this operation could be in its way.
class StreamRelay final : public Relay {
 public:
  StreamRelay(std::shared_ptr<Group> group, std::shared_ptr<StreamLauncher> launcher, kernel::Collective collective,
              const c10::Stream& stream, std::function<void()> on_round)
      : group_(std::move(group)),
        launcher_(std::move(launcher)),
        collective_(collective),
        stream_(stream),
        on_round_(std::move(on_round)) {}

  /// After a failure kernels may still be falling through, which look at this memory. If they do not, it stays.
  ~StreamRelay() override {
    if (!memory_.defined() || over_) return;
    contain("the end of an operation", [&] {
      const Deadline deadline = Deadline::after(kMoment);
      for (int looks = 0; !is_over(); ++looks) {
        if (launcher_->gave_up || deadline.passed(Clock::now())) {
          launcher_->gave_up = true;
          return (void)new at::Tensor(std::move(memory_));
        }
        pause_after(looks);
      }
    });
  }

  Status make(const Room& room) override {
    const BesideCaptures beside;
    room_ = kernel::ceil_div(room.bytes, kAlign) * kAlign;
    memory_ = at::empty({int64_t(kAlign + std::min(room.slices, kSlots) * room_)},
                        at::TensorOptions().dtype(at::kByte).device(at::kCPU).pinned_memory(true));
    launched_.resize(room.rounds);
    say(0);
    return {};
  }

  std::byte* at(size_t k) override { return data() + kAlign + k % kSlots * room_; }
  const Stamp* said() override { return word(); }

  Status begin_round(std::span<const Operation> steps) override {
    NVX_TRY(launch(steps));
    const size_t round = begun_.load(std::memory_order_relaxed);
    launched_[round] = group_->device().launched();
    begun_.store(round + 1, std::memory_order_release);
    on_round_();
    return {};
  }

  void say(Stamp what) override { std::atomic_ref<Stamp>(*word()).store(what, std::memory_order_release); }

  Status await(size_t round, const Deadline& deadline, const std::function<void()>& meanwhile) override {
    for (int looks = 0; !has_ended(round); ++looks) {
      NVX_TRY(group_->device().look());
      if (deadline.passed(Clock::now())) return late(deadline);
      meanwhile();
      pause_after(looks);
      if (looks % 256 == 255) group_->look_for_interrupt();
    }
    over_ = round + 1 == launched_.size();
    return {};
  }

 private:
  static constexpr size_t kAlign = 64;
  static constexpr std::chrono::milliseconds kMoment{500};  ///< by when kernels fall through that were called off

  bool has_ended(size_t round) const {
    return begun_.load(std::memory_order_acquire) > round && group_->device().ended_well(launched_[round]);
  }

  std::byte* data() const { return static_cast<std::byte*>(memory_.data_ptr()); }
  Stamp* word() const { return reinterpret_cast<Stamp*>(data()); }  // the slots are behind it

  Status launch(std::span<const Operation> operations) {
    if (operations.empty()) return {};
    const BesideCaptures beside;
    const c10::StreamGuard on(stream_);
    const c10::impl::VirtualGuardImpl guard(stream_.device_type());
    const StreamLauncher::Target target{stream_, guard.getStreamNativeHandle(stream_), 0};
    NVX_TRY(launcher_->follow(target));
    c10::SmallVector<const Operation*, kernel::kLaunchJobs> all;
    for (const Operation& operation : operations) all.push_back(&operation);
    const Status status = group_->device().launch({all.data(), all.size()}, target.native);
    const Status noted = launcher_->note(target);  // also where it was refused
    NVX_TRY(status);
    return noted;
  }

  bool is_over() const {
    const BesideCaptures beside;
    return launcher_->ended();
  }

  Status late(const Deadline& deadline) const {
    return group_->fail({.code = Code::kTimeout,
                         .cause = stream_.device().str() + " of " + group_->topology().describe(group_->rank()) +
                                  " has not done its part of " + nvx::name(collective_) + " of group " +
                                  group_->name() + " in " + seconds(deadline),
                         .advice = kLookAtDevice});
  }

  const std::shared_ptr<Group> group_;
  const std::shared_ptr<StreamLauncher> launcher_;
  const kernel::Collective collective_;
  const c10::Stream stream_;
  at::Tensor memory_;  // the word, and all slots
  size_t room_ = 0;
  const std::function<void()> on_round_;
  std::vector<uint64_t> launched_;  // by round: how many operations the device had been given with it
  std::atomic<size_t> begun_{0};    // rounds, after what launched_ has of them
  bool over_ = false;
};

}  // namespace

bool RelayPath::agree_to_serve(const Operation& operation, at::Device device) {
  return can_be_relayed(operation.collective, operation.dtype, operation.count, group_->plan_facts()) &&
         agree_to_serve(device);
}

bool RelayPath::agree_to_serve(at::Device device) {
  if (device.type() != kernel_device() || group_->topology().hosts.size() == 1) return false;
  const bool yes = served_.answer(device, [&] {
    Group& of_devices = *of_devices_();
    const BesideCaptures beside;
    const c10::OptionalDeviceGuard on(device);
    TorchStore store(store_, of_devices.size());
    const bool opened = of_devices.device().open(store, device.index(), launcher_);
    if (const Status alive = of_devices.check_alive(); !alive.ok()) raise(alive);
    return opened;
  });
  if (yes && device != served_.device()) refuse_other_device(*group_, served_.device(), device);
  return yes;
}

std::unique_ptr<Relay> RelayPath::make(const std::shared_ptr<Group>& group, kernel::Collective collective,
                                       const c10::Stream& stream, std::function<void()> on_round) {
  return std::make_unique<StreamRelay>(group, launcher_, collective, stream, std::move(on_round));
}

}  // namespace nvx
