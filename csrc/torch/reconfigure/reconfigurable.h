#pragma once

#include "torch/backend.h"

#ifdef C10D_BACKEND_HAS_RECONFIGURE

#include <atomic>
#include <set>

#include "memory/shm/neighbours.h"
#include "torch/reconfigure/reconfigure_handle.h"
#include "torch/reconfigure/reconfigure_work.h"

namespace nvx {

/// A group whose ranks may change, for enable_reconfigure=True: a sequence of groups, each a ProcessGroupNVX of its
/// own. torch sees one backend. It forwards calls to the current group, and keeps the state that outlives a group:
/// options and hooks.
/// There is no group before the first reconfigure(), nor after a failed one. While the ranks of the next group meet, a
/// call that needs the group waits for them.
class Reconfigurable final : public c10d::Backend {
 public:
  using Standing = c10::intrusive_ptr<ProcessGroupNVX>;
  using Options = ProcessGroupNVX::Options;
  using IntrusiveWork = c10::intrusive_ptr<c10d::Work>;
  using IntrusiveBackend = c10::intrusive_ptr<c10d::Backend>;
  using Tensors = std::vector<at::Tensor>;

  Reconfigurable(c10::intrusive_ptr<c10d::Store> store, int rank, int size, c10::intrusive_ptr<Options> options);
  ~Reconfigurable() override;

  bool supportsReconfigure() const override { return true; }
  std::string get_reconfigure_handle() const override;
  /// Bad arguments, and a uuid that was used before, raise at once and leave the group unchanged. Otherwise the current
  /// group is aborted, rank() and size() become those of the next group, and the work ends when its ranks have met.
  /// torch reads rank() and size() without a lock. This call writes them, and a failed meeting restores them before the
  /// work ends. So a thread that has waited for the work sees the valid numbers. A thread that reads them during this
  /// call or the meeting may see the numbers of either group.
  IntrusiveWork reconfigure(const c10d::ReconfigureOptions& opts) override;
  /// The current group, or null.
  Standing standing() const EXCLUDES(mutex_);

  const std::string getBackendName() const override { return "nvx"; }
  c10::intrusive_ptr<c10d::Backend::Options> getBackendOptions() override;
  bool supportsSplitting() const override { return true; }
  bool supportsCoalescing() const override { return true; }
  bool supportsShrinking() const override { return true; }
  void setTimeout(std::chrono::milliseconds timeout) override;
  void enableCollectivesTiming() override;
  void registerOnCompletionHook(std::function<void(std::shared_ptr<c10d::WorkInfo>)>&& hook) override;
  void waitForPendingWorks() override;
  void eagerConnectSingleDevice(at::Device device) override;
  c10d::ErrorType getError() override;
  bool supportsTensorAlloc(c10::DeviceIndex device) override;
  void abort() override;
  void shutdown() override;
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override;
#ifdef C10D_BACKEND_HAS_HOOKS
  void addEphemeralTimeout(const std::chrono::milliseconds& timeout) override { now()->addEphemeralTimeout(timeout); }
  void registerAbortHook(int64_t id, c10d::AbortHook hook) override;
  void unregisterAbortHook(int64_t id) override;
#endif
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 15
  bool isInitialized() override { return standing() != nullptr; }
  bool supportsAbortHooks() const override { return true; }
  bool supportsCompletionHooks() const override { return true; }
  void registerCompletionHook(int64_t id, c10d::CompletionHook hook) override;
  void unregisterCompletionHook(int64_t id) override;
#endif

  // Calls that the current group runs.
  IntrusiveWork broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override {
    return now()->broadcast(tensors, opts);
  }
  IntrusiveWork allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override {
    return now()->allreduce(tensors, opts);
  }
  IntrusiveWork allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts) override {
    return now()->allreduce_sparse(tensors, opts);
  }
  IntrusiveWork allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) override {
    return now()->allreduce_coalesced(tensors, opts);
  }
  IntrusiveWork reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override {
    return now()->reduce(tensors, opts);
  }
  IntrusiveWork allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override {
    return now()->allgather(outputs, inputs, opts);
  }
  IntrusiveWork _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& opts) override {
    return now()->_allgather_base(output, input, opts);
  }
  IntrusiveWork allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                    const c10d::AllgatherOptions& opts) override {
    return now()->allgather_coalesced(outputs, inputs, opts);
  }
  IntrusiveWork allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                const c10d::AllgatherOptions& opts) override {
    return now()->allgather_into_tensor_coalesced(outputs, inputs, opts);
  }
  IntrusiveWork gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& opts) override {
    return now()->gather(outputs, inputs, opts);
  }
  IntrusiveWork scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& opts) override {
    return now()->scatter(outputs, inputs, opts);
  }
  IntrusiveWork reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                               const c10d::ReduceScatterOptions& opts) override {
    return now()->reduce_scatter(outputs, inputs, opts);
  }
  IntrusiveWork _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                     const c10d::ReduceScatterOptions& opts) override {
    return now()->_reduce_scatter_base(output, input, opts);
  }
  IntrusiveWork reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                const c10d::ReduceScatterOptions& opts) override {
    return now()->reduce_scatter_tensor_coalesced(outputs, inputs, opts);
  }
  IntrusiveWork alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                              std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& opts) override {
    return now()->alltoall_base(output, input, output_splits, input_splits, opts);
  }
  IntrusiveWork alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) override {
    return now()->alltoall(outputs, inputs, opts);
  }
#ifdef C10D_BACKEND_HAS_HOOKS
  IntrusiveWork gather_single(at::Tensor& output, at::Tensor& input, const c10d::GatherOptions& opts) override {
    return now()->gather_single(output, input, opts);
  }
#endif
  IntrusiveWork send(Tensors& tensors, int peer, int tag) override { return now()->send(tensors, peer, tag); }
  IntrusiveWork recv(Tensors& tensors, int peer, int tag) override { return now()->recv(tensors, peer, tag); }
  IntrusiveWork recvAnysource(Tensors& tensors, int tag) override { return now()->recvAnysource(tensors, tag); }
  IntrusiveWork barrier(const c10d::BarrierOptions& opts) override { return now()->barrier(opts); }
  void monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) override {
    now()->monitoredBarrier(opts, wait_all_ranks);
  }
  void startCoalescing() override { now()->startCoalescing(); }
  IntrusiveWork endCoalescing() override { return now()->endCoalescing(); }
  IntrusiveBackend split(const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
                         const c10::intrusive_ptr<c10d::Backend::Options>& opts) override {
    return now()->split(store, ranks, opts);
  }
  IntrusiveBackend merge(const c10::intrusive_ptr<c10d::Store>& store,
                         const c10::intrusive_ptr<c10d::Backend::Options>& opts, const int& rank,
                         const int& size) override {
    return now()->merge(store, opts, rank, size);
  }
  IntrusiveBackend shrink(const std::vector<int64_t>& excluded, int flags,
                          const c10::intrusive_ptr<c10d::Backend::Options>& override) override {
    return now()->shrink(excluded, flags, override);
  }
#ifdef C10D_BACKEND_HAS_WINDOW
  bool supportsWindow() const override { return true; }
  c10::intrusive_ptr<c10d::Window> new_window(const std::optional<at::Tensor>& tensor) override {
    return now()->new_window(tensor);
  }
#endif
  at::Tensor allocateTensor(long size, at::TensorOptions options) override {  // NOLINT: torch's type
    return now()->allocateTensor(size, options);
  }

 private:
  using OnCompletionHook = std::function<void(std::shared_ptr<c10d::WorkInfo>)>;
  /// The next group, as requested by reconfigure().
  struct Plan {
    int64_t uuid = 0;
    std::string name;
    std::vector<MemberHandle> members;  ///< by their new ranks
    int rank = 0;
    std::chrono::milliseconds timeout{0};               ///< of the meeting
    std::vector<std::shared_ptr<Neighbour>> processes;  ///< of the members that this process knows; otherwise null
    int old_rank = 0, old_size = 0;
  };

  /// The current group; waits for it if its ranks are meeting. Raises if there is none.
  Standing now() const EXCLUDES(mutex_);
  std::string name() const EXCLUDES(mutex_);
  MemberHandle own_handle() const REQUIRES(mutex_);
  /// Writes the fields that torch reads as rank() and size().
  void be(int rank, int size) REQUIRES(mutex_);
  Plan plan_of(const c10d::ReconfigureOptions& opts) const EXCLUDES(mutex_);
  void enter(int64_t uuid, const c10::intrusive_ptr<ReconfigureWork>& work) EXCLUDES(mutex_);
  void claim(const Plan& plan) const;
  void carry_out(const std::shared_ptr<Plan>& plan, const c10::intrusive_ptr<ReconfigureWork>& work) EXCLUDES(mutex_);
  Standing meet(const std::shared_ptr<Plan>& plan, const c10::intrusive_ptr<ReconfigureWork>& work) EXCLUDES(mutex_);
  static void look_at(const Plan& plan);
  Status explain(const Error& error, const Plan& plan) const;
  c10::intrusive_ptr<c10d::Store> store_of(const Plan& plan) const;
  void equip(ProcessGroupNVX& group) EXCLUDES(mutex_);

  const Origin origin_;
  const c10::intrusive_ptr<c10d::Store> store_;
  std::shared_ptr<Neighbours> neighbours_ = Neighbours::here();  // keeps this process's identity
  const uint64_t number_ = random_arena_id().low;
  mutable Mutex mutex_;  // never held while a group is made or ended, nor while a hook runs, is copied or is destroyed
  Options options_ GUARDED_BY(mutex_);
  bool timeout_was_set_ GUARDED_BY(mutex_) = false;
  bool timed_ GUARDED_BY(mutex_) = false;
  bool ended_ GUARDED_BY(mutex_) = false;  // shutdown() was called
  std::optional<at::Device> device_ GUARDED_BY(mutex_);
  Standing group_ GUARDED_BY(mutex_);
  c10::intrusive_ptr<ReconfigureWork> meeting_ GUARDED_BY(mutex_);  // null: no meeting
  std::set<int64_t> used_ GUARDED_BY(mutex_);
  std::optional<int64_t> uuid_ GUARDED_BY(mutex_);  // of the last group that stood, for its rank's handle
  int handle_rank_ GUARDED_BY(mutex_);
  std::atomic<int> told_rank_;              // `rank_`, for readers without the mutex
  std::string failure_ GUARDED_BY(mutex_);  // of the last reconfigure(), if it failed
  std::shared_ptr<const OnCompletionHook> on_completion_ GUARDED_BY(mutex_);
#ifdef C10D_BACKEND_HAS_HOOKS
  const std::shared_ptr<Hooks<c10d::AbortHook>> abort_hooks_ = std::make_shared<Hooks<c10d::AbortHook>>();
#endif
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 15
  const std::shared_ptr<Hooks<c10d::CompletionHook>> completion_hooks_ =
      std::make_shared<Hooks<c10d::CompletionHook>>();
#endif
};

}  // namespace nvx

#endif
