#include "torch/work.h"

#include <c10/util/Exception.h>
#include <torch/csrc/utils/pybind.h>

#include "base/config.h"
#include "base/log.h"
#include "torch/argument_error.h"

namespace nvx {
namespace {

c10::intrusive_ptr<c10::ivalue::Future> new_future() {
  return c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
}

uint64_t next_completion_key() {
  static std::atomic<uint64_t> keys{0};
  return keys.fetch_add(1, std::memory_order_relaxed) + 1;
}

/// Ctrl-C: Python's own exception, which the interrupt check has left set on the main thread.
void raise_interrupt() {
  pybind11::gil_scoped_acquire gil;
  if (PyErr_Occurred()) throw pybind11::error_already_set();
}

}  // namespace

void raise(const Status& status) {
  if (status.code() == Code::kInvalid) throw_argument_error(status.what());
  if (status.code() == Code::kInterrupted) raise_interrupt();
  if (config().on_error == "abort") {
    log_line("%s (NVX_ON_ERROR=abort)", status.what().c_str());
    std::abort();
  }
  C10_THROW_ERROR(DistBackendError, status.what());
}

std::exception_ptr exception_of(const Status& status) {
  try {
    raise(status);
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

NvxWork::NvxWork(Facts facts, std::vector<at::Tensor> outputs, const std::optional<std::vector<at::Tensor>>& recorded)
    : Work(facts.rank, facts.type, recorded ? facts.title : nullptr, recorded),
      facts_(std::move(facts)),
      outputs_(std::move(outputs)),
      completion_key_(next_completion_key()) {}

c10::intrusive_ptr<c10::ivalue::Future> NvxWork::getFuture() {
  std::unique_lock<std::mutex> lock(future_mutex_);
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

void NvxWork::end(const Status& status) {
  ended_ = Clock::now();
  interrupted_ = !status.ok() && status.code() == Code::kInterrupted;
  const std::exception_ptr error = status.ok() ? nullptr : exception_of(status);
  finish(error);
  c10::intrusive_ptr<c10::ivalue::Future> future;
  {
    std::lock_guard<std::mutex> lock(future_mutex_);
    over_ = true;
    future = future_;
  }
  if (future && error) future->setError(error);
  if (future && !error) future->markCompleted(c10::IValue(outputs_));
  if (facts_.on_end) facts_.on_end(*this);
}

bool NvxWork::watched() {
  std::lock_guard<std::mutex> lock(future_mutex_);
  return future_ != nullptr || facts_.on_end;
}

void NvxWork::check() {
  if (interrupted_) raise_interrupt();  // the exception is set on the thread that was interrupted: this one
  if (const std::exception_ptr error = exception()) std::rethrow_exception(error);
}

float NvxWork::getDuration() const {
  TORCH_CHECK(facts_.timed, "nvx: getDuration needs _enable_collectives_timing() before the operation");
  TORCH_CHECK(over_, "nvx: getDuration of an operation that has not ended");
  return std::chrono::duration<float, std::milli>(ended_ - began_).count();
}

CollectiveWork::CollectiveWork(std::shared_ptr<Group> group, Facts facts, Collectives collectives,
                               std::vector<at::Tensor> outputs, std::vector<at::Tensor> inputs)
    : NvxWork(std::move(facts), std::move(outputs), inputs),
      group_(std::move(group)),
      collectives_(std::move(collectives)),
      inputs_(std::move(inputs)) {}

void CollectiveWork::perform(Carrier carrier) {
  status_ = run_in_order(*group_, collectives_, carrier);
  try {
    if (status_.ok()) copy_back(collectives_);
  } catch (const std::exception& error) {
    status_ = Status(Code::kSystem, std::string("nvx: copying a result back failed: ") + error.what());
  }
}

void CollectiveWork::conclude() {
  inputs_.clear();
  collectives_.clear();
  end(status_);
}

bool CollectiveWork::wait(std::chrono::milliseconds timeout) {
  if (!done()) {
    const bool bounded = timeout.count() > 0;
    const auto limit = Clock::now() + timeout;
    const auto late = [&] {
      group_->look_for_interrupt();  // which ends the operation
      return bounded && Clock::now() >= limit;
    };
    if (!group_->lane().wait(*this, bounded ? Lane::MayRun::kNo : Lane::MayRun::kYes, late)) {
      C10_THROW_ERROR(DistBackendError, "nvx: Work.wait() timed out after " + std::to_string(timeout.count()) + " ms");
    }
  }
  check();
  return true;
}

MessageWork::MessageWork(std::shared_ptr<Group> group, Facts facts, at::Tensor tensor, std::shared_ptr<Message> message)
    : NvxWork(std::move(facts), {tensor}, std::vector<at::Tensor>{tensor}),
      group_(std::move(group)),
      message_(std::move(message)) {}

void MessageWork::begin(bool receives) {
  // The message keeps this work, and with it the tensor, until it has ended: a send may never be waited for.
  auto self = c10::intrusive_ptr<MessageWork>::reclaim_copy(this);
  message_->finished = [self](const Message& message) { self->end(message.status()); };
  if (receives) {
    group_->mail().receive(message_, Carrier::kPool);
  } else {
    group_->mail().send(message_, Carrier::kPool);
  }
}

bool MessageWork::wait(std::chrono::milliseconds timeout) {
  if (timeout.count() > 0) {
    const auto limit = Clock::now() + timeout;
    while (!message_->done() && Clock::now() < limit) std::this_thread::sleep_for(std::chrono::microseconds(200));
    if (!message_->done()) {
      C10_THROW_ERROR(DistBackendError, "nvx: Work.wait() timed out after " + std::to_string(timeout.count()) + " ms");
    }
  }
  (void)group_->mail().wait(*message_);
  check();
  return true;
}

WindowWork::WindowWork(Facts facts, std::vector<c10::intrusive_ptr<c10d::Work>> works, std::vector<at::Tensor> outputs)
    : NvxWork(std::move(facts), std::move(outputs), std::nullopt), works_(std::move(works)) {}

bool WindowWork::isCompleted() {
  return std::all_of(works_.begin(), works_.end(), [](const auto& work) { return work->isCompleted(); });
}

bool WindowWork::isSuccess() const {
  return std::all_of(works_.begin(), works_.end(), [](const auto& work) { return work->isSuccess(); });
}

std::exception_ptr WindowWork::exception() const {
  for (const auto& work : works_) {
    if (const std::exception_ptr error = work->exception()) return error;
  }
  return nullptr;
}

bool WindowWork::wait(std::chrono::milliseconds timeout) {
  for (const auto& work : works_) work->wait(timeout);
  if (!Work::isCompleted()) end({});
  return true;
}

c10::intrusive_ptr<c10::ivalue::Future> WindowWork::getFuture() {
  c10::List<c10::intrusive_ptr<c10::ivalue::Future>> futures(
      c10::FutureType::create(c10::ListType::create(c10::TensorType::get())));
  for (const auto& work : works_) futures.push_back(work->getFuture());
  const auto all = c10::collectAll(futures);
  auto future = new_future();
  all->addCallback([future, outputs = outputs_](c10::ivalue::Future& done) {
    for (const c10::IValue& part : done.value().toListRef()) {
      const auto one = part.toFuture();
      if (one->hasError()) return future->setError(one->exception_ptr());
    }
    future->markCompleted(c10::IValue(outputs));
  });
  return future;
}

}  // namespace nvx
