#include "torch/relay_path.h"

#include <ATen/ops/from_blob.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "base/contain.h"
#include "memory/beside_captures.h"
#include "torch/store.h"
#include "torch/work.h"

namespace nvx {
namespace {

using kernel::Piece;

/// One operation's, whose turn has come on the host and on the caller's stream, too. Kernels follow each other on one
/// stream, as all ranks of the host launch them; what comes down and what goes up have streams of their own, and
/// neither holds the other up.
class StreamRelay final : public Relay {
 public:
  StreamRelay(std::shared_ptr<Group> group, std::shared_ptr<StreamLauncher> launcher, kernel::Collective collective,
              const Tracks& tracks, const c10::Stream& kernels)
      : group_(std::move(group)),
        launcher_(std::move(launcher)),
        collective_(collective),
        down_(tracks.more.value_or(tracks.down)),
        up_(tracks.up),
        kernels_(kernels),
        turn_(kernels.device_type()) {
    for (std::optional<Slot>& slot : slots_) slot.emplace(kernels.device_type());
  }

  /// Of one that has failed, too, the caller waits for all that was begun.
  ~StreamRelay() override {
    if (begun_) contain("the end of an operation", [&] { (void)end(); });
  }

  Status begin(const Room& room) override {
    const BesideCaptures beside;
    begun_ = true;
    memory_ = at::empty({int64_t(kSlots), padded(room.host)},
                        at::TensorOptions().dtype(at::kByte).device(at::kCPU).pinned_memory(room.host != 0));
    if (room.device == 0) return {};
    // It belongs to the stream of the kernels, who write there; what comes down is read on another one.
    const c10::StreamGuard on(kernels_);
    scratch_ = at::empty({int64_t(kSlots), padded(room.device)},
                         at::TensorOptions().dtype(at::kByte).device(kernels_.device()));
    c10::impl::VirtualGuardImpl(kernels_.device_type()).recordDataPtrOnStream(scratch_.storage().data_ptr(), down_);
    return {};
  }

  std::byte* at(size_t k) override { return static_cast<std::byte*>(memory_[int64_t(k % kSlots)].data_ptr()); }
  std::byte* scratch(size_t k) override { return static_cast<std::byte*>(scratch_[int64_t(k % kSlots)].data_ptr()); }

  /// The slot's memory comes down, or what comes from other hosts is written there, only when what it was used for
  /// before has gone up.
  Status set_out(size_t k, std::span<const Operation> steps, const Haul& down) override {
    const BesideCaptures beside;
    NVX_TRY(launch(steps));
    Slot& slot = slot_of(k);
    if (!steps.empty()) follow(down_, kernels_);
    if (k >= kSlots) slot.gone_up.block(down_);
    copy(down_, host(k, down), there(down.there));
    slot.come_down.record(down_);
    slot.came = true;
    return {};
  }

  Status arrive(size_t k, const Deadline& deadline, const std::function<void()>& meanwhile) override {
    Slot& slot = slot_of(k);
    for (int looks = 0; slot.came; ++looks) {
      if (const std::optional<Status> end = look(slot, deadline)) {
        slot.came = false;
        return *end;
      }
      meanwhile();
      pause_after(looks);
      if (looks % 256 == 255) group_->look_for_interrupt();
    }
    return {};
  }

  Status come_home(size_t k, std::span<const Haul> up, std::span<const Operation> steps) override {
    const BesideCaptures beside;
    for (const Haul& haul : up) copy(up_, there(haul.there), host(k, haul));
    slot_of(k).gone_up.record(up_);
    if (steps.empty()) return {};
    follow(kernels_, up_);
    return launch(steps);
  }

  Status end() override {
    const BesideCaptures beside;
    begun_ = false;
    follow(up_, kernels_);
    follow(up_, down_);
    return {};
  }

 private:
  static constexpr size_t kAlign = 64;
  struct Slot {
    explicit Slot(at::DeviceType type) : come_down(type), gone_up(type) {}
    c10::Event come_down, gone_up;
    bool came = false;  // something comes down that nobody has seen arrive
  };
  Slot& slot_of(size_t k) { return *slots_[k % kSlots]; }
  static int64_t padded(size_t bytes) { return int64_t(kernel::ceil_div(bytes, kAlign) * kAlign); }

  void follow(const c10::Stream& stream, const c10::Stream& first) {
    turn_.record(first);
    turn_.block(stream);
  }
  at::Tensor there(Piece part) const {
    return at::for_blob(part.data, {int64_t(part.bytes)})
        .options(at::TensorOptions().dtype(at::kByte).device(kernels_.device()))
        .target_device(kernels_.device())
        .make_tensor();
  }
  at::Tensor host(size_t k, const Haul& haul) const {
    return memory_[int64_t(k % kSlots)].narrow(0, int64_t(haul.at), int64_t(haul.there.bytes));
  }
  static void copy(const c10::Stream& stream, const at::Tensor& to, const at::Tensor& from) {
    if (from.numel() == 0) return;
    const c10::StreamGuard on(stream);
    const Movement movement;
    to.copy_(from, /*non_blocking=*/true);
  }

  Status launch(std::span<const Operation> operations) {
    if (operations.empty()) return {};
    const c10::StreamGuard on(kernels_);
    const c10::impl::VirtualGuardImpl guard(kernels_.device_type());
    const StreamLauncher::Target target{kernels_, guard.getStreamNativeHandle(kernels_), 0};
    NVX_TRY(launcher_->follow(target));
    c10::SmallVector<const Operation*, kernel::kLaunchJobs> all;
    for (const Operation& operation : operations) all.push_back(&operation);
    const Status status = group_->device().launch({all.data(), all.size()}, target.native);
    const Status noted = launcher_->note(target);  // also where it was refused
    NVX_TRY(status);
    return noted;
  }

  std::optional<Status> look(const Slot& slot, const Deadline& deadline) {
    const BesideCaptures beside;
    if (group_->failed()) return group_->failure();
    if (slot.come_down.query()) return group_->device().look();
    if (!deadline.passed(Clock::now())) return std::nullopt;
    if (const Status verdict = group_->device().look(); !verdict.ok()) return verdict;
    return group_->fail({.code = Code::kTimeout,
                         .cause = kernels_.device().str() + " of " + group_->topology().describe(group_->rank()) +
                                  " has not done its part of " + nvx::name(collective_) + " of group " +
                                  group_->name() + " in " + seconds(deadline),
                         .advice = kLookAtDevice});
  }

  const std::shared_ptr<Group> group_;
  const std::shared_ptr<StreamLauncher> launcher_;
  const kernel::Collective collective_;
  const c10::Stream down_, up_, kernels_;
  c10::Event turn_;
  bool begun_ = false;
  at::Tensor memory_, scratch_;  // of all slots; of the host, and of the device
  std::array<std::optional<Slot>, kSlots> slots_;
};

}  // namespace

bool RelayPath::agree_to_serve(Group& group, const Operation& operation, at::Device device) {
  if (device.type() != kernel_device() ||
      why_not_relayed(operation.collective, operation.dtype, operation.count, group.plan_facts()))
    return false;
  const bool yes = served_.answer(device, [&] {
    const BesideCaptures beside;
    const c10::OptionalDeviceGuard on(device);
    TorchStore store(store_, group.size());
    const bool opened = group.device().open(store, device.index(), launcher_);
    if (const Status alive = group.check_alive(); !alive.ok()) raise(alive);
    return opened;
  });
  if (yes && device != served_.device()) refuse_other_device(group, served_.device(), device);
  return yes;
}

std::unique_ptr<Relay> RelayPath::make(const std::shared_ptr<Group>& group, kernel::Collective collective,
                                       const Tracks& tracks, const c10::Stream& kernels) {
  return std::make_unique<StreamRelay>(group, launcher_, collective, tracks, kernels);
}

}  // namespace nvx
