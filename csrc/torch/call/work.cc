#include "torch/call/work.h"

#include <ATen/Context.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <c10/util/Exception.h>
#include <c10/util/ScopeExit.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <algorithm>
#include <optional>

#include "base/config.h"
#include "base/contain.h"
#include "base/error.h"
#include "base/log.h"
#include "torch/call/completion_poller.h"
#include "torch/core/argument_error.h"
#include "torch/core/hook.h"
#include "torch/core/interrupt.h"

namespace nvx {
namespace {

c10::intrusive_ptr<c10::ivalue::Future> new_future(const std::vector<c10::Stream>& streams, bool of_lists) {
  std::vector<c10::Device> devices;
  for (const c10::Stream& stream : streams) {
    if (std::ranges::find(devices, stream.device()) == devices.end()) devices.push_back(stream.device());
  }
  c10::TypePtr type = c10::ListType::create(c10::TensorType::get());
  if (of_lists) type = c10::ListType::create(std::move(type));
  return c10::make_intrusive<c10::ivalue::Future>(std::move(type), std::move(devices));
}

uint64_t next_completion_key() {
  static std::atomic<uint64_t> keys{0};
  return keys.fetch_add(1, std::memory_order_relaxed) + 1;
}

/// Whether the program sees a failure, by a call that raises it or by a future, or does not see it yet.
enum class Seen { kByProgram, kNotYet };

/// Whether `NVX_ON_ERROR=abort` makes a failure end the process. An operation that the user interrupts, or that this
/// rank aborts by leaving or aborting a group, is no failure of the process. A peer that has left in good order, or has
/// reported a failure, counts only if the program sees it: otherwise a leftover receive at the program's end would
/// abort the process.
bool ends_process(Code code, Seen seen) {
  if (config().on_error != "abort") return false;
  switch (code) {
    case Code::kInvalid:
    case Code::kInterrupted:
    case Code::kAborted: return false;
    case Code::kPeerLeft:
    case Code::kPeerFailed: return seen == Seen::kByProgram;
    default: return seen == Seen::kByProgram || !exiting.load();
  }
}

void end_process_on_error(const Status& status, Seen seen) {
  if (status.ok() || !ends_process(status.code(), seen)) return;
  log_line("%s (NVX_ON_ERROR=abort)", status.reason().c_str());
  without_python_lock([] { HookThread::await_all(); });  // they write the diagnostics that such an end is for
  std::abort();
}

[[noreturn]] void throw_failure(const Status& status) {
  if (status.code() == Code::kInvalid) throw_argument_error(status.what());
  C10_THROW_ERROR(DistBackendError, status.what());
}

/// title: "nvx:all_reduce", as in Facts.
std::string what_is(const char* title) { return title ? title + std::string("nvx:").size() : "an operation"; }

}  // namespace

void raise(const Status& status) {
  raise_interrupt();
  end_process_on_error(status, Seen::kByProgram);
  throw_failure(status);
}

void end_process_if_unseen(const Status& status) { end_process_on_error(status, Seen::kNotYet); }

std::exception_ptr exception_of(const Status& status) {
  try {
    throw_failure(status);
  } catch (...) {
    return std::current_exception();
  }
}

std::string text_of(const std::exception* error) {
  const std::string text = error ? error->what() : "it threw no std::exception";
  return text.substr(0, text.find('\n'));
}

Status fail_on_device(Group& group, at::Device device, const std::string& what, const std::exception* error) {
  return group.fail({Code::kSystem, device.str() + " of " + group.topology().describe(group.rank()) + ": " + what +
                                        " of group " + group.name() + " failed on the device: " + text_of(error)});
}

Status run_in_order(Group& group, std::span<TensorOperation> collectives, Runner runner) {
  for (TensorOperation& c : collectives) {
    NVX_TRY(c.chunks ? c.chunks->run(group, c.operation, runner) : group.run(c.operation, runner));
  }
  return {};
}

Route route_of(std::span<const TensorOperation> collectives) {
  for (const TensorOperation& c : collectives) {
    if (goes_in_parts(c.route())) return c.route();
  }
  return collectives.empty() ? Route::kMemory : collectives.front().route();
}

void copy_in(std::span<TensorOperation> collectives) {
  for (TensorOperation& c : collectives) {
    if (c.copies_in.empty()) [[likely]]
      continue;
    const WithoutAutograd guard;
    for (auto& [user, stand_in] : c.copies_in) stand_in.copy_(user);
  }
}

void copy_back(std::span<TensorOperation> collectives) {
  for (TensorOperation& c : collectives) {
    if (c.copies_out.empty()) [[likely]]
      continue;
    const WithoutAutograd guard;
    for (auto& [user, stand_in] : c.copies_out) user.copy_(stand_in);
  }
}

at::Device device_of(std::span<const TensorOperation> collectives) {
  return collectives.empty() ? at::Device(at::kCPU) : collectives.front().device;
}

Tensors all_tensors(std::span<const TensorOperation> collectives, const Tensors& outputs, const Tensors& inputs) {
  Tensors all = outputs;
  if (&inputs != &outputs) all.insert(all.end(), inputs.begin(), inputs.end());
  for (const TensorOperation& c : collectives) {
    all.insert(all.end(), c.stand_ins.begin(), c.stand_ins.end());
    for (const Loads* loads : {&c.copies_in, &c.copies_out}) {
      for (const auto& [user, stand_in] : *loads) all.push_back(stand_in);
    }
  }
  return all;
}

Loads loads_of(std::span<const TensorOperation> collectives, Loads TensorOperation::*which) {
  Loads all;
  for (const TensorOperation& c : collectives) all.insert(all.end(), (c.*which).begin(), (c.*which).end());
  return all;
}

/// Exists on the stack while its thread reports a work's end. A thread's objects form a list, innermost first.
struct NvxWork::Reporting {
  explicit Reporting(const NvxWork& work) : work(work), outer(std::exchange(innermost_, this)) {}
  ~Reporting() { innermost_ = outer; }
  Reporting(const Reporting&) = delete;

  const NvxWork& work;
  Reporting* const outer;
  std::optional<uint64_t> calls;  ///< Counts::cpu_calls at the request of the future, or after the callback's last call
};

thread_local NvxWork::Reporting* NvxWork::innermost_ = nullptr;

NvxWork::NvxWork(Facts facts, Tensors outputs)
    : Work(facts.rank, facts.type),
      facts_(std::move(facts)),
      outputs_(std::move(outputs)),
      completion_key_(next_completion_key()) {}

void NvxWork::count_in(const SharedCounts& counts) {
  counts_ = counts;
  counts_->pending.fetch_add(1, std::memory_order_relaxed);
}

int64_t NvxWork::reporting_here(const SharedCounts& counts) {
  int64_t count = 0;
  for (const Reporting* t = innermost_; t; t = t->outer) count += t->work.counts_ == counts;
  return count;
}

bool NvxWork::count_call(const SharedCounts& counts) {
  const uint64_t before = counts->cpu_calls.fetch_add(1, std::memory_order_relaxed);
  if (!innermost_ || innermost_->work.counts_ != counts || !innermost_->calls) [[likely]]
    return true;
  return std::exchange(innermost_->calls, before + 1) == before;
}

bool NvxWork::belong_to(c10::intrusive_ptr<CoalescedWork> coalesced) {
  MutexLock lock(future_mutex_);
  if (over_) return false;
  coalesced_ = std::move(coalesced);
  return true;
}

c10::intrusive_ptr<c10::ivalue::Future> NvxWork::getFuture() {
  origin_.check(facts_.rank);
  observed_ = true;
  begin_timeout();
  MutexLock lock(future_mutex_);
  if (counts_) calls_before_future_ = counts_->cpu_calls.load(std::memory_order_relaxed);
  if (future_) return future_;
  const auto future = new_future(streams_, facts_.lists != 0);
  if (!over_) return future_ = future;
  lock.unlock();  // it is published once it has completed: see isCompleted()
  if (const std::exception_ptr error = exception()) {
    end_process_on_error(failure(), Seen::kByProgram);
    future->setError(error);
  } else {
    complete(*future);
  }
  lock.lock();
  if (!future_) future_ = future;
  return future_;
}

void NvxWork::ends_on(const std::vector<c10::Stream>& streams) {
  for (const c10::Stream& stream : streams) {
    if (std::ranges::find(streams_, stream) == streams_.end()) streams_.push_back(stream);
  }
}

/// torch makes users of the future wait for the current streams, one of each device. So if a device has several
/// streams, one waits for the others and is made the current one.
/// An exception of the device completes the future, too, with an error.
void NvxWork::complete(c10::ivalue::Future& future) {
  const auto mark = [&] {
    std::vector<c10::Stream> last;
    for (const c10::Stream& stream : streams_) {
      PooledEvent there;  // for all: if markCompleted() could not record an event, it would never wake its waiters
      there.record(stream);
      const auto known = std::ranges::find(last, stream.device(), &c10::Stream::device);
      if (known == last.end()) {
        last.push_back(stream);
      } else {
        there.block(*known);
      }
    }
    // The future records its events, and runs callbacks, on this thread's current device: see PooledEvent.
    c10::OptionalDeviceGuard device;
    if (!last.empty()) device.reset_device(last.front().device());
    const c10::MultiStreamGuard on(last);
    future.markCompleted(value());
  };
  contain_and(mark, [&](const std::exception* error) {
    if (future.completed()) throw;  // a callback threw
    const std::string what = "nvx: the future of " + what_is(facts_.title) + " could not be completed: ";
    future.setError(exception_of({Code::kSystem, what + text_of(error)}));
  });
}

c10::IValue NvxWork::value() const {
  if (facts_.lists == 0) return outputs_;
  std::vector<Tensors> lists(facts_.lists);
  const size_t length = outputs_.size() / lists.size();
  for (size_t i = 0; i < outputs_.size(); ++i) lists[i / length].push_back(outputs_[i]);
  return lists;
}

/// torch calls this with the GIL, which a callback of the future needs.
void NvxWork::synchronize() {
  unregister_from_torch();
  if (!streams_.empty()) without_python_lock([this] { wait(kNoTimeout); });
}

/// torch's version waits until the future has completed, and ignores streams.
void NvxWork::blockCurrentStream() {
  if (streams_.empty() && at::hasCUDA()) return Work::blockCurrentStream();
  wait(std::chrono::milliseconds(0));
}

void NvxWork::end(const Status& status, Hooks hooks) {
  status_ = status;
  const std::exception_ptr error = status.ok() ? nullptr : exception_of(status);
  end_process_on_error(status, has_future() ? Seen::kByProgram : Seen::kNotYet);
  run_hook("an observer of an operation's end", [&] { finish(error); });
  Reporting reporting(*this);
  c10::intrusive_ptr<c10::ivalue::Future> future;
  c10::intrusive_ptr<CoalescedWork> coalesced;
  {
    MutexLock lock(future_mutex_);
    over_ = true;
    future = future_;
    if (future) reporting.calls = calls_before_future_;
    coalesced = std::move(coalesced_);
  }
  run_hook("a callback of an operation's future", [&] {
    if (future && error) future->setError(error);
    if (future && !error) complete(*future);
  });
  told_.store(true, std::memory_order_release);
  if (coalesced) coalesced->one_has_ended();
  const bool has_observer = facts_.on_end || facts_.timed;
  if (hooks == Hooks::kNow || !has_observer || is_there()) return run_hooks();
  if (!CompletionPoller::instance().add(c10::intrusive_ptr<NvxWork>::reclaim_copy(this))) run_hooks();
}

bool NvxWork::is_there() {
  bool there = true;
  contain_and([&] { there = !staging_ || staging_->is_over(); }, [&](const std::exception* error) { lose(error); });
  return there;
}

/// The end of work on the device can no longer be detected. The group fails at once: no later call may notify the
/// ranks. The store comes after that, because a work that is lost has a failed group: see loss().
void NvxWork::lose(const std::exception* error) {
  if (const auto group = facts_.group.lock())
    (void)fail_on_device(*group, staging_->stream().device(), "the query for the end of " + what_is(facts_.title),
                         error);
  lost_.store(true, std::memory_order_release);
}

Status NvxWork::loss() const {
  if (!lost_.load(std::memory_order_acquire)) return {};
  const auto group = facts_.group.lock();
  return group ? group->failure() : Status();
}

void NvxWork::report_arrival() {
  const Reporting reporting(*this);
  run_hooks();
}

/// The hook keeps the group alive until the call is over; a work that the program keeps does not.
void NvxWork::run_hooks() {
  ended_ = Clock::now();
  clocked_.store(true, std::memory_order_release);
  if (const auto on_end = std::exchange(facts_.on_end, nullptr))
    run_hook("a hook for an operation's end", [&] { on_end(*this); });
  if (counts_) counts_->pending.fetch_sub(1, std::memory_order_release);
}

bool NvxWork::watched() {
  MutexLock lock(future_mutex_);
  return future_ != nullptr || facts_.on_end || (coalesced_ && coalesced_->watched());
}

bool NvxWork::has_future() {
  MutexLock lock(future_mutex_);
  return future_ != nullptr;
}

/// torch keeps works that may be an input of a graph that is being compiled until they have been waited for.
void NvxWork::unregister_from_torch() {
  if (C10_UNLIKELY(c10d::allow_inflight_collective_as_graph_input()))
    c10d::unregister_work(c10::intrusive_ptr<Work>::reclaim_copy(this));
}

void NvxWork::check() {
  if (staging_) origin_.check(facts_.rank);
  observed_ = true;
  unregister_from_torch();
  raise_interrupt();
  if (staging_) staging_->join_streams();  // even a failed one may have results that are still being copied
  if (const std::exception_ptr error = exception()) {
    if (const auto group = facts_.group.lock()) group->note_failure_seen();
    end_process_on_error(failure(), Seen::kByProgram);
    std::rethrow_exception(error);
  }
  if (const Status status = loss(); !status.ok()) raise(status);
}

float NvxWork::getDuration() const {
  TORCH_CHECK(facts_.timed, "nvx: getDuration needs _enable_collectives_timing() before the operation");
  TORCH_CHECK(over_, "nvx: getDuration: the operation has not ended");
  // Copies may be incomplete. A hook queries before the clock stops, and must not wait for itself.
  (void)poll_until([&] { return clocked_.load(std::memory_order_acquire) || reporting_here(); }, Deadline());
  return duration().count();
}

std::chrono::duration<float, std::milli> NvxWork::duration() const {
  const Clock::time_point end = clocked_.load(std::memory_order_acquire) ? ended_ : Clock::now();
  std::chrono::duration<float, std::milli> span = end - began();
  if (staging_ && staging_->is_timed() && !lost()) contain("a device's clock", [&] { span = staging_->duration(); });
  return span;
}

void NvxWork::raise_late(const Group& group, std::chrono::milliseconds timeout) const {
  raise_interrupt();
  const std::string me =
      what_is(facts_.title) + " of group " + group.name() + " on rank " + std::to_string(group.rank());
  C10_THROW_ERROR(DistBackendError, "nvx: wait() timed out after " + std::to_string(timeout.count()) + " ms; " + me +
                                        " goes on. Next: wait again, or abort the group");
}

void NvxWork::abort() {
  if (origin_.elsewhere()) return;
  if (const auto group = facts_.group.lock()) group->abort("Work.abort()");
}

void LaneWork::perform(Runner runner) {
  try {
    outcome_ = carry_out(*group_, runner);
  } catch (const ArgumentError& error) {
    outcome_ = Status(Code::kInvalid, error.what_without_backtrace());
  } catch (const std::exception& error) {
    outcome_ = group_->fail(system_failure("carrying an operation out failed", error));
  }
}

void LaneWork::conclude() {
  release_tensors();
  end(outcome_, Hooks::kWhenThere);
}

bool LaneWork::wait_for(std::chrono::milliseconds timeout) {
  if (!done() && !reporting_here()) {
    origin_.check(facts_.rank);
    if (group_->lane().held_here()) raise(group_->reentrant());
    const bool bounded = timeout.count() > 0;
    const Deadline limit = Deadline::after(timeout);
    const auto late = [&] {
      group_->check_interrupt();  // an interrupt ends the operation
      return bounded && limit.passed(Clock::now());
    };
    if (!group_->lane().wait(*this, bounded ? Lane::MayRun::kNo : Lane::MayRun::kYes, late))
      raise_late(*group_, timeout);
  }
  check();
  return true;
}

CollectiveWork::CollectiveWork(Facts facts, TensorOperations collectives, Tensors outputs, const Tensors& inputs,
                               std::unique_ptr<StagingCopies> staging,
                               std::shared_ptr<OutputHazards::Expected> expected)
    : LaneWork(std::move(facts), std::move(outputs)),
      collectives_(std::move(collectives)),
      expected_(std::move(expected)) {
  staging_ = std::move(staging);
  if (staging_) {
    ends_on({staging_->stream()});
    const WithoutAutograd guard;
    for (const at::Tensor& output : outputs_) aliases_.push_back(output.alias());
  }
  memory_.reserve(outputs_.size() + inputs.size());
  for (const Tensors* tensors : {&std::as_const(outputs_), &inputs}) {
    for (const at::Tensor& tensor : *tensors) memory_.push_back(tensor.storage());
  }
}

Status CollectiveWork::copy(Group& group, Runner runner) {
  NVX_TRY(staging_->arrive(group, Deadline::after(group.span_of(collectives_.front().operation.timeout))));
  for (TensorOperation& c : collectives_) {  // chunks that begin at their turn, after pending results
    if (c.route() == Route::kChunks && !c.chunks)
      c.chunks = std::make_unique<ChunkPipeline>(c.operation, group.rank(), group.plan_facts(), staging_->streams());
  }
  const auto close = [&] {  // chunks of a failed operation, too, may still be copied
    if (goes_in_parts(route_of(collectives_))) staging_->close(all_tensors(collectives_, aliases_, {}));
  };
  auto after_all = c10::make_scope_exit([&] { contain("the end of an operation", close); });
  Status status = run_in_order(group, collectives_, runner);
  if (status.ok()) status = try_copy_out(*staging_, loads_of(collectives_, &TensorOperation::copies_out));
  after_all.release();
  close();  // if this throws, the operation fails: otherwise no stream would wait for its results
  return status;
}

Status CollectiveWork::carry_out(Group& group, Runner runner) {
  if (!staging_) {
    copy_in(collectives_);
    NVX_TRY(run_in_order(group, collectives_, runner));
    copy_back(collectives_);
    return {};
  }
  const auto over = c10::make_scope_exit([&] {
    if (!expected_) return;
    const c10::Stream& stream = staging_->stream();
    contain_and([&] { expected_->set_out(stream); },
                [&](const std::exception* error) {  // later calls wait for it, unless the group fails
                  (void)fail_on_device(group, stream.device(), what_is(facts_.title), error);
                });
  });
  return copy(group, runner);
}

void CollectiveWork::release_tensors() {
  memory_.clear();
  aliases_.clear();
  collectives_.clear();
}

MessageWork::MessageWork(Facts facts, at::Tensor tensor, std::shared_ptr<Message> message,
                         TimeoutExtensions::Claim claim, std::shared_ptr<PendingSends> pending_sends)
    : NvxWork(std::move(facts), {tensor}),
      group_(facts_.group.lock()),
      message_(std::move(message)),
      claim_(std::move(claim)),
      pending_sends_(std::move(pending_sends)),
      memory_(outputs_.front().storage()) {}

void MessageWork::stage(OwnCommStreams& streams, bool receives) {
  const WithoutAutograd guard;
  const at::Tensor& tensor = outputs_.front();
  loads_.emplace_back(tensor.alias(), host_stand_in(tensor));
  message_->data = static_cast<std::byte*>(loads_.front().second.data_ptr());
  staging_ = std::make_unique<StagingCopies>(streams.of_messages(tensor.device()));
  ends_on({staging_->stream()});
  const bool by_copies = message_->at != 0;  // the data stays where it is, unless the peer's is elsewhere
  if (by_copies) message_->memory = std::make_shared<Loads>(loads_);
  staging_->copy_in_when_reached(receives || by_copies ? Loads() : loads_);
}

void MessageWork::begin(bool receives) {
  // The message keeps this work, and with it the tensor, until it has ended: the program may never wait for a send.
  auto self = c10::intrusive_ptr<MessageWork>::reclaim_copy(this);
  message_->finished = [self, receives](const Message& message) {
    Status status = message.status();
    if (status.ok() && receives && self->staging_ && !message.by_copies)
      status = try_copy_out(*self->staging_, self->loads_);
    self->claim_.reset();
    self->loads_.clear();
    self->memory_ = {};
    self->end(status, Hooks::kWhenThere);
  };
  message_->may_block = [self] { return self->watched(); };
  if (!receives) return send();
  message_->reached = message_->at == 0;
  group_->mailbox().receive(message_, Runner::kPool);
  if (message_->at && !pending_sends_->add_receive(message_, staging_.get(), self)) flush();
}

void MessageWork::send() {
  if (!staging_ && !pending_sends_->any_before(*message_)) return group_->mailbox().send(message_, Runner::kPool);
  if (!pending_sends_->add(message_, staging_.get())) flush();
}

bool MessageWork::wait_for(std::chrono::milliseconds timeout) {
  if (!message_->done()) origin_.check(facts_.rank);
  if (reporting_here()) {
    check();
    return true;
  }
  if (timeout.count() > 0) {
    begin_timeout();
    const auto ended = [this] { return message_->done(); };
    if (!wait_on_device(*group_, ended, Deadline::after(timeout))) raise_late(*group_, timeout);
  }
  if (!origin_.elsewhere()) {
    flush();
    (void)group_->mailbox().wait(*message_);
  }
  check();
  return true;
}

CoalescedWork::CoalescedWork(Facts facts, std::vector<c10::intrusive_ptr<NvxWork>> works, Tensors outputs)
    : NvxWork(std::move(facts), std::move(outputs)), works_(std::move(works)), open_(works_.size()) {
  for (const auto& work : works_) ends_on(work->streams());
}

void CoalescedWork::begin() {
  for (const auto& work : works_) {
    if (!work->belong_to(c10::intrusive_ptr<CoalescedWork>::reclaim_copy(this))) one_has_ended();
  }
}

void CoalescedWork::one_has_ended() {
  if (open_.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  const auto failed = std::ranges::find_if(works_, [](const auto& work) { return !work->status().ok(); });
  end(failed == works_.end() ? Status() : (*failed)->status(), Hooks::kWhenThere);
}

bool CoalescedWork::isCompleted() {
  return NvxWork::isCompleted() && std::ranges::all_of(works_, [](const auto& work) { return work->isCompleted(); });
}

bool CoalescedWork::is_there() {
  return std::ranges::all_of(works_, [](const auto& work) { return work->is_there(); });
}

/// Its works may belong to several groups, and this work's own group may have lost none.
Status CoalescedWork::loss() const {
  const auto lost = std::ranges::find_if(works_, [](const auto& work) { return work->lost(); });
  return lost == works_.end() ? Status() : (*lost)->loss();
}

void CoalescedWork::begin_timeout() {
  for (const auto& work : works_) work->begin_timeout();
}

/// The timeout applies to all works together.
bool CoalescedWork::wait_for(std::chrono::milliseconds timeout) {
  const Deadline limit = Deadline::after(timeout);
  for (const auto& work : works_) {
    if (timeout.count() > 0) {
      const auto left = std::chrono::ceil<std::chrono::milliseconds>(limit.end - std::max(limit.start, Clock::now()));
      work->wait(std::clamp(left, std::chrono::milliseconds(1), timeout));
    } else {
      work->wait(timeout);
    }
  }
  check();
  return true;
}

}  // namespace nvx
