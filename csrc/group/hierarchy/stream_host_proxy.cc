#include "group/hierarchy/stream_host_proxy.h"

#include <cstdlib>
#include <string_view>

#include "base/contain.h"
#include "base/round_up.h"
#include "group/device/device_communicator.h"

namespace nvx {
namespace {

constexpr std::chrono::milliseconds kAbortTime{500};  // the time within which aborted kernels end
constexpr size_t kMostBefore = 32;                    // rounds that begin before the host's part may begin
constexpr uint64_t kMostAhead = 256;                  // operations of the group that a stream holds

/// With CUDA_LAUNCH_BLOCKING=1 a launch returns when its kernel has ended, and kernels may wait for the host's part.
size_t most_before() {
  static const char* const kBlocking = std::getenv("CUDA_LAUNCH_BLOCKING");
  return kBlocking && *kBlocking && std::string_view(kBlocking) != "0" ? 0 : kMostBefore;
}

}  // namespace

/// After a failure, kernels that are still ending may access this memory. If they do not end in time, it stays.
StreamHostProxy::~StreamHostProxy() {
  if (!tried_ || over_) return;
  contain("the end of an operation", [&] {
    if (setting_.order->await_end(kAbortTime)) return;
    (void)new std::pair(std::move(memory_), std::move(device_slots_));
  });
}

Status StreamHostProxy::make(const SlotRequest& request) {
  slot_bytes_ = round_up(request.bytes, kAlign);
  const size_t slots = std::min(request.slices, kSlots) * slot_bytes_;
  try {
    if (request.moves_only && setting_.on_device && slots != 0) device_slots_ = setting_.on_device(slots);
  } catch (const Error& error) {  // the other ranks, which have their memory, would wait for this one
    return core_.failures.fail(error.failure());
  }
  memory_ = setting_.pinned(sizeof(Words) + (device_slots_ ? 0 : slots));
  slots_ = device_slots_ ? device_slots_.get() : memory_.get() + sizeof(Words);
  round_ends_.resize(request.rounds);
  reset();
  return {};
}

/// Resets both counters before the first round, and before the rounds of each replay. By then the rounds of the last
/// replay have ended, and the host's part no longer reads them.
void StreamHostProxy::reset() {
  signal(0);
  std::atomic_ref<Stamp>(words().device).store(0, std::memory_order_release);
}

Status StreamHostProxy::begin_round(std::span<const Operation> steps) {
  const size_t round = begun_.load(std::memory_order_relaxed);
  round_ends_[round] = steps.empty() ? (round == 0 ? 0 : round_ends_[round - 1]) : round + 1;
  if (!steps.empty()) {
    NVX_TRY(await_room());
    const bool may_queue = round < most_before() || setting_.stream.capture != 0 || setting_.queue_early();
    if (!may_queue && most_before() == 0) return no_thread();  // otherwise the caller runs the host's part
    tried_ = true;
    std::vector<const Operation*> all;
    for (const Operation& step : steps) all.push_back(&step);
    NVX_TRY(device_.launch(all, setting_.stream, {&words().device, round_ends_[round]}));
  }
  begun_.store(round + 1, std::memory_order_release);
  return {};
}

Status StreamHostProxy::await(size_t round, const Deadline& deadline, const std::function<void()>& meanwhile) {
  const auto ended = [&] {
    if (has_ended(round)) return true;
    meanwhile();
    return false;
  };
  const std::optional<Status> end = wait_on_device(core_.failures, device_, ended, deadline);
  return end ? *end : late(deadline);
}

/// Memory that graphs use stays, whether the operation has ended or not.
Status StreamHostProxy::await_all(const Deadline& deadline) {
  if (setting_.stream.capture != 0) return {};
  NVX_TRY(await(round_ends_.size() - 1, deadline, [] {}));
  over_ = true;
  return {};
}

/// A stream holds about a thousand launches that have not ended. One more blocks in the driver, where no timeout ends
/// the wait, while the launches before it need the host's part.
Status StreamHostProxy::await_room() const {
  if (setting_.stream.capture != 0) return {};
  Status refused;
  const std::optional<Status> end = wait_on_device(
      core_.failures, device_, [&] { return has_room(&refused); }, Deadline());
  return refused.ok() ? *end : refused;
}

/// Whether the stream's queue has room for one more launch. Also true if it never will: `refused` then has the reason.
bool StreamHostProxy::has_room(Status* refused) const {
  const uint64_t launched = device_.launched();
  if (launched < kMostAhead || device_.finished() >= launched - kMostAhead) return true;
  if (setting_.queue_early() || !device_.check_kernels().ok()) return false;
  *refused = no_thread();
  return true;
}

Status StreamHostProxy::no_thread() const {
  return {Code::kSystem,
          "nvx: this process cannot create a thread for the host's part of " +
              std::string(nvx::name(setting_.collective)) + ", which is too large to begin without one",
          "check the limits of processes and threads (ulimit -u, pids.max of the cgroup)"};
}

/// A round without steps has ended when the round before it has.
bool StreamHostProxy::has_ended(size_t round) const {
  return begun_.load(std::memory_order_acquire) > round &&
         std::atomic_ref<Stamp>(words().device).load(std::memory_order_acquire) >= round_ends_[round];
}

Status StreamHostProxy::late(const Deadline& deadline) const {
  return core_.failures.fail({.code = Code::kTimeout,
                              .cause = setting_.device + " of " + core_.diagnosis.self() +
                                       " has not finished its part of " + nvx::name(setting_.collective) +
                                       " of group " + core_.members.name + " in " + seconds(deadline),
                              .advice = kCheckDevice});
}

}  // namespace nvx
