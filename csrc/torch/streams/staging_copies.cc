#include "torch/streams/staging_copies.h"

#include <ATen/DeviceAccelerator.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/StreamGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/version.h>

#include <algorithm>
#include <array>
#include <iterator>

#include "base/error.h"
#include "kernel/gpu/capture.h"
#include "kernel/gpu/launch_cuda.h"
#include "memory/driver/relaxed_capture_guard.h"
#include "torch/core/argument_error.h"

namespace nvx {

c10::Stream current_stream(at::Device device) { return c10::impl::VirtualGuardImpl(device.type()).getStream(device); }

bool supports(at::Device device) {
  return device.is_cpu() || (at::isAccelerator(device.type()) && c10::impl::hasDeviceGuardImpl(device.type()));
}

/// Makes no query that would initialise CUDA: a process that has yet to fork must not initialise it.
std::optional<at::Device> device_in_use(const std::optional<at::Device>& chosen) {
  const auto here = [&](at::Device current) {
    return chosen && chosen->type() == current.type() && chosen->has_index() ? *chosen : current;
  };
  if (c10::impl::hasDeviceGuardImpl(at::kCUDA)) {
    auto* const allocator = dynamic_cast<c10::DeviceAllocator*>(c10::GetAllocator(at::kCUDA));
    if (allocator && allocator->initialized()) {
      // A thread that has chosen no device is on the first one, which this process may not use.
      const at::Device device = here(c10::impl::VirtualGuardImpl(at::kCUDA).getDevice());
      if (at::detail::getCUDAHooks().hasPrimaryContext(device.index())) return device;
    }
  }
  if (c10::impl::hasDeviceGuardImpl(at::kPrivateUse1) && at::isPrivateUse1HooksRegistered()) {
    const at::Device device = here(c10::impl::VirtualGuardImpl(at::kPrivateUse1).getDevice());
    if (at::detail::getPrivateUse1Hooks().hasPrimaryContext(device.index())) return device;
  }
  return std::nullopt;
}

uint64_t capture_of(const c10::Stream& stream) {
  const c10::OptionalDeviceGuard on(stream.device());  // see PooledEvent
  const c10::impl::VirtualGuardImpl guard(stream.device_type());
  if (stream.device_type() == kernel_device()) {
    const uint64_t capture = kernel::capture_of(guard.getStreamNativeHandle(stream));
    if (kernel::built_with_cuda() || capture != 0) return capture;
  }
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 13
  if (guard.isStreamCapturing(stream)) return UINT64_MAX;  // only kernels need the id
#endif
  return 0;
}

void refuse_capture(at::Device device) {
  if (capture_of(current_stream(device)) == 0) return;
  throw_argument_error(
      "nvx: this stream is being captured into a graph, and this operation goes through host memory, which cannot be "
      "captured: only collectives that nvx's kernels carry out can. Next: call it outside of the capture, or "
      "use nccl for captured collectives (\"cpu:nvx,cuda:nccl\")");
}

at::Tensor pinned_memory(at::IntArrayRef sizes, at::ScalarType type) {
  const RelaxedCaptureGuard relaxed;  // torch's pool of pinned memory queries events
  const bool empty = std::find(sizes.begin(), sizes.end(), 0) != sizes.end();
  return at::empty(sizes, at::TensorOptions().dtype(type).device(at::kCPU).pinned_memory(!empty));
}

at::Tensor tensor_over(std::byte* memory, int64_t count, const at::TensorOptions& options) {
  return at::for_blob(memory, {count}).options(options).target_device(options.device()).make_tensor();
}

uint64_t CaptureMemory::next_place(uint64_t capture) {
  std::vector<Entry> gone;  // freed without the lock
  MutexLock lock(mutex_);
  if (capture_ != capture) gone.swap(entries_);
  capture_ = capture;
  return ++places_;
}

void CaptureMemory::add(uint64_t place, const c10::Stream& owner, Tensors tensors) {
  MutexLock lock(mutex_);
  entries_.push_back({place, owner, std::move(tensors)});
}

void CaptureMemory::release(uint64_t place, const c10::Stream& owner) {
  std::vector<Entry> gone;  // freed without the lock
  MutexLock lock(mutex_);
  const auto first = std::stable_partition(entries_.begin(), entries_.end(),
                                           [&](const Entry& e) { return e.place > place || e.owner != owner; });
  gone.assign(std::move_iterator(first), std::move_iterator(entries_.end()));
  entries_.erase(first, entries_.end());
}

namespace {

/// The streams that this process has drawn from torch's pool. Kernels may wait for peers, and all other work on their
/// stream waits with them. If that work is a peer's kernel, or a peer waits for it, the kernels deadlock. And work on a
/// stream that another group captures invalidates the capture.
class DrawnStreams {
 public:
  static DrawnStreams& instance() {
    static auto* const kInstance = new DrawnStreams;
    return *kInstance;
  }
  /// Returns a stream that disturbs no other user; if there is none, one that at least invalidates no capture.
  c10::Stream draw(at::Device device, StreamFor use) EXCLUDES(mutex_) {
    constexpr int kPool = 32;
    const c10::impl::VirtualGuardImpl guard(device.type());
    MutexLock lock(mutex_);
    c10::Stream next = guard.getStreamFromGlobalPool(device, /*isHighPriority=*/true);
    const auto has = [&](StreamFor purpose) REQUIRES(mutex_) { return drawn_[size_t(purpose)].contains(next); };
    for (int i = 1; i < 2 * kPool; ++i) {
      const bool taken = has(StreamFor::kKernels) || (use != StreamFor::kCopies && has(StreamFor::kCopies));
      if (!has(StreamFor::kCaptures) && (i > kPool || !taken)) break;
      next = guard.getStreamFromGlobalPool(device, /*isHighPriority=*/true);
    }
    drawn_[size_t(use)].insert(next);
    return next;
  }
  void give_back(const c10::Stream& stream, StreamFor use) EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    Streams& streams = drawn_[size_t(use)];
    streams.erase(streams.find(stream));
  }

 private:
  using Streams = std::unordered_multiset<c10::Stream>;

  Mutex mutex_;
  std::array<Streams, 3> drawn_ GUARDED_BY(mutex_);
};

}  // namespace

CommStreams CommStreams::of_caller(at::Device device) {
  const c10::Stream stream = current_stream(device);
  return {stream, stream, /*own=*/false};
}

c10::Stream OwnCommStreams::stream(Use use, const c10::Stream& key) {
  const auto known = streams_.find({use, key});
  if (known != streams_.end()) return known->second;
  const c10::Stream next = DrawnStreams::instance().draw(key.device(), purpose_of(use));
  return streams_.emplace(std::pair(use, key), next).first->second;
}

OwnCommStreams::~OwnCommStreams() {
  if (origin_.elsewhere()) return;
  for (const auto& [key, stream] : streams_) DrawnStreams::instance().give_back(stream, purpose_of(key.first));
}

CommStreams OwnCommStreams::of(at::Device device) {
  const c10::Stream any(c10::Stream::DEFAULT, device);
  MutexLock lock(mutex_);
  return {stream(Use::kD2h, any), stream(Use::kH2d, any), /*own=*/true, /*capture=*/0, stream(Use::kMore, any)};
}

CommStreams OwnCommStreams::of_messages(at::Device device) {
  const c10::Stream any(c10::Stream::DEFAULT, device), caller = current_stream(device);
  MutexLock lock(mutex_);
  return {stream(Use::kSend, any), stream(Use::kReceive, caller), /*own=*/true};
}

CommStreams OwnCommStreams::of_launches(at::Device device, uint64_t capture, Use use) {
  MutexLock lock(mutex_);
  const c10::Stream both = stream(use, c10::Stream(c10::Stream::DEFAULT, device));
  return {both, both, /*own=*/true, capture, std::nullopt, capture_memory_};
}

StagingCopies::~StagingCopies() {
  if (!kept_.empty()) comm_streams_.capture_memory->add(place_, *caller_, std::move(kept_));
}

void StagingCopies::call() {
  caller_ = current_stream(comm_streams_.d2h.device());
  if (comm_streams_.own) called_.record(*caller_);
}

void StagingCopies::copy_in(const Loads& loads) {
  refuse_capture(comm_streams_.d2h.device());
  call();
  if (comm_streams_.own) called_.block(comm_streams_.d2h);
  fill(loads, comm_streams_.d2h);
}

void StagingCopies::copy_in_on_device(const Loads& loads) {
  call();
  if (comm_streams_.own) called_.block(comm_streams_.d2h);
  if (!loads.empty()) copy(loads, comm_streams_.d2h);
}

void StagingCopies::copy_in_when_reached(const Loads& loads, bool behind) {
  refuse_capture(comm_streams_.d2h.device());
  call();
  later_ = loads;
  behind_ = behind;
}

void StagingCopies::copy_in_later_chunk(const Loads& loads) {
  const c10::Stream& stream = comm_streams_.more.value_or(comm_streams_.d2h);
  returned_.block(stream);
  fill(loads, stream);
}

void StagingCopies::copy(const Loads& loads, const c10::Stream& stream) const {
  const RelaxedCaptureGuard relaxed;
  const c10::StreamGuard on(stream);
  const WithoutAutograd guard;
  // A lazy conjugation or negation is resolved on the device first. Otherwise CUDA would resolve it in host memory,
  // without waiting for the copy to arrive there.
  for (const auto& [user, stand_in] : loads) {
    stand_in.copy_(user.resolve_conj().resolve_neg(), /*non_blocking=*/true);
    keep(stand_in, stream);
  }
}

void StagingCopies::fill(const Loads& loads, const c10::Stream& stream) {
  copy(loads, stream);
  arrived_.record(stream);
}

Status StagingCopies::arrive(Group& group, const Deadline& deadline) {
  if (group.failed()) return group.failure();
  const std::optional<Status> end = wait_on_device(
      group, [this] { return has_arrived(); }, deadline);
  if (!end) return late(group, deadline);
  return end->ok() ? group.device().check_kernels() : *end;  // the arrived data may be results of a kernel that failed
}

std::optional<Status> StagingCopies::poll(Group& group, const Deadline& deadline) {
  if (group.failed()) return group.failure();
  if (has_arrived()) return group.device().check_kernels();
  return deadline.passed(Clock::now()) ? std::optional<Status>(late(group, deadline)) : std::nullopt;
}

/// Enqueues the delayed copies, if the stream has reached the call.
bool StagingCopies::has_arrived() {
  const RelaxedCaptureGuard relaxed;
  if (later_ && called_.query()) {
    const Loads loads = *std::exchange(later_, std::nullopt);
    PooledEvent back;
    if (behind_) back.record(comm_streams_.h2d), back.block(comm_streams_.d2h);
    if (behind_ || !loads.empty()) fill(loads, comm_streams_.d2h);
  }
  return !later_ && arrived_.query();
}

Status StagingCopies::late(Group& group, const Deadline& deadline) const {
  return group.fail({.code = Code::kTimeout,
                     .cause = comm_streams_.d2h.device().str() + " of " + group.topology().describe(group.rank()) +
                              " has not finished within " + seconds(deadline) +
                              " the work that was on its stream before an operation of group " + group.name(),
                     .advice = kCheckDevice});
}

void StagingCopies::copy_out(const Loads& loads) {
  if (loads.empty()) return;
  const RelaxedCaptureGuard relaxed;
  const c10::StreamGuard on(comm_streams_.h2d);
  const WithoutAutograd guard;
  if (comm_streams_.d2h != comm_streams_.h2d) called_.block(comm_streams_.h2d);
  for (const auto& [user, stand_in] : loads) {
    user.copy_(stand_in, /*non_blocking=*/true);
    keep(user, comm_streams_.h2d);
  }
  returned_.record(comm_streams_.h2d);
}

/// The user, or a failed call, may free the tensor at once. The allocator has recorded only the stream that the tensor
/// was allocated on, not nvx's.
void StagingCopies::keep(const at::Tensor& tensor, const c10::Stream& stream) const {
  if (!comm_streams_.own || comm_streams_.capture != 0 || tensor.is_cpu() || !tensor.has_storage() ||
      !tensor.storage().data_ptr())
    return;
  c10::impl::VirtualGuardImpl(stream.device_type()).recordDataPtrOnStream(tensor.storage().data_ptr(), stream);
}

bool StagingCopies::is_over() const {
  const RelaxedCaptureGuard relaxed;
  return comm_streams_.capture != 0 || returned_.query();
}

void StagingCopies::start_clock() {
  if (begun_) begun_->record(comm_streams_.h2d);
}

std::chrono::duration<float, std::milli> StagingCopies::duration() const {
  return std::chrono::duration<float, std::milli>(begun_->ms_until(returned_));
}

void StagingCopies::close(const Tensors& used) {
  for (const at::Tensor& tensor : used) keep(tensor, comm_streams_.h2d);
  returned_.record(comm_streams_.h2d);
  if (comm_streams_.capture == 0) return;
  if (comm_streams_.capture_memory) place_ = comm_streams_.capture_memory->next_place(comm_streams_.capture);
  MutexLock lock(mutex_);
  if (comm_streams_.capture_memory) kept_ = used;
}

void StagingCopies::join_streams() {
  if (!returned_.is_recorded()) return;
  const c10::Stream caller = current_stream(comm_streams_.h2d.device());
  const uint64_t capture = capture_of(caller);
  if (capture != comm_streams_.capture) {
    if (capture == 0) return;
    throw_argument_error(
        "nvx: this stream is being captured into a graph, and the operation that it would wait for began outside of "
        "the capture. Next: wait for it before the capture");
  }
  if (caller != comm_streams_.h2d) returned_.block(caller);
  // If the waiting stream owns the tensors, they can be freed: its later work is ordered after their use. Otherwise
  // they stay as long as this object.
  MutexLock lock(mutex_);
  const Tensors free = caller == caller_ ? std::exchange(kept_, {}) : Tensors();
  lock.unlock();
  if (caller == caller_ && comm_streams_.capture_memory) comm_streams_.capture_memory->release(place_, caller);
}

Status try_copy_out(StagingCopies& staging, const Loads& loads) {
  try {
    staging.copy_out(loads);
    return {};
  } catch (const std::exception& error) {
    return system_failure("results could not be copied to " + staging.stream().device().str(), error);
  }
}

}  // namespace nvx
