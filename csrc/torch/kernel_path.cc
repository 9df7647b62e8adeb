#include "torch/kernel_path.h"

#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "base/contain.h"
#include "torch/argument_error.h"
#include "torch/store.h"

namespace nvx {

/// Kernels of a channel must not overlap: on another stream they wait for what was begun on the last one, and where
/// there are graphs, for what was replayed last.
Status StreamLauncher::follow(const Place& place) {
  MutexLock lock(mutex_);
  if (place.capture == 0) {
    const bool in_order = !has_graphs_ && (!stream_ || stream_ == place.stream);
    return in_order ? Status() : tail_.hold_back(place.native, /*captured=*/false);
  }
  if (capture_.id != place.capture) {
    NVX_TRY(tail_.hold_back(place.native, /*captured=*/true));
    capture_ = {place.capture, std::nullopt, std::nullopt};
  } else if (capture_.last && capture_.stream != place.stream) {
    capture_.last->block(place.stream);
  }
  return {};
}

Status StreamLauncher::note(const Place& place) {
  MutexLock lock(mutex_);
  if (place.capture == 0) {
    stream_ = place.stream;
    return tail_.put_behind(place.native, /*captured=*/false);
  }
  has_graphs_ = true;
  NVX_TRY(tail_.put_behind(place.native, /*captured=*/true));
  if (!capture_.last) capture_.last.emplace(place.stream.device_type());
  capture_.last->record(place.stream);
  capture_.stream = place.stream;
  return {};
}

bool StreamLauncher::ended() {
  MutexLock lock(mutex_);
  return tail_.passed();
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
  refuse_to_open(device);
  const c10::OptionalDeviceGuard on(device);
  TorchStore store(store_, group_->size());
  const bool yes = group_->open_device(store, device.index(), launcher_);
  if (const Status alive = group_->check_alive(); !alive.ok()) raise(alive);
  device_ = device.index();
  answer_ = yes ? Answer::kYes : Answer::kNo;
}

void KernelPath::refuse_to_open(at::Device device) const {
  if (capture_of(Tracks::of_caller(device).up) == 0) return;
  throw_argument_error("nvx: this stream is being captured into a graph, and the first collective of group " +
                       group_->name() + " with tensors of " + device.str() +
                       " opens that device, which the hosts of all ranks do together. Next: call one collective "
                       "of the group, on all ranks, before the capture");
}

Status KernelPath::launch(Collectives& collectives, Transit& transit) {
  MutexLock lock(mutex_);
  const c10::Stream& stream = transit.stream();
  transit.bring(loads_of(collectives, &Collective::bring));  // may throw, and then nothing has been numbered
  const c10::StreamGuard on(stream);
  const c10::impl::VirtualGuardImpl guard(stream.device_type());
  const StreamLauncher::Place place{stream, guard.getStreamNativeHandle(stream), transit.capture()};
  NVX_TRY(launcher_->follow(place));
  c10::SmallVector<const Operation*, 4> operations;
  for (Collective& c : collectives) {
    c.operation.number = group_->next_number();
    c.operation.timeout = group_->span_of(c.operation.timeout);
    operations.push_back(&c.operation);
  }
  const Begins begins = place.capture != 0 ? Begins::kInReplays : Begins::kNow;
  const Status status = group_->launch({operations.data(), operations.size()}, place.native, begins);
  const Status noted = launcher_->note(place);  // also where some of them were refused
  NVX_TRY(status);
  NVX_TRY(noted);
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
