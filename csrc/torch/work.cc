#include "torch/work.h"

#include <ATen/Context.h>
#include <c10/util/Exception.h>

#include "base/config.h"
#include "base/log.h"
#include "torch/argument_error.h"
#include "torch/hook.h"
#include "torch/interrupt.h"

namespace nvx {
namespace {

c10::intrusive_ptr<c10::ivalue::Future> new_future() {
  return c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
}

uint64_t next_completion_key() {
  static std::atomic<uint64_t> keys{0};
  return keys.fetch_add(1, std::memory_order_relaxed) + 1;
}

[[noreturn]] void raise_failure(const Status& status) {
  if (status.code() == Code::kInvalid) throw_argument_error(status.what());
  if (config().on_error == "abort" && status.code() != Code::kInterrupted) {
    log_line("%s (NVX_ON_ERROR=abort)", status.what().c_str());
    std::abort();
  }
  C10_THROW_ERROR(DistBackendError, status.what());
}

[[noreturn]] void raise_late(std::chrono::milliseconds timeout) {
  C10_THROW_ERROR(DistBackendError, "nvx: Work.wait() timed out after " + std::to_string(timeout.count()) + " ms");
}

}  // namespace

void raise(const Status& status) {
  raise_interrupt();
  raise_failure(status);
}

std::exception_ptr exception_of(const Status& status) {
  try {
    raise_failure(status);
  } catch (...) {
    return std::current_exception();
  }
}

Status run_in_order(Group& group, Collectives& collectives, Carrier carrier) {
  for (Collective& c : collectives) NVX_TRY(group.run(c.operation, carrier));
  return {};
}

void copy_back(Collectives& collectives) {
  const Movement movement;
  for (Collective& c : collectives) {
    for (auto& [user, stand_in] : c.copy_back) user.copy_(stand_in);
  }
}

/// Stands on the stack of the thread that tells of a work's end, while it does.
class NvxWork::Telling {
 public:
  explicit Telling(const NvxWork& work) : work_(work), outer_(std::exchange(innermost_, this)) {}
  ~Telling() { innermost_ = outer_; }
  Telling(const Telling&) = delete;
  Telling& operator=(const Telling&) = delete;

  const NvxWork& work() const { return work_; }
  const Telling* outer() const { return outer_; }

 private:
  const NvxWork& work_;
  const Telling* const outer_;
};

thread_local const NvxWork::Telling* NvxWork::innermost_ = nullptr;

NvxWork::NvxWork(Facts facts, std::vector<at::Tensor> outputs, const std::optional<std::vector<at::Tensor>>& recorded)
    : Work(facts.rank, facts.type, recorded ? facts.title : nullptr, recorded),
      facts_(std::move(facts)),
      outputs_(std::move(outputs)),
      completion_key_(next_completion_key()) {}

void NvxWork::count_in(const Pending& pending) {
  pending_ = pending;
  pending_->fetch_add(1, std::memory_order_relaxed);
}

bool NvxWork::told_here() const { return innermost_ && over_; }

int64_t NvxWork::told_here(const Pending& pending) {
  int64_t count = 0;
  for (const Telling* t = innermost_; t; t = t->outer()) count += t->work().pending_ == pending;
  return count;
}

bool NvxWork::belong_to(c10::intrusive_ptr<WindowWork> window) {
  MutexLock lock(future_mutex_);
  if (over_) return false;
  window_ = std::move(window);
  return true;
}

c10::intrusive_ptr<c10::ivalue::Future> NvxWork::getFuture() {
  origin_.check(facts_.rank);
  asked_for_ = true;
  MutexLock lock(future_mutex_);
  if (future_) return future_;
  future_ = new_future();
  const auto future = future_;
  if (!over_) return future;
  lock.unlock();
  if (const std::exception_ptr error = exception()) {
    future->setError(error);
  } else {
    future->markCompleted(c10::IValue(outputs_));
  }
  return future;
}

void NvxWork::blockCurrentStream() {
  if (at::hasCUDA()) return Work::blockCurrentStream();
  wait(std::chrono::milliseconds(0));
}

void NvxWork::end(const Status& status) {
  ended_ = Clock::now();
  status_ = status;
  const std::exception_ptr error = status.ok() ? nullptr : exception_of(status);
  run_hook("an observer of an operation's end", [&] { finish(error); });
  const Telling telling(*this);
  c10::intrusive_ptr<c10::ivalue::Future> future;
  c10::intrusive_ptr<WindowWork> window;
  {
    MutexLock lock(future_mutex_);
    over_ = true;
    future = future_;
    window = std::move(window_);
  }
  run_hook("a callback of an operation's future", [&] {
    if (future && error) future->setError(error);
    if (future && !error) future->markCompleted(c10::IValue(outputs_));
  });
  // What is called keeps the group: a work that somebody holds on to need not.
  if (const auto on_end = std::exchange(facts_.on_end, nullptr))
    run_hook("a hook for an operation's end", [&] { on_end(*this); });
  if (window) window->one_has_ended();
  if (pending_) pending_->fetch_sub(1, std::memory_order_release);
}

bool NvxWork::watched() {
  MutexLock lock(future_mutex_);
  return future_ != nullptr || facts_.on_end || (window_ && window_->watched());
}

bool NvxWork::settled() const { return over_ && asked_for_ && status_.ok(); }

void NvxWork::check() {
  asked_for_ = true;
  raise_interrupt();
  if (const std::exception_ptr error = exception()) std::rethrow_exception(error);
}

float NvxWork::getDuration() const {
  TORCH_CHECK(facts_.timed, "nvx: getDuration needs _enable_collectives_timing() before the operation");
  TORCH_CHECK(over_, "nvx: getDuration of an operation that has not ended");
  return std::chrono::duration<float, std::milli>(ended_ - began_).count();
}

LaneWork::LaneWork(std::shared_ptr<Group> group, Facts facts, std::vector<at::Tensor> outputs,
                   const std::optional<std::vector<at::Tensor>>& recorded)
    : NvxWork(std::move(facts), std::move(outputs), recorded), group_(std::move(group)) {}

void LaneWork::perform(Carrier carrier) {
  try {
    outcome_ = carry_out(*group_, carrier);
  } catch (const ArgumentError& error) {
    outcome_ = Status(Code::kInvalid, error.what_without_backtrace());
  } catch (const std::exception& error) {
    outcome_ = group_->fail(Code::kSystem, std::string("carrying an operation out failed: ") + error.what(), "");
  }
}

void LaneWork::conclude() {
  let_go();
  end(outcome_);
}

bool LaneWork::wait(std::chrono::milliseconds timeout) {
  if (!done() && !told_here()) {
    origin_.check(facts_.rank);
    if (group_->lane().held_here()) raise(group_->inside_itself());
    const bool bounded = timeout.count() > 0;
    const Deadline limit = Deadline::after(timeout);
    const auto late = [&] {
      group_->look_for_interrupt();  // which ends the operation
      return bounded && limit.passed(Clock::now());
    };
    if (!group_->lane().wait(*this, bounded ? Lane::MayRun::kNo : Lane::MayRun::kYes, late)) {
      raise_interrupt();
      raise_late(timeout);
    }
  }
  check();
  return true;
}

void LaneWork::abort() {
  if (!origin_.elsewhere()) group_->abort("Work.abort()");
}

CollectiveWork::CollectiveWork(std::shared_ptr<Group> group, Facts facts, Collectives collectives,
                               std::vector<at::Tensor> outputs, std::vector<at::Tensor> inputs)
    : LaneWork(std::move(group), std::move(facts), std::move(outputs), inputs),
      collectives_(std::move(collectives)),
      inputs_(std::move(inputs)) {}

Status CollectiveWork::carry_out(Group& group, Carrier carrier) {
  NVX_TRY(run_in_order(group, collectives_, carrier));
  copy_back(collectives_);
  return {};
}

void CollectiveWork::let_go() {
  inputs_.clear();
  collectives_.clear();
}

MessageWork::MessageWork(std::shared_ptr<Group> group, Facts facts, at::Tensor tensor, std::shared_ptr<Message> message,
                         Extensions::Claim claim)
    : NvxWork(std::move(facts), {tensor}, std::vector<at::Tensor>{tensor}),
      group_(std::move(group)),
      message_(std::move(message)),
      claim_(std::move(claim)) {}

void MessageWork::begin(bool receives) {
  // The message keeps this work, and with it the tensor, until it has ended: a send may never be waited for.
  auto self = c10::intrusive_ptr<MessageWork>::reclaim_copy(this);
  message_->finished = [self](const Message& message) {
    self->claim_.reset();
    self->end(message.status());
  };
  message_->may_block = [self] { return self->watched(); };
  if (receives) {
    group_->mail().receive(message_, Carrier::kPool);
  } else {
    group_->mail().send(message_, Carrier::kPool);
  }
}

bool MessageWork::wait(std::chrono::milliseconds timeout) {
  if (!message_->done()) origin_.check(facts_.rank);
  if (told_here()) {
    check();
    return true;
  }
  if (timeout.count() > 0) {
    const Deadline limit = Deadline::after(timeout);
    for (int look = 1; !message_->done() && !limit.passed(Clock::now()); ++look) {
      std::this_thread::sleep_for(std::chrono::microseconds(200));
      if (look % 256 == 0) group_->look_for_interrupt();  // which ends the operation
    }
    if (!message_->done()) {
      raise_interrupt();
      raise_late(timeout);
    }
  }
  if (!origin_.elsewhere()) (void)group_->mail().wait(*message_);
  check();
  return true;
}

void MessageWork::abort() {
  if (!origin_.elsewhere()) group_->abort("Work.abort()");
}

WindowWork::WindowWork(Facts facts, std::vector<c10::intrusive_ptr<NvxWork>> works, std::vector<at::Tensor> outputs)
    : NvxWork(std::move(facts), std::move(outputs), std::nullopt), works_(std::move(works)), open_(works_.size()) {}

void WindowWork::begin() {
  for (const auto& work : works_) {
    if (!work->belong_to(c10::intrusive_ptr<WindowWork>::reclaim_copy(this))) one_has_ended();
  }
}

void WindowWork::one_has_ended() {
  if (open_.fetch_sub(1, std::memory_order_acq_rel) != 1) return;
  const auto failed = std::find_if(works_.begin(), works_.end(), [](const auto& work) { return !work->status().ok(); });
  end(failed == works_.end() ? Status() : (*failed)->status());
}

/// The timeout is that of all together.
bool WindowWork::wait(std::chrono::milliseconds timeout) {
  const Deadline limit = Deadline::after(timeout);
  for (const auto& work : works_) {
    if (told_here()) break;
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

void WindowWork::abort() { works_.front()->abort(); }

}  // namespace nvx
