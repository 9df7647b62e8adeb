#include "torch/streams/stream_order.h"

#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include <unordered_map>

#include "base/contain.h"
#include "kernel/gpu/launch_cuda.h"
#include "memory/driver/beside_captures.h"
#include "torch/streams/staging_copies.h"

namespace nvx {
namespace {

c10::Stream torch_stream(const LaunchStream& stream) {
  const auto [id, index, type] = stream.name;
  return c10::Stream::unpack3(id, c10::DeviceIndex(index), c10::DeviceType(type));
}

/// Without kernels all launches are a delegate's, and never captured. c10's events suffice for these.
bool may_have_kernels(const LaunchStream& stream) {
  return kernel::built_with_cuda() && torch_stream(stream).device_type() == kernel_device();
}

/// The order that was the last to launch on a stream, over all groups of the process. If its launch has no event yet,
/// it gets one before another group's kernels follow: an event behind these would make a stream wait for them too, and
/// they may wait for peers that have yet to run this group's next operation.
class LastOnStream {
 public:
  using Order = std::shared_ptr<TorchStreamOrder>;
  static LastOnStream& here() {
    static auto* const kHere = new LastOnStream;
    return *kHere;
  }
  /// Returns the order before, if it was another one.
  Order exchange(const c10::Stream& stream, const Order& next) EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    std::weak_ptr<TorchStreamOrder>& last = last_[stream];
    const Order before = last.lock();
    last = next;
    return before == next ? nullptr : before;
  }

 private:
  Mutex mutex_;
  std::unordered_map<c10::Stream, std::weak_ptr<TorchStreamOrder>> last_ GUARDED_BY(mutex_);
};

}  // namespace

/// CUDA refuses to capture the default stream, and nvx captures none of its own streams but those for captures.
LaunchStream launch_stream(const StagingCopies& staging) {
  const c10::Stream& stream = staging.stream();
  const c10::impl::VirtualGuardImpl guard(stream.device_type());
  const bool is_default = stream == c10::Stream(c10::Stream::DEFAULT, stream.device());
  return {guard.getStreamNativeHandle(stream),
          staging.capture(),
          {stream.id(), int64_t(stream.device_index()), int64_t(stream.device_type())},
          staging.capture() == 0 && (staging.streams().own || is_default)};
}

Status TorchStreamOrder::hold_back(const LaunchStream& stream) {
  NVX_TRY(put_behind_last());
  if (may_have_kernels(stream)) return tail_.hold_back(stream.native, stream.capture != 0);
  if (last_) last_->block(torch_stream(stream));
  return {};
}

Status TorchStreamOrder::put_behind(const LaunchStream& stream) {
  if (may_have_kernels(stream)) return tail_.put_behind(stream.native, stream.capture);
  const c10::Stream there = torch_stream(stream);
  if (!last_) last_.emplace(there.device_type());
  last_->record(there);
  return {};
}

Status TorchStreamOrder::put_behind_last() {
  if (has_event_) return {};
  NVX_TRY(put_behind(*stream_));
  has_event_ = true;
  return {};
}

/// Whether the last launch on the stream, of any group, is known to be this group's last one.
bool TorchStreamOrder::is_last_on(const LaunchStream& stream) {
  MutexLock lock(mutex_);
  return !has_event_ && stream_->name == stream.name;
}

/// Kernels on another stream than the last launch wait for that launch. If there are graphs, kernels wait for the last
/// replay.
Status TorchStreamOrder::follow(const LaunchStream& stream) {
  const c10::Stream there = torch_stream(stream);
  if (stream.lasts && !is_last_on(stream)) {
    if (const auto before = LastOnStream::here().exchange(there, shared_from_this())) before->mark();
  }
  MutexLock lock(mutex_);
  if (stream.capture == 0) {
    const bool in_order = !has_graphs_ && (!stream_ || stream_->name == stream.name);
    return in_order ? Status() : hold_back(stream);
  }
  if (capture_.id != stream.capture) {
    NVX_TRY(hold_back(stream));
    capture_ = {stream.capture, std::nullopt, std::nullopt};
  } else if (capture_.last && capture_.stream != there) {
    capture_.last->block(there);
  }
  return {};
}

Status TorchStreamOrder::note(const LaunchStream& stream) {
  MutexLock lock(mutex_);
  if (stream.capture == 0) {
    stream_ = stream;
    has_event_ = false;
    reported_.reset();
    return stream.lasts && !has_graphs_ ? Status() : put_behind_last();
  }
  const c10::Stream there = torch_stream(stream);
  has_graphs_ = true;
  NVX_TRY(put_behind(stream));
  if (!capture_.last) capture_.last.emplace(there.device_type());
  capture_.last->record(there);
  capture_.stream = there;
  return {};
}

bool TorchStreamOrder::has_graphs() {
  MutexLock lock(mutex_);
  return has_graphs_;
}

void TorchStreamOrder::mark() {
  MutexLock lock(mutex_);
  (void)put_behind_last();  // if it fails, so will hold_back()
}

void TorchStreamOrder::note_report() {
  MutexLock lock(mutex_);
  if (!reported_) reported_ = Clock::now();
}

/// Without an event the stream must be idle. But the program may keep it busy for long. So it suffices that the device
/// has reported the end a while ago: a report can overtake the last stores of its kernel by much less than that.
bool TorchStreamOrder::ended() {
  constexpr std::chrono::milliseconds kLongestStore{100};
  const BesideCaptures beside;
  MutexLock lock(mutex_);
  if (has_event_) return tail_.passed();
  if (reported_ && Clock::now() - *reported_ >= kLongestStore) return true;
  bool over = true;  // also if the device can no longer be asked
  const auto ask = [&] {
    mutex_.held_by_caller();
    const c10::DeviceGuard on(torch_stream(*stream_).device());  // determines the default stream
    over = kernel::is_idle(stream_->native);
  };
  contain_and(ask, [](const std::exception*) {});
  return over;
}

}  // namespace nvx
