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
#include "group/group.h"
#include "torch/origin.h"

/// Tensors of accelerators, which go through host memory: to the host on a stream, through the group as any tensor of
/// the CPU, and back on a stream. All of it over what c10 knows of every device, so no accelerator's own headers or
/// libraries are needed.
namespace nvx {

/// Whether nvx takes tensors of this device.
bool serves(at::Device device);

/// The device whose current stream a barrier waits for: the one that was chosen, else this thread's; none where nothing
/// has been done on it.
std::optional<at::Device> device_in_use(const std::optional<at::Device>& chosen = std::nullopt);

/// Between two looks at a device.
void pause_after(int looks);

/// This thread's.
c10::Stream current_stream(at::Device device);

/// The capture that a stream is in, which makes a graph of what the stream is given; 0: none.
uint64_t capture_of(const c10::Stream& stream);
/// Raises where this thread's current stream of the device is in one: for what needs the host.
void refuse_capture(at::Device device);

/// Host memory for all of a device's tensor, in order. Copies between the two need not wait for each other's ends.
at::Tensor host_stand_in(const at::Tensor& tensor);

/// (the user's tensor, the one in host memory that stands in for it).
using Loads = std::vector<std::pair<at::Tensor, at::Tensor>>;

/// Memory that captured operations use whose works are gone. It is kept until the stream that it belongs to waits for a
/// later one of them, or the next capture begins: let go of before, it would be another tensor's of the same capture.
class Leftovers {
 public:
  /// The place of one more operation in this capture.
  uint64_t next_place(uint64_t capture) EXCLUDES(mutex_);
  void add(uint64_t place, const c10::Stream& owner, std::vector<at::Tensor> tensors) EXCLUDES(mutex_);
  /// The owner waits for the operation of that place.
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
struct Tracks {
  c10::Stream down;      ///< to the host
  c10::Stream up;        ///< and back
  bool own;              ///< nvx's; else both are the caller's
  uint64_t capture = 0;  ///< that the caller's is in, and nvx's own with it: only kernels can be captured
  std::optional<c10::Stream> more = std::nullopt;  ///< to the host, for bring_more()
  std::shared_ptr<Leftovers> leftovers = nullptr;  ///< of the capture
  /// What a synchronous call uses: this thread's current stream.
  static Tracks of_caller(at::Device device);
};

/// A group's own streams of each device. What waits to go down holds nothing up that comes back, and kernels, which may
/// wait for peers, hold up neither. Messages have no common order: no stream waits for what is to be sent, and what is
/// received comes back on a stream for each one of the callers'. The pool that they are from goes round: none is one
/// that kernels of this process have, as far as there are others.
class OwnTracks {
 public:
  OwnTracks() = default;
  ~OwnTracks();
  OwnTracks(const OwnTracks&) = delete;
  OwnTracks& operator=(const OwnTracks&) = delete;

  Tracks of(at::Device device) EXCLUDES(mutex_);
  Tracks of_messages(at::Device device) EXCLUDES(mutex_);
  /// What is captured has a stream of its own: what is not would break the capture.
  Tracks of_kernels(at::Device device, uint64_t capture) EXCLUDES(mutex_);
  /// Where a relay's kernels are, which the lane launches: apart from those that callers do.
  c10::Stream of_relays(at::Device device) EXCLUDES(mutex_);

 private:
  enum class Use { kDown, kMore, kUp, kSend, kReceive, kKernels, kCaptured, kRelays };
  static bool is_for_kernels(Use use) { return use >= Use::kKernels; }
  /// key: the caller's, or any one of the device.
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

/// One call's way to the host and back, or through kernels, where "the host" is more of the device's memory. Begun on
/// the caller's thread; then each step once, or once a round, in this order, from any.
class Transit {
 public:
  /// timed: it can tell for how long the device has been at it.
  explicit Transit(const Tracks& tracks, bool timed = false)
      : tracks_(tracks),
        called_(tracks.down.device_type()),
        arrived_(tracks.down.device_type()),
        returned_(tracks.down.device_type(),
                  timed ? c10::EventFlag::BACKEND_DEFAULT : c10::EventFlag::PYTORCH_DEFAULT) {
    if (timed) begun_.emplace(tracks.down.device_type(), c10::EventFlag::BACKEND_DEFAULT);
  }

  ~Transit();
  Transit(const Transit&) = delete;
  Transit& operator=(const Transit&) = delete;

  /// Begins the copies to the host, behind all that the caller's current stream has been given so far.
  void bring(const Loads& loads);
  /// The same behind what was brought last by this call.
  void bring_along(const Loads& loads);
  /// The same once the device has come to the call: on a stream that no later call holds up, into host memory that is
  /// in use until what was taken back is there. From any thread.
  void bring_more(const Loads& loads);
  /// As bring(), but no stream waits for the caller's: the copies begin in the look() that finds it there.
  void bring_later(const Loads& loads);
  /// The same, behind what is on its way back by then, too.
  void bring_behind(const Loads& loads);
  /// Waits for them. Ends at the deadline, with the group's failure, or where the user interrupts it.
  Status arrive(Group& group, const Deadline& deadline);
  /// One look at them: what the wait for them has ended in, or nothing yet.
  std::optional<Status> look(Group& group, const Deadline& deadline);
  /// Begins the copies back, none before the caller's stream has come to the call.
  void take_back(const Loads& loads);
  /// What the stream has been given so far is what join_streams() has a stream wait for; the memory of these stays
  /// until it is done.
  void close(const std::vector<at::Tensor>& used) EXCLUDES(mutex_);
  /// This thread's current stream waits for the copies back, or for all until close(). Refused where it is in a capture
  /// that this is not part of; nothing where the capture that this is part of has ended, and so has what waits for it.
  void join_streams() EXCLUDES(mutex_);
  /// Whether the stream has come past them. What is in a graph is over as soon as it is there: nobody can ask.
  bool is_over() const;

  /// What the stream is given from here on until close() is what it is timed for.
  void start_clock();
  bool is_timed() const { return begun_.has_value(); }
  /// When it is over.
  std::chrono::duration<float, std::milli> duration() const;

  /// Where whoever is told of the end finds the results.
  const c10::Stream& stream() const { return tracks_.up; }
  const Tracks& tracks() const { return tracks_; }
  /// That it is part of; 0: none.
  uint64_t capture() const { return tracks_.capture; }

 private:
  void call();
  void fill(const Loads& loads, const c10::Stream& stream);
  void keep(const at::Tensor& tensor, const c10::Stream& stream) const;

  const Tracks tracks_;
  c10::Event called_;  // everything before the call has been done; recorded where the streams are nvx's
  std::optional<Loads> later_;
  bool behind_ = false;  // what is on its way back
  c10::Event arrived_;   // what was brought is there
  c10::Event returned_;  // recorded only where something was taken back
  std::optional<c10::Event> begun_;

  // In a capture tensors are kept, not told of their streams: the allocator would use their memory no more in it.
  Mutex mutex_;
  std::vector<at::Tensor> kept_ GUARDED_BY(mutex_);
  uint64_t place_ = 0;
  std::optional<c10::Stream> caller_;  // theirs: that of the call
};

}  // namespace nvx
