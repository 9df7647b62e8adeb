#include "torch/device/host_proxy_path.h"

#include <ATen/ops/empty.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <atomic>

#include "base/contain.h"
#include "kernel/gpu/capture.h"
#include "memory/driver/beside_captures.h"
#include "torch/store.h"
#include "torch/work.h"

namespace nvx {
namespace {

/// One operation's. All of its steps are kernels that follow each other on one stream of the group's, as all ranks of
/// the host launch them. What goes between host memory and the device is moved by kernels, too. So nothing has to be
/// given to the device later, when something else that waits for this operation could be in its way.
class StreamHostProxy final : public HostProxy {
 public:
  using Target = StreamLauncher::Target;

  StreamHostProxy(Group& group, std::shared_ptr<StreamLauncher> launcher, kernel::Collective collective,
                  const Target& target, std::function<bool()> queue_early)
      : group_(group),
        launcher_(std::move(launcher)),
        collective_(collective),
        target_(target),
        queue_early_(std::move(queue_early)) {}

  /// After a failure kernels may still be falling through, which look at this memory. If they do not, it stays.
  ~StreamHostProxy() override {
    if (!tried_ || over_) return;
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
    memory_ = at::empty({int64_t(sizeof(Words) + std::min(room.slices, kSlots) * room_)},
                        at::TensorOptions().dtype(at::kByte).device(at::kCPU).pinned_memory(true));
    tells_.resize(room.rounds);
    begin_anew();
    return {};
  }

  std::byte* at(size_t k) override { return data() + sizeof(Words) + k % kSlots * room_; }
  const Stamp* said() override { return &words().said; }

  Status begin_round(std::span<const Operation> steps) override {
    const size_t round = begun_.load(std::memory_order_relaxed);
    tells_[round] = steps.empty() ? (round == 0 ? 0 : tells_[round - 1]) : round + 1;
    if (!steps.empty()) {
      NVX_TRY(await_room());
      tried_ = true;
      NVX_TRY(launch(steps, {&words().ended, tells_[round]}));
    }
    begun_.store(round + 1, std::memory_order_release);
    if (round + 1 == kMostBefore) (void)queue_early_();
    return {};
  }

  /// As if nothing had been said yet: before the first round, and before those of each replay, when those of the last
  /// one have ended, and the host's part of it has no more to hear.
  void begin_anew() {
    say(0);
    std::atomic_ref<Stamp>(words().ended).store(0, std::memory_order_release);
  }

  void say(Stamp what) override { std::atomic_ref<Stamp>(words().said).store(what, std::memory_order_release); }

  Status await(size_t round, const Deadline& deadline, const std::function<void()>& meanwhile) override {
    for (int looks = 0; !has_ended(round); ++looks) {
      NVX_TRY(group_.device().look());
      NVX_TRY(group_.check_alive());
      if (deadline.passed(Clock::now())) return late(deadline);
      meanwhile();
      pause_after(looks);
      if (looks % 256 == 255) group_.look_for_interrupt();
    }
    return {};
  }

  /// What graphs use stays, whether it has ended or not.
  Status see_end(const Deadline& deadline) override {
    if (target_.capture != 0) return {};
    NVX_TRY(await(tells_.size() - 1, deadline, [] {}));
    over_ = true;
    return {};
  }

 private:
  static constexpr size_t kAlign = 64;
  static constexpr std::chrono::milliseconds kMoment{500};  ///< by when kernels fall through that were called off
  static constexpr size_t kMostBefore = 32;                 ///< rounds, before the host's part may begin
  static constexpr uint64_t kMostAhead = 256;               ///< operations of the group that a stream holds
  /// What host and device tell each other, before the slots. Each has one writer while rounds are under way, and a line
  /// of its own.
  struct Words {
    alignas(kAlign) Stamp said;   ///< the host's
    alignas(kAlign) Stamp ended;  ///< the device's: the last round that has, counted from 1
  };

  /// A stream takes no more than about a thousand launches that have not ended: who gave it another one would wait in
  /// the driver, where nobody can end that. And what it has taken needs the host's part.
  Status await_room() {
    if (target_.capture != 0) return {};
    for (int looks = 0;; ++looks) {
      const uint64_t launched = group_.device().launched();
      if (launched < kMostAhead || group_.device().ended_well(launched - kMostAhead)) return {};
      NVX_TRY(group_.device().look());
      NVX_TRY(group_.check_alive());
      if (!queue_early_())
        return {Code::kSystem, "nvx: this process can have no thread for the host's part of " +
                                   std::string(nvx::name(collective_)) + ", which is too large to be begun without it"};
      pause_after(looks);
      if (looks % 256 == 255) group_.look_for_interrupt();
    }
  }

  /// A round of no steps has ended when the one before it has.
  bool has_ended(size_t round) const {
    return begun_.load(std::memory_order_acquire) > round &&
           std::atomic_ref<Stamp>(words().ended).load(std::memory_order_acquire) >= tells_[round];
  }

  std::byte* data() const { return static_cast<std::byte*>(memory_.data_ptr()); }
  Words& words() const { return *reinterpret_cast<Words*>(data()); }

  Status launch(std::span<const Operation> operations, const Tells& tells) {
    const BesideCaptures beside;
    const c10::StreamGuard on(target_.stream);
    c10::SmallVector<const Operation*, kernel::kLaunchJobs> all;
    for (const Operation& operation : operations) all.push_back(&operation);
    const Begins begins = target_.capture != 0 ? Begins::kInReplays : Begins::kNow;
    return launcher_->in_order(target_, [&] {
      return group_.device().launch({all.data(), all.size()}, target_.native, begins, tells);
    });
  }

  bool is_over() const {
    const BesideCaptures beside;
    return launcher_->ended();
  }

  Status late(const Deadline& deadline) const {
    return group_.fail({.code = Code::kTimeout,
                        .cause = target_.stream.device().str() + " of " + group_.topology().describe(group_.rank()) +
                                 " has not done its part of " + nvx::name(collective_) + " of group " + group_.name() +
                                 " in " + seconds(deadline),
                        .advice = kLookAtDevice});
  }

  Group& group_;
  const std::shared_ptr<StreamLauncher> launcher_;
  const kernel::Collective collective_;
  const Target target_;
  const std::function<bool()> queue_early_;
  at::Tensor memory_;  // the words, and all slots
  size_t room_ = 0;
  std::vector<Stamp> tells_;      // by round: what the device tells when it has ended
  std::atomic<size_t> begun_{0};  // rounds, after what tells_ has of them
  bool tried_ = false;            // something has been launched, or perhaps
  bool over_ = false;
};

}  // namespace

bool HostProxyPath::agree_to_serve(const Operation& operation, at::Device device) {
  return can_be_proxied(operation.collective, operation.dtype, operation.count, group_->plan_facts()) &&
         agree_to_serve(device);
}

bool HostProxyPath::agree_to_serve(at::Device device) {
  if (device.type() != kernel_device() || group_->topology().hosts.size() == 1) return false;
  const bool yes = served_.answer(device, [&] {
    refuse_to_open(*group_, device);
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

std::unique_ptr<HostProxy> HostProxyPath::make(Group& group, kernel::Collective collective,
                                               const StagingCopies& staging, std::function<bool()> queue_early) {
  return std::make_unique<StreamHostProxy>(group, launcher_, collective, target_of(staging), std::move(queue_early));
}

StreamLauncher::Target HostProxyPath::target_of(const StagingCopies& staging) {
  const c10::impl::VirtualGuardImpl guard(staging.stream().device_type());
  return {staging.stream(), guard.getStreamNativeHandle(staging.stream()), staging.capture()};
}

void HostProxyPath::begin_anew(HostProxy& proxy) { static_cast<StreamHostProxy&>(proxy).begin_anew(); }

Status HostProxyPath::call_host(const StagingCopies& staging, void (*what)(void*), void* with) {
  const BesideCaptures beside;
  const c10::StreamGuard on(staging.stream());
  const StreamLauncher::Target target = target_of(staging);
  return launcher_->in_order(target, [&] { return kernel::call_host(target.native, what, with); });
}

}  // namespace nvx
