#pragma once

#include <ATen/ATen.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/Stream.h>

#include <chrono>
#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/mutex.h"
#include "group/device/device_wait.h"
#include "group/group.h"
#include "torch/core/origin.h"
#include "torch/core/tensors.h"
#include "torch/streams/pooled_event.h"

/// Stages device tensors in host memory: they are copied to the host on a stream, go through the group like CPU
/// tensors, and are copied back on a stream. This uses only functions that c10 offers for every device, so it needs no
/// headers or libraries of an accelerator.
namespace nvx {

/// The device type of nvx's kernels. It has a file of its own, because tests simulate kernels on another device.
at::DeviceType kernel_device();

/// Whether nvx accepts tensors of this device.
bool supports(at::Device device);

/// The device whose current stream a barrier waits for: `chosen`, or else this thread's current device. None if the
/// process has not used that device.
std::optional<at::Device> device_in_use(const std::optional<at::Device>& chosen = std::nullopt);

c10::Stream current_stream(at::Device device);

/// The id of the graph capture that a stream is in; 0: none.
uint64_t capture_of(const c10::Stream& stream);
/// Raises if this thread's current stream of the device is in a capture. For operations that need the host.
void refuse_capture(at::Device device);

/// While it lives, copies on this thread treat tensors as plain memory: autograd records nothing, whether or not a
/// tensor requires grad or belongs to inference mode. So copying a stand-in back is the same as a write to the tensor's
/// memory.
using WithoutAutograd = at::AutoDispatchBelowADInplaceOrView;

/// Contiguous host memory. It is pinned, so that copies do not block the host.
at::Tensor pinned_memory(at::IntArrayRef sizes, at::ScalarType type = at::kByte);
/// The same, of the size of a device's tensor.
inline at::Tensor host_stand_in(const at::Tensor& tensor) {
  return pinned_memory(tensor.sizes(), tensor.scalar_type());
}

/// A tensor over memory of a device, which it does not own.
at::Tensor tensor_over(std::byte* memory, int64_t count, const at::TensorOptions& options);

/// (the user's tensor, its stand-in in host memory).
using Loads = std::vector<std::pair<at::Tensor, at::Tensor>>;

/// Keeps memory of captured operations whose works have been destroyed. If it were freed at once, another tensor of the
/// same capture could get it. So it stays until its stream waits for a later operation of the capture, or until the
/// next capture begins.
class CaptureMemory {
 public:
  /// The position of the next operation in this capture.
  uint64_t next_place(uint64_t capture) EXCLUDES(mutex_);
  void add(uint64_t place, const c10::Stream& owner, Tensors tensors) EXCLUDES(mutex_);
  /// The owner stream now waits for the operation at that position: tensors of that and earlier operations are freed.
  void release(uint64_t place, const c10::Stream& owner) EXCLUDES(mutex_);

 private:
  struct Entry {
    uint64_t place;
    c10::Stream owner;
    Tensors tensors;
  };
  Mutex mutex_;
  uint64_t capture_ GUARDED_BY(mutex_) = 0;
  uint64_t places_ GUARDED_BY(mutex_) = 0;
  std::vector<Entry> entries_ GUARDED_BY(mutex_);  // all of one capture
};

struct CommStreams {
  c10::Stream d2h;
  c10::Stream h2d;
  bool own;              ///< both are nvx's; otherwise both are the caller's
  uint64_t capture = 0;  ///< of the caller's stream, and therefore of nvx's; 0: none. Only for kernels
  std::optional<c10::Stream> more = std::nullopt;           ///< to the host, for copy_in_later_chunk()
  std::shared_ptr<CaptureMemory> capture_memory = nullptr;  ///< keeps tensors that the capture uses
  /// This thread's current stream in both directions, for synchronous calls.
  static CommStreams of_caller(at::Device device);
};

/// The purpose of a group's own stream.
enum class StreamFor { kCopies, kKernels, kCaptures };

/// A group's own streams, for each device.
/// - One stream copies to the host and one copies back, so that a copy that waits to start does not block results.
/// - Kernels may wait for peers, so they have other streams and block neither of these.
/// - Messages have no common order. So no stream waits for sends, and received data is copied back on one stream for
/// each stream of the callers.
/// torch's pool returns its streams round-robin, and repeats them. As far as the pool has enough, none of these is a
/// stream that this process's kernels use.
class OwnCommStreams {
 public:
  ~OwnCommStreams();

  CommStreams of(at::Device device) EXCLUDES(mutex_);
  CommStreams of_messages(at::Device device) EXCLUDES(mutex_);
  /// Captures have their own stream: a call outside the capture would invalidate it on a shared stream.
  CommStreams of_kernels(at::Device device, uint64_t capture) {
    return of_launches(device, capture, capture != 0 ? Use::kCaptured : Use::kKernels);
  }
  /// For proxies, whose kernels wait for the host as well.
  CommStreams of_proxies(at::Device device, uint64_t capture) {
    return of_launches(device, capture, capture != 0 ? Use::kCapturedProxies : Use::kProxies);
  }

 private:
  enum class Use { kD2h, kMore, kH2d, kSend, kReceive, kKernels, kCaptured, kProxies, kCapturedProxies };
  static StreamFor purpose_of(Use use) {
    if (use == Use::kCaptured || use == Use::kCapturedProxies) return StreamFor::kCaptures;
    return use == Use::kKernels || use == Use::kProxies ? StreamFor::kKernels : StreamFor::kCopies;
  }
  CommStreams of_launches(at::Device device, uint64_t capture, Use use) EXCLUDES(mutex_);
  /// key: the caller's stream; if all callers share one, any fixed stream of the device.
  c10::Stream stream(Use use, const c10::Stream& key) REQUIRES(mutex_);
  struct Hash {
    size_t operator()(const std::pair<Use, c10::Stream>& of) const {
      return std::hash<c10::Stream>()(of.second) * 8 + size_t(of.first);
    }
  };

  Origin origin_;
  const std::shared_ptr<CaptureMemory> capture_memory_ = std::make_shared<CaptureMemory>();
  Mutex mutex_;
  std::unordered_map<std::pair<Use, c10::Stream>, c10::Stream, Hash> streams_ GUARDED_BY(mutex_);
};

/// The copies and events of one call: to the host and back; or, for kernels, to contiguous stand-ins on the device and
/// back. One of the copy_in...() functions begins it, on the caller's thread. The later steps run in the order of this
/// list, each once (or once per chunk), on any thread.
class StagingCopies {
 public:
  /// timed: duration() will be called.
  explicit StagingCopies(const CommStreams& streams, bool timed = false) : comm_streams_(streams), returned_(timed) {
    if (timed) begun_.emplace(timed);
  }

  ~StagingCopies();

  /// Enqueues the copies to the host, after all work on the caller's current stream.
  void copy_in(const Loads& loads);
  /// The same for kernels, whose stand-ins are on the device: the host does not wait, and a capture is no obstacle.
  void copy_in_on_device(const Loads& loads);
  /// Enqueues more copies to the host, for the first chunks of a call that has begun, after all work on the stream.
  void copy_in_first_chunk(const Loads& loads) { fill(loads, comm_streams_.d2h); }
  /// Enqueues the copies of a later chunk, into host memory of an earlier chunk, after the copies back of that one.
  /// Uses a stream that no later call blocks. Only once the device has reached the call. May be called from any thread.
  void copy_in_later_chunk(const Loads& loads);
  /// Like copy_in(), but no stream waits for the caller's. The first poll() after the device has reached the call
  /// enqueues the copies. behind: they come after results that are being copied back by then.
  void copy_in_when_reached(const Loads& loads, bool behind = false);
  /// Waits until the copies to the host have arrived. Ends at the deadline, on the group's failure, or on Ctrl-C.
  Status arrive(Group& group, const Deadline& deadline);
  /// Polls once: the result of arrive(), or nothing if the copies have not arrived.
  std::optional<Status> poll(Group& group, const Deadline& deadline);
  /// Enqueues the copies back. None of them runs before the caller's stream has reached the call.
  void copy_out(const Loads& loads);
  /// From now on join_streams() covers all work that is on the stream. The memory of these tensors stays allocated
  /// until that work is done.
  void close(const Tensors& used) EXCLUDES(mutex_);
  /// Makes this thread's current stream wait for the copies back, or for all work enqueued before close(). Raises if
  /// that stream is in a capture and this call is not part of it. Does nothing if this call is part of a capture that
  /// has ended: no event outside the capture completes with it.
  void join_streams() EXCLUDES(mutex_);
  /// Whether the device has completed all work that join_streams() waits for. Always true in a capture, whose events
  /// cannot be queried.
  bool is_over() const;

  /// duration() measures the work enqueued between this call and close().
  void start_clock();
  /// Whether both ends of that work have been recorded.
  bool is_timed() const { return begun_ && begun_->is_recorded() && returned_.is_recorded(); }
  /// Call it only if is_timed() and is_over().
  std::chrono::duration<float, std::milli> duration() const;

  const c10::Stream& stream() const { return comm_streams_.h2d; }
  const CommStreams& streams() const { return comm_streams_; }
  /// The capture that the call is part of; 0: none.
  uint64_t capture() const { return comm_streams_.capture; }

 private:
  /// Notes the caller's stream and its position.
  void call();
  void copy(const Loads& loads, const c10::Stream& stream) const;
  void fill(const Loads& loads, const c10::Stream& stream);
  bool has_arrived();
  Status late(Group& group, const Deadline& deadline) const;
  /// Makes the allocator keep a tensor's memory until the stream has passed its use.
  void keep(const at::Tensor& tensor, const c10::Stream& stream) const;

  const CommStreams comm_streams_;
  PooledEvent called_;                // the device has reached the call; recorded if the streams are nvx's
  std::optional<Loads> later_;        // copies that poll() has yet to enqueue
  bool behind_ = false;               // `later_` comes after results that are being copied back
  PooledEvent arrived_;               // the copies to the host have completed
  PooledEvent returned_;              // the copies back have completed; recorded only if there were any, or by close()
  std::optional<PooledEvent> begun_;  // recorded by start_clock()

  // Used in a capture only. Elsewhere the allocator records the stream's use; in a capture, a recorded use would keep
  // it from reusing the memory within the capture.
  Mutex mutex_;
  Tensors kept_ GUARDED_BY(mutex_);
  uint64_t place_ = 0;                 // see CaptureMemory
  std::optional<c10::Stream> caller_;  // the stream of the call
};

/// staging.copy_out(), with an exception as a status. The peers have done their part by now, so an error here fails
/// only this call, and not the group.
Status try_copy_out(StagingCopies& staging, const Loads& loads);

}  // namespace nvx
