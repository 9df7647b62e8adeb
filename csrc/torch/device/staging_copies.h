#pragma once

#include <ATen/ATen.h>
#include <c10/core/Event.h>
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

/// How tensors of accelerators pass through host memory: they come to the host on a stream, go through the group as any
/// tensor of the CPU, and go back on a stream. All of this uses only what c10 offers for every device, so no
/// accelerator's own headers or libraries are needed.
namespace nvx {

/// Whether nvx takes tensors of this device.
bool serves(at::Device device);

/// The device whose current stream a barrier waits for: the chosen one, or else this thread's current one. None if the
/// process has not used that device.
std::optional<at::Device> device_in_use(const std::optional<at::Device>& chosen = std::nullopt);

/// This thread's current stream of the device.
c10::Stream current_stream(at::Device device);

/// The number of the capture that a stream is in, which makes a graph of what the stream is given; 0: none.
uint64_t capture_of(const c10::Stream& stream);
/// Raises if this thread's current stream of the device is in a capture. For operations that need the host.
void refuse_capture(at::Device device);

/// Host memory of the size of a device's tensor, contiguous. It is pinned, so that copies between the two need not
/// block the host.
at::Tensor host_stand_in(const at::Tensor& tensor);

/// (the user's tensor, the one in host memory that stands in for it).
using Loads = std::vector<std::pair<at::Tensor, at::Tensor>>;

/// Memory that captured operations use although their works are gone. If it were let go of at once, another tensor of
/// the same capture would get it. So it is kept until the stream that it belongs to waits for a later operation of the
/// capture, or until the next capture begins.
class Leftovers {
 public:
  /// The place of one more operation in this capture.
  uint64_t next_place(uint64_t capture) EXCLUDES(mutex_);
  void add(uint64_t place, const c10::Stream& owner, std::vector<at::Tensor> tensors) EXCLUDES(mutex_);
  /// The owner now waits for the operation of that place: what it and earlier ones left can go.
  void let_go(uint64_t place, const c10::Stream& owner) EXCLUDES(mutex_);

 private:
  struct Entry {
    uint64_t place;
    c10::Stream owner;
    std::vector<at::Tensor> tensors;
  };
  Mutex mutex_;
  uint64_t capture_ GUARDED_BY(mutex_) = 0;
  uint64_t places_ GUARDED_BY(mutex_) = 0;
  std::vector<Entry> entries_ GUARDED_BY(mutex_);  // all of one capture
};

/// The streams of one call.
struct CommStreams {
  c10::Stream down;      ///< to the host
  c10::Stream up;        ///< and back
  bool own;              ///< both are nvx's; otherwise both are the caller's
  uint64_t capture = 0;  ///< the one that the caller's stream is in, and nvx's with it; 0: none. Only for kernels
  std::optional<c10::Stream> more = std::nullopt;  ///< to the host, for bring_more()
  std::shared_ptr<Leftovers> leftovers = nullptr;  ///< where tensors are kept that the capture uses
  /// This thread's current stream, both ways: for synchronous calls.
  static CommStreams of_caller(at::Device device);
};

/// What a stream of a group's own is given.
enum class StreamFor { kCopies, kKernels, kCaptures };

/// The streams that a group has of its own, of each device.
/// - There is one down to the host and one up, so that what waits to go down does not hold up what comes back.
/// - Kernels, which may wait for peers, have other streams, so that they hold up neither.
/// - Messages have no common order. So no stream waits for what is to be sent, and what is received comes back on a
/// stream
///   for each of the callers' streams.
/// torch's pool of streams is round-robin and repeats. As far as there are others, none of these is a stream that this
/// process's kernels use.
class OwnCommStreams {
 public:
  OwnCommStreams() = default;
  ~OwnCommStreams();
  OwnCommStreams(const OwnCommStreams&) = delete;
  OwnCommStreams& operator=(const OwnCommStreams&) = delete;

  CommStreams of(at::Device device) EXCLUDES(mutex_);
  CommStreams of_messages(at::Device device) EXCLUDES(mutex_);
  /// Captures have a stream of their own: on a shared one, a call that is not captured would break the capture.
  CommStreams of_kernels(at::Device device, uint64_t capture) EXCLUDES(mutex_);
  /// For proxies, whose kernels wait for the host, too.
  CommStreams of_proxies(at::Device device, uint64_t capture) EXCLUDES(mutex_);

 private:
  enum class Use { kDown, kMore, kUp, kSend, kReceive, kKernels, kCaptured, kProxies, kCapturedProxies };
  static StreamFor purpose_of(Use use) {
    if (use == Use::kCaptured || use == Use::kCapturedProxies) return StreamFor::kCaptures;
    return use == Use::kKernels || use == Use::kProxies ? StreamFor::kKernels : StreamFor::kCopies;
  }
  /// key: the caller's stream, or, where all callers share one, any fixed stream of the device.
  c10::Stream stream(Use use, const c10::Stream& key) REQUIRES(mutex_);
  struct Hash {
    size_t operator()(const std::pair<Use, c10::Stream>& of) const {
      return std::hash<c10::Stream>()(of.second) * 8 + size_t(of.first);
    }
  };

  Origin origin_;
  const std::shared_ptr<Leftovers> leftovers_ = std::make_shared<Leftovers>();
  Mutex mutex_;
  std::unordered_map<std::pair<Use, c10::Stream>, c10::Stream, Hash> streams_ GUARDED_BY(mutex_);
};

/// The copies and events of one call: to the host and back, or, where kernels carry it out, to contiguous stand-ins on
/// the device and back. One of the bring...() begins it, on the caller's thread. The further steps are taken in the
/// order of this list, each once (or once a chunk), on any thread.
class StagingCopies {
 public:
  /// timed: duration() will be asked for.
  explicit StagingCopies(const CommStreams& streams, bool timed = false)
      : comm_streams_(streams),
        called_(streams.down.device_type()),
        arrived_(streams.down.device_type()),
        returned_(streams.down.device_type(),
                  timed ? c10::EventFlag::BACKEND_DEFAULT : c10::EventFlag::PYTORCH_DEFAULT) {
    if (timed) begun_.emplace(streams.down.device_type(), c10::EventFlag::BACKEND_DEFAULT);
  }

  ~StagingCopies();
  StagingCopies(const StagingCopies&) = delete;
  StagingCopies& operator=(const StagingCopies&) = delete;

  /// Begins the copies to the host, behind all that the caller's current stream has been given so far.
  void bring(const Loads& loads);
  /// Begins more copies to the host, for the first chunks of a call that has been begun: behind what the stream has.
  void bring_along(const Loads& loads);
  /// Begins the copies of a further chunk, into host memory that an earlier chunk has used: behind the copies back of
  /// that one, and on a stream that no later call holds up. Only once the device has come to the call. From any thread.
  void bring_more(const Loads& loads);
  /// As bring(), but no stream waits for the caller's. The look() that finds that it has come to the call begins the
  /// copies.
  void bring_later(const Loads& loads);
  /// As bring_later(), and the copies come behind what is on its way back by then.
  void bring_behind(const Loads& loads);
  /// Waits until what is brought has arrived. Ends at the deadline, with the group's failure, or when the user
  /// interrupts.
  Status arrive(Group& group, const Deadline& deadline);
  /// One look whether it has arrived: what arrive() would end in, or nothing yet.
  std::optional<Status> look(Group& group, const Deadline& deadline);
  /// Begins the copies back. None of them is done before the caller's stream has come to the call.
  void take_back(const Loads& loads);
  /// All that the stream has been given so far is what join_streams() has a stream wait for. The memory of these
  /// tensors stays until it is done.
  void close(const std::vector<at::Tensor>& used) EXCLUDES(mutex_);
  /// Has this thread's current stream wait for the copies back, or for all that was begun before close(). Raises if
  /// that stream is in a capture and this call is not part of it. Does nothing if this call is part of a capture that
  /// has ended, as nothing waits for a captured call any more then.
  void join_streams() EXCLUDES(mutex_);
  /// Whether the device has done all that join_streams() waits for. For what is captured always true: nobody can ask.
  bool is_over() const;

  /// What the stream is given from here on until close() is what duration() measures.
  void start_clock();
  bool is_timed() const { return begun_.has_value(); }
  /// Only when is_over() says so.
  std::chrono::duration<float, std::milli> duration() const;

  /// The stream on which the results arrive.
  const c10::Stream& stream() const { return comm_streams_.up; }
  const CommStreams& streams() const { return comm_streams_; }
  /// The capture that it is part of; 0: none.
  uint64_t capture() const { return comm_streams_.capture; }

 private:
  /// Notes the stream that the call is made on, and how far it has come.
  void call();
  void fill(const Loads& loads, const c10::Stream& stream);
  bool has_arrived();
  Status late(Group& group, const Deadline& deadline) const;
  /// Has the allocator keep a tensor's memory until the stream has come past its use.
  void keep(const at::Tensor& tensor, const c10::Stream& stream) const;

  const CommStreams comm_streams_;
  c10::Event called_;           // the device has come to the call; recorded where the streams are nvx's
  std::optional<Loads> later_;  // what look() has yet to begin to bring
  bool behind_ = false;         // what is brought later comes behind what is on its way back
  c10::Event arrived_;          // what was brought has arrived
  c10::Event returned_;         // what was taken back has arrived; recorded only where something was, or by close()
  std::optional<c10::Event> begun_;  // start_clock()

  // In a capture these tensors are kept. Elsewhere the allocator is told which stream uses them; told so in a capture,
  // it would not use their memory again in it.
  Mutex mutex_;
  std::vector<at::Tensor> kept_ GUARDED_BY(mutex_);
  uint64_t place_ = 0;                 // see Leftovers
  std::optional<c10::Stream> caller_;  // the stream that the call was made on
};

}  // namespace nvx
