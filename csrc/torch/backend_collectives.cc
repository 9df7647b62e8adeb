// c10d's collectives: converts tensors and options to operations, which the Issuer begins.

#include "torch/arguments/overlaps.h"
#include "torch/backend.h"
#include "torch/core/interrupt.h"
#include "torch/sparse_call.h"

namespace nvx {
namespace {

Mode mode(bool async) { return async ? Mode::kAsync : Mode::kSync; }

}  // namespace

c10::intrusive_ptr<c10d::Work> ProcessGroupNVX::broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) {
  const Arguments args = issuer_.arguments("ProcessGroupNVX::broadcast");
  return issuer_.launch({c10d::OpType::BROADCAST, "nvx:broadcast"},
                        one(args.broadcast(tensors, opts.rootRank, opts.rootTensor)), tensors, tensors, opts.timeout,
                        mode(opts.asyncOp));
}

c10::intrusive_ptr<c10d::Work> ProcessGroupNVX::allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  const Arguments args = issuer_.arguments("ProcessGroupNVX::allreduce");
  if (!tensors.empty() && tensors[0].defined() && tensors[0].layout() == at::kSparse)
    return all_reduce_sparse(context_, args, tensors, opts);
  return issuer_.launch({c10d::OpType::ALLREDUCE, "nvx:all_reduce"}, one(args.all_reduce(tensors, opts.reduceOp)),
                        tensors, tensors, opts.timeout, mode(opts.asyncOp));
}

c10::intrusive_ptr<c10d::Work> ProcessGroupNVX::allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  return allreduce(tensors, opts);
}

c10::intrusive_ptr<c10d::Work> ProcessGroupNVX::allreduce_coalesced(Tensors& tensors,
                                                                    const c10d::AllreduceCoalescedOptions& opts) {
  const Arguments args = issuer_.arguments_of_several("ProcessGroupNVX::allreduce_coalesced");
  args.check_reduced(tensors);
  const std::vector<bool> again = use_memory_again(tensors);
  TensorOperations all;
  for (size_t i = 0; i < tensors.size(); ++i) all.push_back(args.all_reduce(tensors[i], opts.reduceOp, again[i]));
  return issuer_.launch({c10d::OpType::ALLREDUCE_COALESCED, "nvx:all_reduce"}, std::move(all), tensors, tensors,
                        opts.timeout, mode(opts.asyncOp));
}

c10::intrusive_ptr<c10d::Work> ProcessGroupNVX::reduce(Tensors& tensors, const c10d::ReduceOptions& opts) {
  const Arguments args = issuer_.arguments("ProcessGroupNVX::reduce");
  if (opts.rootTensor != 0) args.invalid("invalid root tensor: " + std::to_string(opts.rootTensor));
  return issuer_.launch({c10d::OpType::REDUCE, "nvx:reduce"},
                        one(args.reduce(args.single(tensors), opts.reduceOp, opts.rootRank)), tensors, tensors,
                        opts.timeout, mode(opts.asyncOp));
}

c10::intrusive_ptr<c10d::Work> ProcessGroupNVX::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                                          const c10d::AllgatherOptions& opts) {
  const Arguments args = issuer_.arguments("ProcessGroupNVX::allgather");
  TensorOperation c = args.all_gather(outputs, inputs);
  const bool several = outputs.size() > 1;
  Tensors flat;
  if (several) {
    for (const Tensors& list : outputs) flat.insert(flat.end(), list.begin(), list.end());
  }
  return issuer_.launch({c10d::OpType::ALLGATHER, "nvx:all_gather", several ? outputs.size() : 0}, one(std::move(c)),
                        several ? flat : outputs[0], inputs, opts.timeout, mode(opts.asyncOp));
}

c10::intrusive_ptr<c10d::Work> ProcessGroupNVX::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                                const c10d::AllgatherOptions& opts) {
  const Arguments args = issuer_.arguments("ProcessGroupNVX::_allgather_base");
  Tensors outputs{output}, inputs{input};
  return issuer_.launch({c10d::OpType::_ALLGATHER_BASE, "nvx:_all_gather_base"},
                        one(args.all_gather_base(output, input)), outputs, inputs, opts.timeout, mode(opts.asyncOp));
}

c10::intrusive_ptr<c10d::Work> ProcessGroupNVX::allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                                                    const c10d::AllgatherOptions& opts) {
  const Arguments args = issuer_.arguments_of_several("ProcessGroupNVX::allgather_coalesced");
  args.check_coalesced(outputs, inputs);
  TensorOperations all;
  Tensors flat;
  for (size_t i = 0; i < inputs.size(); ++i) {
    Tensors column;
    for (const Tensors& list : outputs) column.push_back(list[i]);
    all.push_back(args.all_gather(column, inputs[i]));
  }
  for (const Tensors& list : outputs) flat.insert(flat.end(), list.begin(), list.end());
  return issuer_.launch({c10d::OpType::ALLGATHER_COALESCED, "nvx:all_gather", outputs.size()}, std::move(all), flat,
                        inputs, opts.timeout, mode(opts.asyncOp));
}

c10::intrusive_ptr<c10d::Work> ProcessGroupNVX::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                                                const c10d::AllgatherOptions& opts) {
  const Arguments args = issuer_.arguments_of_several("ProcessGroupNVX::allgather_into_tensor_coalesced");
  args.check_same_length(outputs.size(), inputs.size());
  TensorOperations all;
  for (size_t i = 0; i < inputs.size(); ++i) all.push_back(args.all_gather_base(outputs[i], inputs[i]));
  return issuer_.launch({c10d::OpType::ALLGATHER_COALESCED, "nvx:_all_gather_base"}, std::move(all), outputs, inputs,
                        opts.timeout, mode(opts.asyncOp));
}

c10::intrusive_ptr<c10d::Work> ProcessGroupNVX::gather(std::vector<Tensors>& outputs, Tensors& inputs,
                                                       const c10d::GatherOptions& opts) {
  const Arguments args = issuer_.arguments("ProcessGroupNVX::gather");
  args.check_single(inputs, "input ");
  TensorOperation c = args.gather(outputs, inputs[0], opts.rootRank);
  Tensors none;
  Tensors& flat = outputs.empty() ? none : outputs[0];
  return issuer_.launch({c10d::OpType::GATHER, "nvx:gather"}, one(std::move(c)), flat, inputs, opts.timeout,
                        mode(opts.asyncOp));
}

c10::intrusive_ptr<c10d::Work> ProcessGroupNVX::scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                                        const c10d::ScatterOptions& opts) {
  const Arguments args = issuer_.arguments("ProcessGroupNVX::scatter");
  args.check_single(outputs, "output ");
  TensorOperation c = args.scatter(outputs[0], inputs, opts.rootRank);
  Tensors none;
  Tensors& flat = inputs.empty() ? none : inputs[0];
  return issuer_.launch({c10d::OpType::SCATTER, "nvx:scatter"}, one(std::move(c)), outputs, flat, opts.timeout,
                        mode(opts.asyncOp));
}

c10::intrusive_ptr<c10d::Work> ProcessGroupNVX::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                                               const c10d::ReduceScatterOptions& opts) {
  const Arguments args = issuer_.arguments("ProcessGroupNVX::reduce_scatter");
  args.check_single(outputs, "output ");
  args.check_same_length(outputs.size(), inputs.size());
  return issuer_.launch({c10d::OpType::REDUCE_SCATTER, "nvx:reduce_scatter"},
                        one(args.reduce_scatter(outputs[0], inputs[0], opts.reduceOp)), outputs, inputs[0],
                        opts.timeout, mode(opts.asyncOp));
}

c10::intrusive_ptr<c10d::Work> ProcessGroupNVX::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                                     const c10d::ReduceScatterOptions& opts) {
  const Arguments args = issuer_.arguments("ProcessGroupNVX::_reduce_scatter_base");
  Tensors outputs{output}, inputs{input};
  return issuer_.launch({c10d::OpType::_REDUCE_SCATTER_BASE, "nvx:_reduce_scatter_base"},
                        one(args.reduce_scatter_base(output, input, opts.reduceOp)), outputs, inputs, opts.timeout,
                        mode(opts.asyncOp));
}

c10::intrusive_ptr<c10d::Work> ProcessGroupNVX::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& opts) {
  const Arguments args = issuer_.arguments_of_several("ProcessGroupNVX::reduce_scatter_tensor_coalesced");
  args.check_same_length(outputs.size(), inputs.size());
  TensorOperations all;
  for (size_t i = 0; i < inputs.size(); ++i)
    all.push_back(args.reduce_scatter_base(outputs[i], inputs[i], opts.reduceOp));
  return issuer_.launch({c10d::OpType::REDUCE_SCATTER, "nvx:_reduce_scatter_base"}, std::move(all), outputs, inputs,
                        opts.timeout, mode(opts.asyncOp));
}

c10::intrusive_ptr<c10d::Work> ProcessGroupNVX::alltoall_base(at::Tensor& output, at::Tensor& input,
                                                              std::vector<int64_t>& output_splits,
                                                              std::vector<int64_t>& input_splits,
                                                              const c10d::AllToAllOptions& opts) {
  const Arguments args = issuer_.arguments("ProcessGroupNVX::alltoall_base");
  Tensors outputs{output}, inputs{input};
  return issuer_.launch({c10d::OpType::ALLTOALL_BASE, "nvx:all_to_all", 0, input_splits, output_splits},
                        one(args.all_to_all_base(output, input, output_splits, input_splits)), outputs, inputs,
                        opts.timeout, mode(opts.asyncOp));
}

c10::intrusive_ptr<c10d::Work> ProcessGroupNVX::alltoall(Tensors& outputs, Tensors& inputs,
                                                         const c10d::AllToAllOptions& opts) {
  const Arguments args = issuer_.arguments("ProcessGroupNVX::alltoall");
  return issuer_.launch({c10d::OpType::ALLTOALL, "nvx:all_to_all"}, one(args.all_to_all(outputs, inputs)), outputs,
                        inputs, opts.timeout, mode(opts.asyncOp));
}

c10::intrusive_ptr<c10d::Work> ProcessGroupNVX::barrier(const c10d::BarrierOptions& opts) {
  return issuer_.barrier(opts, mode(opts.asyncOp));
}

void ProcessGroupNVX::monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) {
  Group& group = context_.checked_group();
  if (const auto device = device_in_use()) refuse_capture(*device);
  const auto timeout = opts.timeout == c10d::kUnsetTimeout ? group.timeout() : opts.timeout;
  const Status status = group.monitored_barrier(timeout, wait_all_ranks);
  if (!status.ok()) raise(status);
  raise_interrupt();
}

#ifdef C10D_BACKEND_HAS_HOOKS

c10::intrusive_ptr<c10d::Work> ProcessGroupNVX::gather_single(at::Tensor& output, at::Tensor& input,
                                                              const c10d::GatherOptions& opts) {
  TensorOperation c = issuer_.arguments("ProcessGroupNVX::gather_single").gather_base(output, input, opts.rootRank);
  Tensors inputs{input}, outputs;
  if (opts.rootRank == rank_) outputs.push_back(output);
  return issuer_.launch({c10d::OpType::GATHER, "nvx:gather"}, one(std::move(c)), outputs, inputs, opts.timeout,
                        mode(opts.asyncOp));
}

#endif

}  // namespace nvx
