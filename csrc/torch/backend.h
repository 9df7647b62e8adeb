#pragma once

#include <torch/version.h>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "torch/communicator.h"
#include "torch/core/options.h"

namespace nvx {

struct PoolStats;

/// The torch interface of nvx: forwards c10d's calls to a communicator. A derived class may have one after another.
class ProcessGroupNVX : public c10d::Backend {
 public:
  using Options = NvxOptions;

  ProcessGroupNVX(c10::intrusive_ptr<c10d::Store> store, int rank, int size, c10::intrusive_ptr<Options> options);
  /// For a group that exists already.
  ProcessGroupNVX(c10::intrusive_ptr<c10d::Store> store, std::shared_ptr<Group> group, const Options& options);

  const std::string getBackendName() const override { return "nvx"; }
  c10::intrusive_ptr<c10d::Backend::Options> getBackendOptions() override {
    return c10::make_intrusive<Options>(
        active()->context.groups.options());  // a copy, because torch changes its options
  }
  bool supportsSplitting() const override { return true; }
  bool supportsCoalescing() const override { return true; }

  IntrusiveWork broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) override;
  IntrusiveWork allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) override;
  IntrusiveWork allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts) override {
    return allreduce(tensors, opts);
  }
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
  IntrusiveWork send(Tensors& tensors, int peer, int tag) override {
    return active()->messages.send(tensors, peer, tag);
  }
  IntrusiveWork recv(Tensors& tensors, int peer, int tag) override {
    return active()->messages.receive(tensors, peer, tag);
  }
  IntrusiveWork recvAnysource(Tensors& tensors, int tag) override {
    return active()->messages.receive_any(tensors, tag);
  }
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
  uint64_t getSequenceNumberForGroup() override {
    const auto current = active_or_null();
    return current ? current->group().sequence() : 0;
  }
  void setTimeout(std::chrono::milliseconds timeout) override { active()->context.groups.set_timeout(timeout); }
  void enableCollectivesTiming() override { listeners_.timed = true; }
  void registerOnCompletionHook(std::function<void(std::shared_ptr<c10d::WorkInfo>)>&& hook) override;
  void waitForPendingWorks() override {
    if (const auto current = active_or_null()) current->wait_for_pending_works();
  }
  /// For a group that is made with a device_id: opens that device on all ranks, as the first collective would.
  void eagerConnectSingleDevice(at::Device device) override { active()->connect(device); }
  c10d::ErrorType getError() override { return active()->error(); }
  /// Whether allocateTensor()'s memory is used without staging. A local call. -1: of the CPU.
  bool supportsTensorAlloc(c10::DeviceIndex device) override {
    const auto current = active_or_null();
    return current && current->has_memory_of(device);
  }
  at::Tensor allocateTensor(long size, at::TensorOptions options) override;  // NOLINT: torch's type
  /// torch calls these two when a group is destroyed in a forked child, too.
  void abort() override { only_->abort(); }
  void shutdown() override { only_->shut_down(); }

#ifdef C10D_BACKEND_HAS_HOOKS
  /// torch's own versions of these five forward to the old names, but refuse a second call of one name on a thread: a
  /// signal handler, or a callback that a waiting call runs, could not call the collective that it is inside of.
  IntrusiveWork all_gather_single(at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& opts) override {
    return _allgather_base(output, input, opts);
  }
  IntrusiveWork all_gather_single_coalesced(Tensors& outputs, Tensors& inputs,
                                            const c10d::AllgatherOptions& opts) override {
    return allgather_into_tensor_coalesced(outputs, inputs, opts);
  }
  IntrusiveWork reduce_scatter_single(at::Tensor& output, at::Tensor& input,
                                      const c10d::ReduceScatterOptions& opts) override {
    return _reduce_scatter_base(output, input, opts);
  }
  IntrusiveWork reduce_scatter_single_coalesced(Tensors& outputs, Tensors& inputs,
                                                const c10d::ReduceScatterOptions& opts) override {
    return reduce_scatter_tensor_coalesced(outputs, inputs, opts);
  }
  IntrusiveWork all_to_all_single(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                                  std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& opts) override {
    return alltoall_base(output, input, output_splits, input_splits, opts);
  }
  IntrusiveWork gather_single(at::Tensor& output, at::Tensor& input, const c10d::GatherOptions& opts) override;
  void addEphemeralTimeout(const std::chrono::milliseconds& timeout) override {
    if (const auto current = active_or_null()) current->context.extensions->add(timeout);  // torch ignores the others
  }
  void registerAbortHook(int64_t id, c10d::AbortHook hook) override {
    check_process();
    listeners_.put_abort_hook(id, std::move(hook));
  }
  void unregisterAbortHook(int64_t id) override {
    if (!origin_.elsewhere()) listeners_.drop_abort_hook(id);
  }
#endif
#ifdef C10D_BACKEND_HAS_RECONFIGURE
  /// These two describe how to make a group that supports them: see `reconfigurable.h`.
  std::string get_reconfigure_handle() const override;
  IntrusiveWork reconfigure(const c10d::ReconfigureOptions& opts) override;
#endif
#ifdef C10D_BACKEND_HAS_WINDOW
  /// One-sided writes to CPU tensors: see `window.cc`.
  bool supportsWindow() const override { return true; }
  c10::intrusive_ptr<c10d::Window> new_window(const std::optional<at::Tensor>& tensor = std::nullopt) override;
#endif
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 15
  bool supportsAbortHooks() const override { return true; }
  bool supportsCompletionHooks() const override { return true; }
  void registerCompletionHook(int64_t id, c10d::CompletionHook hook) override {
    check_process();
    listeners_.put_completion_hook(id, std::move(hook));
  }
  void unregisterCompletionHook(int64_t id) override {
    if (!origin_.elsewhere()) listeners_.drop_completion_hook(id);
  }
#endif

  /// The communicator that runs a call, for more than c10d's calls, with a reference. Raises in a forked child.
  std::shared_ptr<Communicator> communicator() const { return active()->shared_from_this(); }
  /// The statistics of the kernels' memory pools; none without kernels.
  std::optional<PoolStats> pool_stats();

 protected:
  /// Null if there is no communicator.
  using Current = std::shared_ptr<Communicator>;

  /// For a derived class, which has no communicator yet.
  ProcessGroupNVX(int rank, int size);
  /// The communicator that runs a call. Never null. Raises in a forked child.
  virtual Current active() const { return active_or_null(); }
  /// The communicator that there is. Raises in a forked child.
  virtual Current active_or_null() const;
  void check_process() const { origin_.check(published_rank_); }

  const Origin origin_;
  std::atomic<int> published_rank_;  ///< `rank_`, for threads that do not wait for each other
  Listeners listeners_{*this};

 private:
  const Current only_;  // null in a derived class
};

}  // namespace nvx
