#include "torch/kernel_path.h"

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "base/contain.h"
#include "torch/argument_error.h"
#include "torch/store.h"

namespace nvx {

/// Kernels of a channel must not overlap: on another stream they wait for what was begun on the last one.
void StreamLauncher::follow(const c10::Stream& stream) {
  MutexLock lock(mutex_);
  if (last_ && stream_ != stream) last_->block(stream);
}

void StreamLauncher::note(const c10::Stream& stream) {
  MutexLock lock(mutex_);
  if (!last_) last_.emplace(stream.device_type());
  last_->record(stream);
  stream_ = stream;
}

/// False where it cannot be told any more, as when CUDA goes before nvx does.
bool StreamLauncher::ended() {
  MutexLock lock(mutex_);
  bool over = !last_;
  contain("a look at a stream", [&] { over = over || last_->query(); });
  return over;
}

bool KernelPath::serves(at::Device device) {
  if (device.type() != kernel_device()) return false;
  if (answer_ == Answer::kUnknown) ask(device);
  if (answer_ == Answer::kYes && device.index() != device_) {
    throw_argument_error("nvx: group " + group_->name() + " is served by kernels on device " + std::to_string(device_) +
                         " of this rank, and this tensor is on " + device.str() +
                         ". Next: keep the tensors of a group on one device of each rank");
  }
  return answer_ == Answer::kYes;
}

void KernelPath::ask(at::Device device) {
  MutexLock lock(asking_);
  if (answer_ != Answer::kUnknown) return;
  const c10::OptionalDeviceGuard on(device);
  TorchStore store(store_, group_->size());
  const bool yes = group_->open_device(store, device.index(), launcher_);
  if (const Status alive = group_->check_alive(); !alive.ok()) raise(alive);
  device_ = device.index();
  answer_ = yes ? Answer::kYes : Answer::kNo;
}

Status KernelPath::launch(Collectives& collectives, Transit& transit) {
  MutexLock lock(mutex_);
  const c10::Stream& stream = transit.stream();
  transit.bring(loads_of(collectives, &Collective::bring));  // may throw, and then nothing has been numbered
  launcher_->follow(stream);
  c10::SmallVector<const Operation*, 4> operations;
  for (Collective& c : collectives) {
    c.operation.number = group_->next_number();
    c.operation.timeout = group_->span_of(c.operation.timeout);
    operations.push_back(&c.operation);
  }
  const c10::StreamGuard on(stream);
  const c10::impl::VirtualGuardImpl guard(stream.device_type());
  const Status status = group_->launch({operations.data(), operations.size()}, guard.getStreamNativeHandle(stream));
  launcher_->note(stream);  // also where some of them were refused
  NVX_TRY(status);
  transit.take_back(loads_of(collectives, &Collective::take_back));
  return {};
}

LaunchedWork::LaunchedWork(std::shared_ptr<Group> group, Facts facts, std::vector<at::Tensor> outputs,
                           std::unique_ptr<Transit> transit)
    : NvxWork(std::move(facts), std::move(outputs), std::nullopt), group_(std::move(group)) {
  transit_ = std::move(transit);
  ends_on({transit_->stream()});
  end({});
}

/// The host waits for nothing; a failure that is known by now is raised.
bool LaunchedWork::wait(std::chrono::milliseconds) {
  check();
  const Status status = group_->look_at_kernels();
  if (!status.ok()) raise(status);
  return true;
}

void LaunchedWork::abort() {
  if (!origin_.elsewhere()) group_->abort("Work.abort()");
}

}  // namespace nvx
