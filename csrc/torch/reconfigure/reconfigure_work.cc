#include "torch/reconfigure/reconfigure_work.h"

#include <torch/csrc/distributed/c10d/Utils.hpp>

#include "base/deadline.h"
#include "base/interrupt.h"
#include "torch/core/hook.h"
#include "torch/core/interrupt.h"

namespace nvx {

ReconfigureWork::ReconfigureWork(int rank, std::string what)
    : Work(rank),
      what_(std::move(what)),
      future_(c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()))) {}

c10::intrusive_ptr<c10::ivalue::Future> ReconfigureWork::getFuture() {
  origin_.check(rank_);
  return future_;
}

bool ReconfigureWork::wait(std::chrono::milliseconds given) {
  origin_.check(rank_);
  const std::chrono::milliseconds timeout = span_of_wait(given);
  constexpr std::chrono::milliseconds kCheckInterval{50};
  const Deadline deadline = Deadline::after(timeout);
  std::unique_lock lock(mutex_);
  while (!completed_) {
    cv_.wait_for(lock, kCheckInterval);
    if (completed_) break;
    lock.unlock();
    if (stop_requested()) {
      cancel();
      raise_interrupt();
    }
    if (deadline.passed(Clock::now())) {
      C10_THROW_ERROR(DistBackendError, "nvx: wait() timed out after " + std::to_string(timeout.count()) + " ms; " +
                                            what_ + " goes on. Next: wait again, or abort the group");
    }
    lock.lock();
  }
  const std::exception_ptr error = exception_;
  lock.unlock();
  raise_interrupt();
  if (error) std::rethrow_exception(error);
  return true;
}

void ReconfigureWork::cancel() {
  if (origin_.elsewhere()) return;
  MutexLock lock(made_mutex_);
  cancelled_.store(true);
  const std::shared_ptr<Communicator> made = made_;
  lock.unlock();
  if (made) made->cancel("its reconfigure() was cancelled");
}

bool ReconfigureWork::hold_communicator(const std::shared_ptr<Communicator>& made) {
  MutexLock lock(made_mutex_);
  made_ = made;
  return !cancelled();
}

bool ReconfigureWork::release_communicator() {
  std::shared_ptr<Communicator> made;  // ends, if this holds it last, without the lock
  MutexLock lock(made_mutex_);
  made.swap(made_);
  return !cancelled();
}

void ReconfigureWork::end(const std::exception_ptr& error) {
  finish(error);
  run_hook("a callback of an operation's future", [&] {
    if (error) return future_->setError(error);
    future_->markCompleted(c10::IValue(Tensors()));
  });
}

}  // namespace nvx
