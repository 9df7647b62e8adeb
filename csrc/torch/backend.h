#pragma once

#include <torch/version.h>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "torch/call.h"
#include "torch/children.h"
#include "torch/core/options.h"
#include "torch/issuer.h"
#include "torch/messages.h"

namespace nvx {

struct PoolStats;

/// The torch interface of nvx: forwards c10d's calls to the classes that run them.
class ProcessGroupNVX final : public c10d::Backend {
 public:
  using Options = NvxOptions;

  ProcessGroupNVX(c10::intrusive_ptr<c10d::Store> store, int rank, int size, c10::intrusive_ptr<Options> options);
  /// For a group that exists already.
  ProcessGroupNVX(c10::intrusive_ptr<c10d::Store> store, std::shared_ptr<Group> group, const Options& options);
  ~ProcessGroupNVX() override;

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
  uint64_t getSequenceNumberForGroup() override { return context_.checked_group().sequence(); }
  void setTimeout(std::chrono::milliseconds timeout) override;
  void enableCollectivesTiming() override { context_.timed = true; }
  void registerOnCompletionHook(std::function<void(std::shared_ptr<c10d::WorkInfo>)>&& hook) override;
  void waitForPendingWorks() override;
  /// For a group that is made with a device_id: opens that device on all ranks, as the first collective would.
  void eagerConnectSingleDevice(at::Device device) override;
  c10d::ErrorType getError() override;
  /// Whether allocateTensor() returns memory that kernels use without staging. Does not ask the other ranks.
  bool supportsTensorAlloc(c10::DeviceIndex device) override;
  at::Tensor allocateTensor(long size, at::TensorOptions options) override;  // NOLINT: torch's type
  void abort() override;
  void shutdown() override;
  /// abort() without its hooks: an operation that is aborted for this reason has not failed.
  void call_off(const std::string& why);
  /// Waits until all proxies have ended, and logs a failure that no call has raised.
  void see_off_proxies(const Deadline& deadline) { issuer_.see_off(deadline); }
  static constexpr std::chrono::seconds kMostForProxies{5};

#ifdef C10D_BACKEND_HAS_HOOKS
  IntrusiveWork gather_single(at::Tensor& output, at::Tensor& input, const c10d::GatherOptions& opts) override;
  void addEphemeralTimeout(const std::chrono::milliseconds& timeout) override;
  void registerAbortHook(int64_t id, c10d::AbortHook hook) override;
  void unregisterAbortHook(int64_t id) override;
#endif
#ifdef C10D_BACKEND_HAS_RECONFIGURE
  /// These two describe how to make a group that supports them: see `reconfigurable.h`.
  std::string get_reconfigure_handle() const override;
  IntrusiveWork reconfigure(const c10d::ReconfigureOptions& opts) override;
#endif
#ifdef C10D_BACKEND_HAS_WINDOW
  /// One-sided writes to CPU tensors: see `window.h`.
  bool supportsWindow() const override { return true; }
  c10::intrusive_ptr<c10d::Window> new_window(const std::optional<at::Tensor>& tensor = std::nullopt) override;
#endif
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 15
  bool supportsAbortHooks() const override { return true; }
  bool supportsCompletionHooks() const override { return true; }
  void registerCompletionHook(int64_t id, c10d::CompletionHook hook) override;
  void unregisterCompletionHook(int64_t id) override;
#endif

  Group& group() { return context_.group(); }
  /// Raises in a forked child.
  Group& checked_group() const { return context_.checked_group(); }
  Messages& messages() { return messages_; }
  /// From now on peers may write to this rank's memory at any time.
  void has_memory_for_peers() { has_memory_for_peers_ = true; }
  /// The statistics of the kernels' memory pools; none without kernels.
  std::optional<PoolStats> pool_stats();
  /// group(), and the group of devices' tensors if it exists.
  std::vector<std::shared_ptr<Group>> groups() const { return context_.groups.all(); }

 private:
  c10::intrusive_ptr<c10d::Backend> child(const c10::intrusive_ptr<c10d::Store>& store, Options options, int rank,
                                          int size);

  CallContext context_;
  Issuer issuer_{context_};
  Messages messages_{context_};
  Children children_;
  std::atomic<bool> has_memory_for_peers_{false};  // a window is or was registered
};

}  // namespace nvx
