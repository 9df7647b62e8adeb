// c10d's collectives: converts tensors and options to operations, which the Issuer begins.

#include "torch/arguments/overlaps.h"
#include "torch/arguments/sparse.h"
#include "torch/backend.h"
#include "torch/core/interrupt.h"

namespace nvx {
namespace {

using c10d::OpType;

Mode mode(bool async) { return async ? Mode::kAsync : Mode::kSync; }

/// A call of c10d: the communicator that runs it, and the conversion of its tensors.
struct Entry {
  /// operations: see Issuer::arguments().
  Entry(std::shared_ptr<Communicator> current, const char* name, Operations operations = Operations::kOne)
      : communicator(std::move(current)), args(communicator->issuer.arguments(name, operations)) {}

  template <class Options>
  IntrusiveWork dispatch(const Kind& kind, std::span<TensorOperation> all, Tensors& outputs, Tensors& inputs,
                         const Options& opts) const {
    return communicator->issuer.dispatch(kind, all, outputs, inputs, {opts.timeout, mode(opts.asyncOp)});
  }
  template <class Options>
  IntrusiveWork dispatch(const Kind& kind, TensorOperation&& c, Tensors& outputs, Tensors& inputs,
                         const Options& opts) const {
    return dispatch(kind, {&c, 1}, outputs, inputs, opts);
  }

  /// Which operations of a coalesced call need stand-ins. Checks the tensors first, because it reads their addresses.
  std::vector<bool> apart(const std::vector<at::TensorList>& outputs, const Tensors& inputs) const {
    for (const at::Tensor& tensor : inputs) args.check_tensor(tensor);
    for (const at::TensorList list : outputs) {
      for (const at::Tensor& tensor : list) args.check_tensor(tensor);
    }
    return share_memory(outputs, inputs);
  }

  const std::shared_ptr<Communicator> communicator;
  const Arguments args;
};

Tensors flattened(const std::vector<Tensors>& lists) {
  Tensors flat;
  for (const Tensors& list : lists) flat.insert(flat.end(), list.begin(), list.end());
  return flat;
}

}  // namespace

IntrusiveWork ProcessGroupNVX::broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) {
  const Entry call(active(), "broadcast");
  return call.dispatch({OpType::BROADCAST, "nvx:broadcast"},
                       call.args.broadcast(tensors, opts.rootRank, opts.rootTensor), tensors, tensors, opts);
}

IntrusiveWork ProcessGroupNVX::allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  const Entry call(active(), "all_reduce");
  if (!tensors.empty() && tensors[0].defined() && tensors[0].layout() == at::kSparse)
    return all_reduce_sparse(call.communicator->context, call.args, tensors, opts);
  return call.dispatch({OpType::ALLREDUCE, "nvx:all_reduce"}, call.args.all_reduce(tensors, opts.reduceOp), tensors,
                       tensors, opts);
}

IntrusiveWork ProcessGroupNVX::allreduce_coalesced(Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) {
  const Entry call(active(), "all_reduce_coalesced", Operations::kSeveral);
  call.args.check_reduced(tensors);
  const std::vector<bool> apart = share_memory({tensors.begin(), tensors.end()}, tensors);
  TensorOperations all;
  for (size_t i = 0; i < tensors.size(); ++i) all.push_back(call.args.all_reduce(tensors[i], opts.reduceOp, apart[i]));
  return call.dispatch({OpType::ALLREDUCE_COALESCED, "nvx:all_reduce"}, all, tensors, tensors, opts);
}

IntrusiveWork ProcessGroupNVX::reduce(Tensors& tensors, const c10d::ReduceOptions& opts) {
  const Entry call(active(), "reduce");
  if (opts.rootTensor != 0) call.args.invalid("invalid root tensor: " + std::to_string(opts.rootTensor));
  return call.dispatch({OpType::REDUCE, "nvx:reduce"},
                       call.args.reduce(call.args.single(tensors), opts.reduceOp, opts.rootRank), tensors, tensors,
                       opts);
}

IntrusiveWork ProcessGroupNVX::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                         const c10d::AllgatherOptions& opts) {
  const Entry call(active(), "all_gather");
  TensorOperation c = call.args.all_gather(outputs, inputs);
  const bool several = outputs.size() > 1;
  Tensors flat = several ? flattened(outputs) : Tensors();
  return call.dispatch({OpType::ALLGATHER, "nvx:all_gather", several ? outputs.size() : 0}, std::move(c),
                       several ? flat : outputs[0], inputs, opts);
}

IntrusiveWork ProcessGroupNVX::_allgather_base(at::Tensor& output, at::Tensor& input,
                                               const c10d::AllgatherOptions& opts) {
  const Entry call(active(), "all_gather_into_tensor");
  Tensors outputs{output}, inputs{input};
  return call.dispatch({OpType::_ALLGATHER_BASE, "nvx:_all_gather_base"}, call.args.all_gather_base(output, input),
                       outputs, inputs, opts);
}

IntrusiveWork ProcessGroupNVX::allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                                   const c10d::AllgatherOptions& opts) {
  const Entry call(active(), "all_gather_coalesced", Operations::kSeveral);
  call.args.check_coalesced(outputs, inputs);
  std::vector<Tensors> columns(inputs.size());
  for (size_t i = 0; i < inputs.size(); ++i) {
    for (const Tensors& list : outputs) columns[i].push_back(list[i]);
  }
  const std::vector<bool> apart = call.apart({columns.begin(), columns.end()}, inputs);
  TensorOperations all;
  for (size_t i = 0; i < inputs.size(); ++i) all.push_back(call.args.all_gather(columns[i], inputs[i], apart[i]));
  Tensors flat = flattened(outputs);
  const size_t lists = outputs.size() > 1 ? outputs.size() : 0;
  return call.dispatch({OpType::ALLGATHER_COALESCED, "nvx:all_gather", lists}, all, flat, inputs, opts);
}

IntrusiveWork ProcessGroupNVX::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                               const c10d::AllgatherOptions& opts) {
  const Entry call(active(), "all_gather_into_tensor_coalesced", Operations::kSeveral);
  call.args.check_same_length(outputs.size(), inputs.size());
  const std::vector<bool> apart = call.apart({outputs.begin(), outputs.end()}, inputs);
  TensorOperations all;
  for (size_t i = 0; i < inputs.size(); ++i) all.push_back(call.args.all_gather_base(outputs[i], inputs[i], apart[i]));
  return call.dispatch({OpType::ALLGATHER_COALESCED, "nvx:_all_gather_base"}, all, outputs, inputs, opts);
}

IntrusiveWork ProcessGroupNVX::gather(std::vector<Tensors>& outputs, Tensors& inputs, const c10d::GatherOptions& opts) {
  const Entry call(active(), "gather");
  call.args.check_single(inputs, "input ");
  TensorOperation c = call.args.gather(outputs, inputs[0], opts.rootRank);
  Tensors none;
  Tensors& flat = outputs.empty() ? none : outputs[0];
  return call.dispatch({OpType::GATHER, "nvx:gather"}, std::move(c), flat, inputs, opts);
}

IntrusiveWork ProcessGroupNVX::scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                       const c10d::ScatterOptions& opts) {
  const Entry call(active(), "scatter");
  call.args.check_single(outputs, "output ");
  TensorOperation c = call.args.scatter(outputs[0], inputs, opts.rootRank);
  Tensors none;
  Tensors& flat = inputs.empty() ? none : inputs[0];
  return call.dispatch({OpType::SCATTER, "nvx:scatter"}, std::move(c), outputs, flat, opts);
}

IntrusiveWork ProcessGroupNVX::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                              const c10d::ReduceScatterOptions& opts) {
  const Entry call(active(), "reduce_scatter");
  call.args.check_single(outputs, "output ");
  call.args.check_same_length(outputs.size(), inputs.size());
  return call.dispatch({OpType::REDUCE_SCATTER, "nvx:reduce_scatter"},
                       call.args.reduce_scatter(outputs[0], inputs[0], opts.reduceOp), outputs, inputs[0], opts);
}

IntrusiveWork ProcessGroupNVX::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                    const c10d::ReduceScatterOptions& opts) {
  const Entry call(active(), "reduce_scatter_tensor");
  Tensors outputs{output}, inputs{input};
  return call.dispatch({OpType::_REDUCE_SCATTER_BASE, "nvx:_reduce_scatter_base"},
                       call.args.reduce_scatter_base(output, input, opts.reduceOp), outputs, inputs, opts);
}

IntrusiveWork ProcessGroupNVX::reduce_scatter_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                               const c10d::ReduceScatterOptions& opts) {
  const Entry call(active(), "reduce_scatter_tensor_coalesced", Operations::kSeveral);
  call.args.check_same_length(outputs.size(), inputs.size());
  const std::vector<bool> apart = call.apart({outputs.begin(), outputs.end()}, inputs);
  TensorOperations all;
  for (size_t i = 0; i < inputs.size(); ++i)
    all.push_back(call.args.reduce_scatter_base(outputs[i], inputs[i], opts.reduceOp, apart[i]));
  return call.dispatch({OpType::REDUCE_SCATTER, "nvx:_reduce_scatter_base"}, all, outputs, inputs, opts);
}

IntrusiveWork ProcessGroupNVX::alltoall_base(at::Tensor& output, at::Tensor& input, std::vector<int64_t>& output_splits,
                                             std::vector<int64_t>& input_splits, const c10d::AllToAllOptions& opts) {
  const Entry call(active(), "all_to_all_single");
  Tensors outputs{output}, inputs{input};
  return call.dispatch({OpType::ALLTOALL_BASE, "nvx:all_to_all", 0, input_splits, output_splits},
                       call.args.all_to_all_base(output, input, output_splits, input_splits), outputs, inputs, opts);
}

IntrusiveWork ProcessGroupNVX::alltoall(Tensors& outputs, Tensors& inputs, const c10d::AllToAllOptions& opts) {
  const Entry call(active(), "all_to_all");
  return call.dispatch({OpType::ALLTOALL, "nvx:all_to_all"}, call.args.all_to_all(outputs, inputs), outputs, inputs,
                       opts);
}

IntrusiveWork ProcessGroupNVX::barrier(const c10d::BarrierOptions& opts) {
  return active()->issuer.barrier(opts, mode(opts.asyncOp));
}

void ProcessGroupNVX::monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) {
  const auto current = active();
  Group& group = current->group();
  if (const auto device = device_in_use(); device && !current->context.barriers_on_host()) refuse_capture(*device);
  auto timeout = opts.timeout;
  if (timeout == c10d::kUnsetTimeout) {
    timeout = group.timeout();
    if (timeout.count() <= 0) timeout = timeout.max();  // the group has none
  } else if (is_no_timeout(timeout)) {
    timeout = timeout.max();
  }
  const Status status = group.monitored_barrier(timeout, wait_all_ranks);
  if (!status.ok()) raise(status);
  raise_interrupt();
}

#ifdef C10D_BACKEND_HAS_HOOKS

IntrusiveWork ProcessGroupNVX::gather_single(at::Tensor& output, at::Tensor& input, const c10d::GatherOptions& opts) {
  const Entry call(active(), "gather_single");
  TensorOperation c = call.args.gather_base(output, input, opts.rootRank);
  Tensors inputs{input}, outputs;
  if (opts.rootRank == call.communicator->context.rank) outputs.push_back(output);
  return call.dispatch({OpType::GATHER, "nvx:gather"}, std::move(c), outputs, inputs, opts);
}

#endif

}  // namespace nvx
