#pragma once

#include <sys/types.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "base/handle.h"
#include "base/mutex.h"
#include "group/core/trace.h"
#include "group/plan/operation.h"
#include "kernel/cpu/run_on_cpu.h"
#include "schedule/catalog.h"

namespace nvx {

/// One group of this process as `nvx status` reads it, in another process and without a lock. The rank only writes
/// here, and decides nothing by it. Times are nanoseconds of Clock. A rank is stored plus one; 0: none.
struct StatusSlot {
  enum State : uint32_t { kFree, kSetUp, kOpen, kFailed, kLeft };
  struct Call {
    std::atomic<uint64_t> number, began, ended, count, bytes;
    std::atomic<uint32_t> what;  ///< the first four bytes of the fingerprint
    std::atomic<int32_t> root;
  };
  struct Total {
    std::atomic<uint64_t> calls, bytes, ns;
  };
  struct Wait {
    std::atomic<uint32_t> rank, pid;     ///< pid: as that rank sees it; 0: it is not of this host
    std::atomic<uint32_t> call;          ///< see name_of_call()
    std::atomic<uint64_t> began, ended;  ///< ended: 0 during the wait
  };
  struct Late {
    std::atomic<uint32_t> rank, times;  ///< times: the calls in which it was the last to come
    std::atomic<uint64_t> ns;           ///< how long this rank slept for it
  };
  static constexpr size_t kKinds = 12;  ///< by kernel::Collective, then sends and receives
  static constexpr size_t kLates = 8;   ///< another rank takes the place of the least of them once it is later

  std::atomic<uint32_t> state;
  std::atomic<uint32_t> awaited;  ///< the rank for which the current call sleeps
  int32_t rank, size;
  std::atomic<uint64_t> id, since, issued;
  std::atomic<uint64_t> begun, ended;         ///< calls of the lane; call n is calls[n % 2]
  std::atomic<uint64_t> launched, completed;  ///< operations on the device: as of the last call, and all that ended
  std::atomic<uint64_t> messages, oldest;     ///< open ones as of the last check; when the oldest began
  Call calls[2], launch;
  Total totals[kKinds];
  Late lates[kLates];
  char name[96], message[96], failure[256];
  // For cycle_of_waits() alone; readers of the fields above ignore them.
  int32_t global_rank;  ///< of this rank
  /// For the rank `awaited`; of a thread that sleeps for a message; the one whose timeout failed the group.
  Wait current, of_message, given_up;
};
/// "all_reduce"; behind the collectives come messages and other calls.
const char* name_of_call(uint32_t call);
uint64_t ns_of(Clock::time_point at);

/// Writes the slot of one group: about 20 stores a call to memory of its own, and seldom a reading of the clock.
class GroupStatus {
 public:
  GroupStatus(const std::string& name, int rank, int size);
  ~GroupStatus();

  /// The set-up is complete.
  void open(uint64_t id, int global_rank = 0);
  void fail(const std::string& cause);
  void leave() { state(StatusSlot::kLeft); }

  void issued(uint64_t number) { slot_->issued.store(number, std::memory_order_relaxed); }
  /// Around a collective, for the holder of the lane. Chunks count as one call. An untimed call has duration 0.
  void begin(const Operation& operation, Clock::time_point now);
  void end();
  /// For any thread that launches. The totals may lose such a call while another thread carries out a collective of the
  /// same kind on the host: begin() and end() write them without read-modify-write, which would cost short calls more.
  void launched(const Operation& operation, uint64_t count) EXCLUDES(launch_mutex_);
  void completed(uint64_t count) { slot_->completed.store(count, std::memory_order_relaxed); }
  /// The caller holds the mailbox's lock.
  void message_ended(bool receives, int peer, int64_t tag, DType dtype, size_t bytes, Clock::time_point began);
  void messages(size_t open, const std::string& oldest, Clock::time_point since);
  void no_messages() { slot_->messages.store(0, std::memory_order_relaxed); }

  /// This thread sleeps in a wait for that rank (-1: any), and has woken. `pid`: of that rank, or 0.
  void sleeps(int rank, pid_t pid = 0);
  void slept(int rank, Clock::duration span);
  /// The same for a wait until a message is done.
  void sleeps_for_message(int rank, pid_t pid, bool receives, Clock::time_point began);
  void slept_for_message() { slot_->of_message.rank.store(0, std::memory_order_relaxed); }
  /// A wait for this rank has timed out, which fails the group. The first one counts.
  void gave_up(int rank, pid_t pid, const std::string& call, Clock::time_point began);

  /// Whether the process records its calls (`NVX_TRACE`). The next three are for the holder of the lane, during a call.
  bool traced() const { return trace_ != nullptr; }
  void runs(kernel::Algorithm algorithm) { algorithm_ = uint8_t(algorithm) + 1; }
  void runs(const schedule::Row& row) { schedule_ = uint8_t(&row - schedule::catalog().data() + 1); }
  /// The call has waited for this rank, -1: for any, from then until now.
  void waited(int rank, Clock::time_point began);

  /// "rank 3 12.4 s (last in 20 calls), rank 1 0.2 s (last in 1 call)": the ranks for which this one slept longest.
  std::string lates() const;

  const StatusSlot& slot() const { return *slot_; }

 private:
  /// Shorter sleeps do not make a rank the last one: waking a thread takes some time too.
  static constexpr std::chrono::milliseconds kLate{1};

  void state(StatusSlot::State state);
  void after_sleep();
  void trace(TraceRecord::Kind kind, TraceRecord record);

  std::unique_ptr<StatusSlot> unseen_;  // if the process's page has no room
  StatusSlot* const slot_;
  TraceRing* const trace_;  // null: nothing is recorded
  Mutex launch_mutex_;      // one writer of slot_->launch at a time
  uint64_t turn_ = 0;
  uint8_t algorithm_ = 0, schedule_ = 0;  // of the current call
  std::atomic<bool> slept_{false};        // the current call slept
  std::atomic<bool> gave_up_{false};
  std::atomic<int> last_{-1};  // the last rank for which it slept long
};

/// Records a collective of the lane's holder from start to end.
class CallStatus {
 public:
  CallStatus(GroupStatus& status, const Operation& operation, Clock::time_point began) : status_(status) {
    status_.begin(operation, began);
  }
  ~CallStatus() { status_.end(); }
  CallStatus(const CallStatus&) = delete;

 private:
  GroupStatus& status_;
};

/// The slots of this process: a memfd that processes of the same user find and open in /proc/PID/fd. It has no name in
/// the file system, so nothing is left over, and others cannot write to it. With `NVX_TRACE` it is a file of that
/// directory instead, with a ring of records behind the slots, and outlives the process. It begins with a description
/// of itself in JSON, so the layout is stated here only. Made with the first group.
class StatusPage {
 public:
  static constexpr uint32_t kVersion = 1;
  static constexpr size_t kSlots = 256, kSlotBytes = 2048, kTextBytes = 4096;
  static constexpr size_t kBytes = kTextBytes + kSlots * kSlotBytes;
  static constexpr const char *kName = "nvx-status", *kTraceName = "nvx-trace";

  static StatusPage& instance();
  /// Null if all slots are taken, or there is no memory for them.
  StatusSlot* claim() EXCLUDES(mutex_);
  void release(StatusSlot* slot) EXCLUDES(mutex_);
  uint16_t place_of(const StatusSlot* slot) const;
  /// Null if nothing is recorded.
  TraceRing* trace() { return trace_ ? &*trace_ : nullptr; }
  /// A copy of the slots of a process of this host; empty if it has none, or this process may not read them.
  static std::vector<std::byte> read(pid_t pid);

 private:
  static std::string layout(pid_t pid);
  std::string layout_of_trace() const;
  Fd file(size_t* bytes) REQUIRES(mutex_);
  bool make() REQUIRES(mutex_);

  Mutex mutex_;
  bool made_ GUARDED_BY(mutex_) = false;
  std::byte* base_ = nullptr;       // never unmapped, and its descriptor never closed
  std::optional<TraceRing> trace_;  // made with `base_`, by the first claim()
  Fd file_;                         // readers open it through /proc as long as the process lives
  std::array<bool, kSlots> taken_ GUARDED_BY(mutex_) = {};
};
static_assert(sizeof(StatusSlot) <= StatusPage::kSlotBytes && std::atomic<uint64_t>::is_always_lock_free);

}  // namespace nvx
