#include "torch/streams/stream_order.h"

#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>

#include "kernel/gpu/launch_cuda.h"
#include "memory/driver/relaxed_capture_guard.h"
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

}  // namespace

LaunchStream launch_stream(const c10::Stream& stream, uint64_t capture) {
  const c10::impl::VirtualGuardImpl guard(stream.device_type());
  return {guard.getStreamNativeHandle(stream),
          capture,
          {stream.id(), int64_t(stream.device_index()), int64_t(stream.device_type())}};
}

Status TorchStreamOrder::block(const LaunchStream& stream) {
  if (may_have_kernels(stream)) return tail_.block(stream.native, stream.capture != 0);
  last_.block(torch_stream(stream));
  return {};
}

Status TorchStreamOrder::record(const LaunchStream& stream) {
  const c10::Stream there = torch_stream(stream);
  device_ = there.device_index();
  if (may_have_kernels(stream)) return tail_.record(stream.native, stream.capture);
  last_.record(there);
  return {};
}

Status TorchStreamOrder::begin(at::Device device) {
  OwnCommStreams drawn;
  MutexLock lock(mutex_);
  return record(launch_stream(drawn.of_kernels(device, /*capture=*/0).d2h, /*capture=*/0));
}

/// Kernels on another stream than the last launch wait for that launch. If there are graphs, kernels wait for the last
/// replay.
Status TorchStreamOrder::follow(const LaunchStream& stream) {
  MutexLock lock(mutex_);
  const c10::Stream there = torch_stream(stream);
  if (stream.capture == 0) {
    const bool in_order = !has_graphs_ && (!stream_ || stream_ == there);
    return in_order ? Status() : block(stream);
  }
  if (capture_.id != stream.capture) {
    NVX_TRY(block(stream));
    capture_ = {stream.capture, std::nullopt, std::nullopt};
  } else if (capture_.last && capture_.stream != there) {
    capture_.last->block(there);
  }
  return {};
}

Status TorchStreamOrder::note(const LaunchStream& stream) {
  MutexLock lock(mutex_);
  const c10::Stream there = torch_stream(stream);
  if (stream.capture == 0) {
    stream_ = there;
    return record(stream);
  }
  has_graphs_ = true;
  NVX_TRY(record(stream));
  if (!capture_.last) capture_.last.emplace(there.device_type());
  capture_.last->record(there);
  capture_.stream = there;
  return {};
}

bool TorchStreamOrder::has_graphs() {
  MutexLock lock(mutex_);
  return has_graphs_;
}

bool TorchStreamOrder::ended() {
  MutexLock lock(mutex_);
  return passed(tail_);
}

/// The thread may have chosen no device: see PooledEvent. To choose one throws if the device has failed, and makes its
/// context, which takes hundreds of MiB: none but that of the launches is chosen.
bool TorchStreamOrder::passed(const kernel::TailEvent& event) {
  bool over = true;
  if (device_ < 0) return over;
  contain("a query of the device", [&] {
    const RelaxedCaptureGuard relaxed;
    const c10::OptionalDeviceGuard on(c10::Device(kernel_device(), device_));
    over = event.passed();
  });
  return over;
}

}  // namespace nvx
