#pragma once

#include <torch/version.h>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <map>
#include <memory>
#include <thread>

#include "base/mutex.h"
#include "group/extensions.h"
#include "torch/arguments/arguments.h"
#include "torch/device/delegate.h"
#include "torch/device/host_proxy_path.h"
#include "torch/device/kernel_path.h"
#include "torch/device/proxy_op.h"
#include "torch/hook.h"
#include "torch/origin.h"
#include "torch/work.h"

namespace nvx {

struct PoolStats;

/// nvx as torch sees it: turns tensors into operations, and tells torch of their ends. Which route a collective takes
/// is decided in group/plan/route.h, of facts that are found out here and in arguments.cc.
class ProcessGroupNVX final : public c10d::Backend {
 public:
  struct Options final : c10d::Backend::Options {
    explicit Options(std::chrono::milliseconds timeout = kBackendDefaultTimeout)
        : c10d::Backend::Options("nvx", timeout) {}
    /// Of a group that was merged out of several: nobody knows which ranks of the job these are.
    bool ranks_unknown = false;
#ifdef C10D_BACKEND_HAS_HOOKS
    c10::intrusive_ptr<c10d::Backend::Options> clone() const override { return c10::make_intrusive<Options>(*this); }
#endif
  };

  ProcessGroupNVX(c10::intrusive_ptr<c10d::Store> store, int rank, int size, c10::intrusive_ptr<Options> options);
  /// For a group that exists already.
  ProcessGroupNVX(c10::intrusive_ptr<c10d::Store> store, std::shared_ptr<Group> group, const Options& options);
  ~ProcessGroupNVX() override;

  using IntrusiveWork = c10::intrusive_ptr<c10d::Work>;
  using Tensors = std::vector<at::Tensor>;

  const std::string getBackendName() const override { return "nvx"; }
  c10::intrusive_ptr<c10d::Backend::Options> getBackendOptions() override;
  bool supportsSplitting() const override { return true; }
  bool supportsCoalescing() const override { return true; }

  IntrusiveWork broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override;
  IntrusiveWork allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override;
  IntrusiveWork allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts) override;
  IntrusiveWork allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) override;
  IntrusiveWork reduce(Tensors& tensors, const c10d::ReduceOptions& opts) override;
  IntrusiveWork allgather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) override;
  IntrusiveWork _allgather_base(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& opts) override;
  IntrusiveWork allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                    const c10d::AllgatherOptions& opts) override;
  IntrusiveWork allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                const c10d::AllgatherOptions& opts) override;
  IntrusiveWork gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& opts) override;
  IntrusiveWork scatter(Tensors& outputs, std::vector<Tensors>& inputs, const c10d::ScatterOptions& opts) override;
  IntrusiveWork reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                               const c10d::ReduceScatterOptions& opts) override;
  IntrusiveWork _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                     const c10d::ReduceScatterOptions& opts) override;
  IntrusiveWork reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                const c10d::ReduceScatterOptions& opts) override;
  IntrusiveWork alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                              std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& opts) override;
  IntrusiveWork alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) override;
  IntrusiveWork send(Tensors& tensors, int peer, int tag) override;
  IntrusiveWork recv(Tensors& tensors, int peer, int tag) override;
  IntrusiveWork recvAnysource(Tensors& tensors, int tag) override;
  IntrusiveWork barrier(const c10d::BarrierOptions& opts) override;
  void monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) override;

  void startCoalescing() override;
  IntrusiveWork endCoalescing() override;

  c10::intrusive_ptr<c10d::Backend> split(const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
                                          const c10::intrusive_ptr<c10d::Backend::Options>& opts) override;

  c10::intrusive_ptr<c10d::Backend> merge(const c10::intrusive_ptr<c10d::Store>& store,
                                          const c10::intrusive_ptr<c10d::Backend::Options>& opts, const int& rank,
                                          const int& size) override;

  bool supportsShrinking() const override { return true; }
  c10::intrusive_ptr<c10d::Backend> shrink(
      const std::vector<int64_t>& excluded, int flags = 0,
      const c10::intrusive_ptr<c10d::Backend::Options>& override = nullptr) override;

  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return checked_group().sequence(); }
  void setTimeout(std::chrono::milliseconds timeout) override;
  void enableCollectivesTiming() override { timed_ = true; }
  void registerOnCompletionHook(std::function<void(std::shared_ptr<c10d::WorkInfo>)>&& hook) override;
  void waitForPendingWorks() override;
  /// For a group that is made with a device_id: opens that device, as the first collective would, on all ranks.
  void eagerConnectSingleDevice(at::Device device) override;
  c10d::ErrorType getError() override;
  /// Whether allocateTensor() has memory that kernels need no staging for. Does not ask the other ranks.
  bool supportsTensorAlloc(c10::DeviceIndex device) override;
  at::Tensor allocateTensor(long size, at::TensorOptions options) override;  // NOLINT: torch's type
  void abort() override;
  void shutdown() override;
  /// abort() without its hooks: what is called off for this reason is no failure.
  void call_off(const std::string& why);
  /// Waits until what proxies have begun has ended, and says what has gone wrong with it, if nobody has heard that.
  void see_off_proxies(const Deadline& deadline);
  static constexpr std::chrono::seconds kMostForProxies{5};

#ifdef C10D_BACKEND_HAS_HOOKS
  IntrusiveWork gather_single(at::Tensor& output, at::Tensor& input, const c10d::GatherOptions& opts) override;
  void addEphemeralTimeout(const std::chrono::milliseconds& timeout) override;
  void registerAbortHook(int64_t id, c10d::AbortHook hook) override;
  void unregisterAbortHook(int64_t id) override;
#endif
#ifdef C10D_BACKEND_HAS_RECONFIGURE
  /// These two say how to make a group that has them: see reconfigurable.h.
  std::string get_reconfigure_handle() const override;
  IntrusiveWork reconfigure(const c10d::ReconfigureOptions& opts) override;
#endif
#ifdef C10D_BACKEND_HAS_WINDOW
  /// One-sided writes to tensors of the CPU: see window.h.
  bool supportsWindow() const override { return true; }
  c10::intrusive_ptr<c10d::Window> new_window(const std::optional<at::Tensor>& tensor = std::nullopt) override;
#endif
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 15
  bool supportsAbortHooks() const override { return true; }
  bool supportsCompletionHooks() const override { return true; }
  void registerCompletionHook(int64_t id, c10d::CompletionHook hook) override;
  void unregisterCompletionHook(int64_t id) override;
#endif

  Group& group() { return *group_; }
  /// What the group's kernels say of the pools of memory; nothing where there are no kernels.
  std::optional<PoolStats> pool_stats();
  /// group(), and the group of devices' tensors where there is one.
  std::vector<std::shared_ptr<Group>> groups() const;

 private:
  struct Kind {
    c10d::OpType type;
    const char* title;          ///< "nvx:all_reduce"
    size_t lists = 0;           ///< in how many lists of one length a future has the outputs; 0: in one, as they are
    at::IntArrayRef give = {};  ///< the splits that the caller named, for the profiler
    at::IntArrayRef take = {};
  };
  enum class Mode { kAsync, kSync };
  using CompletionHook = std::function<void(std::shared_ptr<c10d::WorkInfo>)>;
  static Mode mode(bool async) { return async ? Mode::kAsync : Mode::kSync; }

  Arguments arguments(const char* name) { return {name, rank_, size_, kernels_.get(), delegate_.get(), proxies()}; }
  /// For a call that is several collectives. None of these is delegated, so that all of them begin alike.
  Arguments arguments_of_several(const char* name) { return {name, rank_, size_, kernels_.get(), nullptr, proxies()}; }
  /// Null where there are none beside a delegate.
  HostProxyPath* proxies() { return delegate_ ? nullptr : &proxies_; }

  // backend_issue.cc. `collectives` are what one call asks for: one operation, or several on tensors of one device.
  /// Every collective comes here. Null where a synchronous call has ended and nobody needs a work.
  IntrusiveWork launch(const Kind& kind, TensorOperations&& collectives, Tensors& outputs, Tensors& inputs,
                       std::chrono::milliseconds timeout, Mode mode);
  IntrusiveWork launch_recorded(const Kind& kind, TensorOperations&& collectives, Tensors& outputs, Tensors& inputs,
                                Mode mode);
  /// Begins them by their route: each route has one of the functions below.
  IntrusiveWork issue(const Kind& kind, TensorOperations&& collectives, const Tensors& outputs, const Tensors& inputs,
                      Mode mode);
  IntrusiveWork issue_in_memory(const Kind& kind, TensorOperations&& collectives, const Tensors& outputs,
                                const Tensors& inputs, Mode mode);
  IntrusiveWork issue_staged(const Kind& kind, TensorOperations&& collectives, const Tensors& outputs,
                             const Tensors& inputs, Mode mode);
  IntrusiveWork issue_in_parts(const Kind& kind, TensorOperations&& collectives, const Tensors& outputs,
                               const Tensors& inputs, Mode mode);
  IntrusiveWork issue_proxied(const Kind& kind, TensorOperations&& collectives, const Tensors& outputs,
                              const Tensors& inputs, Mode mode);
  IntrusiveWork issue_by_kernels(const Kind& kind, TensorOperations&& collectives, const Tensors& outputs,
                                 const Tensors& inputs, Mode mode);
  IntrusiveWork issue_delegated(const Kind& kind, TensorOperations&& collectives, const Tensors& outputs,
                                const Tensors& inputs, Mode mode);
  IntrusiveWork enqueue_staged(const Kind& kind, TensorOperations&& collectives, const Tensors& outputs,
                               const Tensors& inputs);
  IntrusiveWork enqueue_and_wait(const Kind& kind, TensorOperations&& collectives, const Tensors& outputs,
                                 const Tensors& inputs);
  IntrusiveWork put_off_kernels(const Kind& kind, TensorOperations&& collectives, const Tensors& outputs,
                                const Tensors& inputs, std::unique_ptr<StagingCopies> staging);
  IntrusiveWork launch_on_device(const Kind& kind, TensorOperations& collectives, const Tensors& outputs,
                                 const Tensors& inputs, Mode mode, std::unique_ptr<StagingCopies> staging);
  Status begin_on_device(TensorOperations& collectives, StagingCopies& staging, uint64_t* ended_at);
  /// The streams and events of a call whose operations use a device's tensors where they are.
  std::unique_ptr<StagingCopies> on_device(const TensorOperations& collectives, Mode mode);
  /// Whether the call reads or writes memory that pending results will be written to, or that a delegate still uses.
  bool comes_behind(const Tensors& outputs, const Tensors& inputs) {
    return hazards_.awaited_in(inputs) || hazards_.awaited_in(outputs);
  }
  void follow_hazards(const Tensors& tensors, const c10::Stream& stream);
  static std::optional<Tensors> recorded(const Tensors& inputs, Mode mode);
  Status execute(TensorOperations& collectives);
  Status execute_staged(TensorOperations& collectives, StagingCopies& staging);
  void number(TensorOperations& collectives);
  void raise_if_ended_badly(const Status& status);
  /// The work of a synchronous call, which has ended. staging: null where its tensors are the CPU's.
  static IntrusiveWork done(NvxWork::Facts facts, const Tensors& outputs, std::unique_ptr<StagingCopies> staging);
  /// Puts it into a group's lane, which keeps the work, and with it all tensors, until it has run.
  void enqueue(const c10::intrusive_ptr<LaneWork>& work, Lane& lane);
  /// Whether all of a call's operations are proxied. One that is not keeps the others from it.
  bool are_proxied(TensorOperations& collectives);
  std::shared_ptr<ProxyOp> prepare_proxies(TensorOperations&& collectives, const std::shared_ptr<Group>& group,
                                           StagingCopies& staging) REQUIRES(proxies_mutex_);
  Status launch_proxies(const std::shared_ptr<ProxyOp>& call, Group& group, StagingCopies& staging);
  Status leave_to_stream(const std::shared_ptr<ProxyOp>& call, const StagingCopies& staging);
  std::string profiled_as(TensorOperation& c);
  struct Term {
    std::chrono::milliseconds timeout;  ///< 0: the group's
    Extensions::Claim claim;            ///< what the operation keeps until it has ended
  };
  /// given: the timeout that an operation was called with, if any.
  Term term_of(std::chrono::milliseconds given);
  NvxWork::Facts facts(const Kind& kind) { return facts(kind, group_); }
  /// group: whose lane carries it out.
  NvxWork::Facts facts(const Kind& kind, const std::shared_ptr<Group>& group);
  /// The first rank's number in the default group, and the step from each to the next; -1: the steps differ.
  std::pair<int64_t, int64_t> global_ranks();
  bool somebody_listens() const { return listeners_.load(std::memory_order_acquire) != 0; }
  /// Whether a synchronous call, too, must return a work.
  bool needs_work() const { return somebody_listens() || timed_ || c10d::allow_inflight_collective_as_graph_input(); }

  // backend.cc
  /// The group whose lane carries them out.
  const std::shared_ptr<Group>& group_of(const TensorOperations& collectives) EXCLUDES(device_group_mutex_, mutex_);
  /// That of devices' tensors. The first call is a step of all ranks, which makes it.
  const std::shared_ptr<Group>& device_group() EXCLUDES(device_group_mutex_, mutex_);
  c10::intrusive_ptr<c10d::Store> device_store() const;
  /// Raises in a forked child.
  Group& checked_group() const {
    origin_.check(rank_);
    return *group_;
  }

  // backend_collectives.cc
  IntrusiveWork all_reduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts);
  void see_proxies_end(Mode mode, std::chrono::milliseconds most);
  IntrusiveWork all_reduce_sparse_on_host(at::Tensor& tensor, const c10d::AllreduceOptions& opts);

  // backend_messages.cc
#ifdef C10D_BACKEND_HAS_WINDOW
  friend class TensorWindow;
#endif
  /// Begins a message: its peer, tag and memory are there, the timeout is given here. The tensor is kept until the end.
  c10::intrusive_ptr<MessageWork> begin_message(const Kind& kind, const at::Tensor& tensor,
                                                std::shared_ptr<Message> message, std::chrono::milliseconds timeout,
                                                bool receives);
  IntrusiveWork transfer(const Kind& kind, at::Tensor& tensor, int peer, int tag, bool receives);
  IntrusiveWork begin_transfer(const Kind& kind, at::Tensor& tensor, int peer, int tag, bool receives);

  // backend_lifecycle.cc
  c10::intrusive_ptr<c10d::Backend> child(const c10::intrusive_ptr<c10d::Store>& store,
                                          const c10::intrusive_ptr<c10d::Backend::Options>& opts, int rank, int size,
                                          std::vector<uint64_t> global_ranks);
  void tell(NvxWork& work);
  std::optional<HooksBeside> begin_abort_hooks();
  void tell_failure(Code code);

  // backend_coalescing.cc
  /// Whether this thread has a coalescing scope open.
  bool collects() EXCLUDES(mutex_);
  void into_coalescing_scope(const c10::intrusive_ptr<NvxWork>& work) EXCLUDES(mutex_);

  /// What a thread has issued since it began to coalesce. The operations run as ever, and the scope only remembers
  /// them, so that they can be waited for as one. Only kernels may be put off, until something else of the group is
  /// called, or somebody asks for one of them. An exception may leave a scope open for good: therefore it forgets
  /// works that have ended well and that somebody has asked for.
  struct CoalescingScope {
    void add(const c10::intrusive_ptr<NvxWork>& work, std::vector<c10::intrusive_ptr<NvxWork>>& gone);

    std::vector<c10::intrusive_ptr<NvxWork>> works;
    size_t issued = 0;
    size_t most = 64;  ///< so many are kept before it looks which can be forgotten
  };

  const Origin origin_;
  const c10::intrusive_ptr<c10d::Store> store_;
  const std::shared_ptr<Group> group_;
  const NvxWork::Pending pending_ = std::make_shared<std::atomic<int64_t>>(0);
  const std::shared_ptr<Extensions> extensions_ = std::make_shared<Extensions>();
  std::shared_ptr<Group> device_group_;  // written once, under the mutex, before has_device_group_ says so
  std::atomic<bool> has_device_group_{false};
  Mutex device_group_mutex_;
  OwnCommStreams comm_streams_;
  OutputHazards hazards_;
  const std::shared_ptr<PendingSends> pending_sends_ = std::make_shared<PendingSends>(group_);
  const std::shared_ptr<KernelPath> kernels_;
  HostProxyPath proxies_;  // for the group of devices' tensors
  Mutex proxies_mutex_;    // held from an operation's number to its place in the lane, as all ranks have one order
  std::atomic<std::thread::id> proxies_holder_{};  // who has it: a signal handler may run there
  std::shared_ptr<Delegate> delegate_;             // null where NVX_DELEGATE names nothing
  std::atomic<bool> timed_{false};
  std::atomic<int> listeners_{0};
  std::atomic<int> open_scopes_{0};
  std::atomic<bool> has_memory_for_peers_{false};  // a window is registered, or has been
  Mutex mutex_;                                    // never held while a hook runs, is copied or goes
  Options options_ GUARDED_BY(mutex_);
  std::map<std::thread::id, CoalescingScope> scopes_ GUARDED_BY(mutex_);
  struct Child {
    c10::weak_intrusive_ptr<c10d::Store> store;
    std::weak_ptr<Group> group;
  };
  std::map<std::string, Child> children_ GUARDED_BY(mutex_);  // by name
  std::shared_ptr<const CompletionHook> completion_hook_ GUARDED_BY(mutex_);
  Clock::time_point hooked_at_ GUARDED_BY(mutex_);
#ifdef C10D_BACKEND_HAS_HOOKS
  Hooks<c10d::AbortHook> abort_hooks_;
#endif
  std::atomic<bool> failure_told_{false};
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 15
  Hooks<c10d::CompletionHook> completion_hooks_;
#endif
};

}  // namespace nvx
