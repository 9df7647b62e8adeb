#pragma once

#include "torch/backend.h"

#ifdef C10D_BACKEND_HAS_RECONFIGURE

#include <map>
#include <set>

#include "memory/shm/shm_registry.h"
#include "torch/reconfigure/reconfigure_handle.h"
#include "torch/reconfigure/reconfigure_work.h"

namespace nvx {

/// A group whose ranks may change, for enable_reconfigure=True: one communicator after the other. It keeps the state
/// that outlives a communicator: options and hooks.
/// There is no communicator before the first reconfigure(), nor after a failed one. While the next one is being set up,
/// a call that needs it waits for it.
class Reconfigurable final : public ProcessGroupNVX {
 public:
  Reconfigurable(c10::intrusive_ptr<c10d::Store> store, int rank, int size, c10::intrusive_ptr<Options> options);
  ~Reconfigurable() override;

  bool supportsReconfigure() const override { return true; }
  /// Not without a communicator: torch aborts the default group inside a coalescing scope if there is such support, and
  /// a scope could not begin.
  bool supportsCoalescing() const override { return !origin_.elsewhere() && active_or_null() != nullptr; }
  std::string get_reconfigure_handle() const override;
  /// Bad arguments, and a uuid that was used before, raise at once and leave the group unchanged. Otherwise the current
  /// communicator is aborted, rank() and size() become those of the next one, and the work ends when that is set up.
  /// torch reads rank() and size() without a lock. This call writes them, and a failed set-up restores them before the
  /// work ends. So a thread that has waited for the work sees the valid numbers. A thread that reads them during this
  /// call or the set-up may see the numbers of either communicator.
  IntrusiveWork reconfigure(const c10d::ReconfigureOptions& opts) override;

  c10::intrusive_ptr<c10d::Backend::Options> getBackendOptions() override;
  void setTimeout(std::chrono::milliseconds timeout) override;
  void eagerConnectSingleDevice(at::Device device) override;
  c10d::ErrorType getError() override;
  void abort() override;
  void shutdown() override;
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 15
  bool isInitialized() override { return active_or_null() != nullptr; }
#endif

 private:
  /// The next communicator, as requested by reconfigure().
  struct Plan {
    int64_t uuid = 0;
    std::string name;
    std::vector<MemberHandle> members;  ///< by their new ranks
    int rank = 0;
    std::chrono::milliseconds timeout{0};   ///< of the set-up
    std::vector<EarlierProcess> processes;  ///< of the members
    int old_rank = 0, old_size = 0;
  };

  /// Waits for the next communicator if it is being set up. Raises if there is none.
  Current active() const override EXCLUDES(mutex_);
  Current active_or_null() const override EXCLUDES(mutex_);
  /// Cancels the set-up in progress. Returns the communicator that there is afterwards; null if there is none.
  Current cancel_setup() const EXCLUDES(mutex_);
  std::string name() const EXCLUDES(mutex_);
  MemberHandle own_handle() const REQUIRES(mutex_);
  /// Writes the fields that torch reads as rank() and size().
  void be(int rank, int size) REQUIRES(mutex_) { rank_ = rank, size_ = size, published_rank_ = rank; }
  /// Of operations, and of a set-up whose call gives none.
  std::chrono::milliseconds timeout() const REQUIRES(mutex_) {
    return timeout_was_set_ || config().timeout.count() == 0 ? options_.timeout : config().timeout;
  }
  Plan plan_of(const c10d::ReconfigureOptions& opts) const EXCLUDES(mutex_);
  void enter(int64_t uuid, const c10::intrusive_ptr<ReconfigureWork>& work) EXCLUDES(mutex_);
  void claim(const Plan& plan, const ReconfigureWork& work) const;
  void carry_out(const std::shared_ptr<Plan>& plan, const c10::intrusive_ptr<ReconfigureWork>& work) EXCLUDES(mutex_);
  Current connect(const std::shared_ptr<Plan>& plan, const c10::intrusive_ptr<ReconfigureWork>& work) EXCLUDES(mutex_);
  Status explain(const Error& error, const Plan& plan) const;
  c10::intrusive_ptr<c10d::Store> store_of(const Plan& plan) const;

  const c10::intrusive_ptr<c10d::Store> store_;
  std::shared_ptr<ShmRegistry> shm_ = ShmRegistry::instance();  // keeps this process's identity
  const uint64_t number_ = random_arena_id().low;
  mutable Mutex mutex_;                                         // never held while a communicator is made or ended
  std::map<ArenaId, EarlierProcess> known_ GUARDED_BY(mutex_);  // the ranks of other hosts, in earlier communicators
  Options options_ GUARDED_BY(mutex_);
  bool timeout_was_set_ GUARDED_BY(mutex_) = false;
  bool ended_ GUARDED_BY(mutex_) = false;  // shutdown() was called
  std::optional<at::Device> device_ GUARDED_BY(mutex_);
  Current current_ GUARDED_BY(mutex_);
  c10::intrusive_ptr<ReconfigureWork> pending_ GUARDED_BY(mutex_);  // null: no set-up
  std::set<int64_t> used_ GUARDED_BY(mutex_);
  std::optional<int64_t> uuid_ GUARDED_BY(mutex_);  // of the last communicator, for its rank's handle
  int handle_rank_ GUARDED_BY(mutex_);
  std::string failure_ GUARDED_BY(mutex_);  // of the last reconfigure(), if it failed
};

}  // namespace nvx

#endif
