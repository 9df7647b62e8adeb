#include "torch/device/delegate.h"

#include <c10/core/DeviceGuard.h>

#include "base/config.h"
#include "base/contain.h"
#include "base/flag.h"
#include "base/hash.h"
#include "base/interrupt.h"
#include "group/plan/delegate_plan.h"
#include "memory/driver/relaxed_capture_guard.h"
#include "torch/core/argument_error.h"
#include "torch/streams/staging_copies.h"

namespace nvx {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kShutdownTime{
    5000};  // when this rank leaves: the limit for the next collective in flight to end
constexpr milliseconds kNamingTime{
    5000};  // how long the barrier may take to name missing ranks after the device's timeout

}  // namespace

class Delegate::HostBarrier final : public Task, public HostPart {
 public:
  HostBarrier(std::shared_ptr<Group> group, const Operation& o) : group_(std::move(group)) {
    operation_.collective = kernel::Collective::kBarrier;
    operation_.precedes = o.collective;
    operation_.dtype = o.dtype;
    operation_.op = o.op;
    operation_.root = o.root;
    operation_.count = o.count;
    operation_.shape = Hash().add(o.shape).add("handed over").value();
    operation_.timeout = o.timeout;
    operation_.number = o.number;
  }
  void perform(Runner runner) override {
    contain_and(
        [&] { outcome_ = group_->run(operation_, runner); },
        [&](const std::exception* error) {
          outcome_ = group_->fail({Code::kSystem, error ? error->what() : "the barrier with the other ranks failed"});
        });
  }
  bool is_over() const override { return done(); }
  Status outcome() const override { return outcome_; }

 private:
  const std::shared_ptr<Group> group_;
  Operation operation_;
  Status outcome_;
};

Delegate::~Delegate() {
  if (origin_.elsewhere()) {
    new auto(std::move(backend_));  // its threads exist only in the parent ...
    new auto(std::move(flights_));  // ... and so do its events
    return;
  }
  const Uninterrupted here;
  contain("leaving a delegate", [&] { finalize(); });
}

/// All ranks capture a call, or none does, so all ranks decide alike.
bool Delegate::agree_to_serve(const TensorOperation& c, size_t bytes) {
  const Operation& o = c.operation;
  if (why_not_delegated({o.collective, o.dtype, o.op, bytes}, config().delegate)) return false;
  if (capture_of(current_stream(c.device)) != 0) return false;
  return connected_on(c.device);
}

bool Delegate::agree_to_serve(at::Device device, size_t bytes) {
  return is_message_delegated(bytes, config().delegate) && connected_on(device);
}

bool Delegate::connected_on(at::Device device) {
  const bool yes = connected_.agree(device, [&] { return set_up(device); });
  if (!yes || device == device_) return yes;
  throw_argument_error("nvx: group " + group_->name() + " delegates to NCCL on " + device_.str() +
                       " (NVX_DELEGATE), and this tensor is on " + device.str() +
                       ". Next: keep the tensors of a group on one device of each rank");
}

bool Delegate::set_up(at::Device device) {
  lane_group_ = of_devices_();
  device_ = device;
  watcher_ = Poller::of(weak_from_this(), &Delegate::poll, {kWatchInterval, kWatchInterval});
  std::string why_not;
  try {
    DelegateSetup setup(*group_, lane_group_->topology(), store_, device);
    backend_ = setup.agree();
    why_not = setup.why_not();
  } catch (const Error& error) {
    // A rank that did not receive the others' answers, or whose answer they did not receive, cannot know their state.
    (void)fail(with_context(error.failure(), "while the ranks agreed on what to delegate"));
    raise(group_->failure());
  }
  if (group_->rank() == 0) log_setup(why_not);
  return backend_ != nullptr;
}

/// Logged once a group, by rank 0. The user requested a delegate, so its absence is a warning.
void Delegate::log_setup(const std::string& why_not) const {
  if (why_not.empty()) {
    NVX_LOG(kInfo, "group %s: collectives that NVX_DELEGATE names are delegated to %s, on %s of this rank",
            group_->name().c_str(), backend_->getBackendName().c_str(), device_.str().c_str());
  } else {
    NVX_LOG(kWarn, "group %s: NVX_DELEGATE has no effect: %s", group_->name().c_str(), why_not.c_str());
  }
}

Status Delegate::ready() {
  NVX_TRY(group_->check_alive());
  NVX_TRY(group_->device().check_kernels());
  return lane_group_->failed() ? fail(lane_group_->failure().failure()) : Status();
}

Status Delegate::begin(TensorOperation& c, const c10::Stream& stream) {
  NVX_TRY(ready());
  const Operation& o = c.operation;
  const auto flight = std::make_shared<Flight>(stream.device_type());
  flight->timeout = o.timeout;
  flight->what = describe(o.fingerprint()) + " #" + std::to_string(o.number);
  const auto barrier = std::make_shared<HostBarrier>(lane_group_, o);
  flight->host_part = barrier;
  NVX_LOG(kTrace, "group %s rank %d #%llu %s on %s: delegated to %s (NVX_DELEGATE)", group_->name().c_str(),
          group_->rank(), static_cast<unsigned long long>(o.number), nvx::name(o.collective), device_.str().c_str(),
          backend_->getBackendName().c_str());
  return begin(flight, stream, [&] {
    lane_group_->lane().submit(barrier);
    call_delegate(*backend_, o, device_);
  });
}

Status Delegate::begin(const std::shared_ptr<Flight>& flight, const c10::Stream& stream,
                       const std::function<void()>& sync_and_call) {
  Status status;
  contain_and([&] { status = enqueue(flight, stream, sync_and_call); },
              [&](const std::exception* error) {
                status =
                    fail({Code::kSystem, backend_->getBackendName() + " did not take " + flight->what + " of group " +
                                             group_->name() + " on " + self() + ": " + text_of(error)});
              });
  if (group_->failed()) cancel();  // cancel() of a failure that came during the call did not see this call
  return status;
}

Status Delegate::enqueue(const std::shared_ptr<Flight>& flight, const c10::Stream& stream,
                         const std::function<void()>& sync_and_call) {
  flight->begun.record(stream);
  {
    MutexLock lock(mutex_);
    if (group_->failed()) return group_->failure();
    if (finalized_ || cancelled_) return {Code::kInvalid, "nvx: " + self() + " has left group " + group_->name()};
    flights_.push_back(flight);
    (void)watcher_->wake();
  }
  sync_and_call();
  flight->ended.record(stream);
  flight->enqueued.store(true, std::memory_order_release);
  return {};
}

bool Delegate::poll() {
  const bool well = check_flights().ok();
  MutexLock lock(mutex_);
  return well && !finalized_ && !flights_.empty();
}

bool Delegate::Flight::over() const {
  return enqueued.load(std::memory_order_acquire) && ended.query() && host_part->is_over() && host_part->outcome().ok();
}

bool Delegate::clear() {
  while (!flights_.empty() && flights_.front()->over()) flights_.pop_front();
  return flights_.empty();
}

/// A failure of one of the two groups fails both, and aborts the collectives in flight. An error of the device when it
/// is queried does the same, because the end of its work can no longer be detected.
Status Delegate::check_flights() {
  Status now;
  contain_and([&] { now = check(); },
              [&](const std::exception* error) {
                now = {Code::kSystem, "nvx: " + device_.str() + " of " + self() +
                                          ": the query for the end of the collectives that group " + group_->name() +
                                          " has delegated to " + backend_->getBackendName() +
                                          " failed on the device: " + text_of(error)};
              });
  return now.ok() ? now : fail(now.failure());
}

Status Delegate::check() {
  const RelaxedCaptureGuard relaxed;
  const c10::OptionalDeviceGuard on(device_);  // for queries of events: see PooledEvent
  {
    MutexLock lock(mutex_);
    if (finalized_ || clear()) return {};
  }
  NVX_TRY(group_->check_peers());
  NVX_TRY(lane_group_->check_peers());
  return check_first_flight();
}

/// The device runs the collectives in order, so only the first one can have begun without having ended.
Status Delegate::check_first_flight() {
  MutexLock lock(mutex_);
  if (flights_.empty()) return {};
  const std::shared_ptr<Flight> first = flights_.front();
  if (!first->seen && first->begun.query()) {
    first->seen = true;
    first->deadline = Deadline::after(first->timeout);
  }
  if (first->host_part->is_over() && !first->host_part->outcome().ok()) return first->host_part->outcome();
  const bool may_name_a_rank = !first->host_part->is_over() && !first->deadline.passed(Clock::now() - kNamingTime);
  const bool late = first->seen && first->deadline.passed(Clock::now()) && !may_name_a_rank;
  lock.unlock();
  if (cancelled_) return group_->failure();  // the abort causes the backend's errors from here on
  const std::string where = " of group " + group_->name() + " on " + self();
  if (backend_->getError() != c10d::ErrorType::SUCCESS)
    return {Code::kSystem,
            "nvx: " + backend_->getBackendName() + " reports that " + first->what + where + " has failed"};
  if (!late) return {};
  return {Code::kTimeout,
          "nvx: timed out in " + first->what + where + " after " + seconds(double(first->timeout.count()) / 1e3) +
              " on the device, delegated to " + backend_->getBackendName(),
          "check what the devices of the other ranks do; if they are only slow, raise the timeout "
          "(init_process_group(timeout=), NVX_TIMEOUT_S, nvx.set_timeout)"};
}

Status Delegate::fail(const Failure& failure) {
  const Status first = group_->fail(failure);
  if (lane_group_) (void)lane_group_->fail(first.failure());
  if (backend_) cancel();
  return first;
}

void Delegate::cancel() {
  if (!cancelled_.exchange(true)) abort_delegate(backend_);
}

void Delegate::finalize() {
  if (origin_.elsewhere() || !connected_.is_yes()) return;
  const auto in_flight = [&] {
    MutexLock lock(mutex_);
    return flights_.size();
  };
  bool clear = false, stopped = false;
  const auto over = [&] {
    const bool well = check_flights().ok();
    clear = in_flight() == 0;
    return clear || !well || cancelled_ || (stopped = stopped || stop_requested());
  };
  size_t left = in_flight(), before = left + 1;
  while (left < before && !poll_until(over, Deadline::after(kShutdownTime))) {
    before = left;
    left = in_flight();
  }
  {
    MutexLock lock(mutex_);
    if (std::exchange(finalized_, true)) return;
    flights_.clear();
  }
  if (!clear && !cancelled_) {
    NVX_LOG(kWarn, "group %s: collectives delegated to %s that had not ended were aborted", group_->name().c_str(),
            backend_->getBackendName().c_str());
  }
  if (!clear) return cancel();
  if (!cancelled_.exchange(true)) shut_delegate_down(backend_, kShutdownTime);
}

}  // namespace nvx
