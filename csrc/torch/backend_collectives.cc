// c10d's collectives: from its tensors and options to operations, which backend_issue.cc begins.

#include "memory/driver/beside_captures.h"
#include "torch/arguments/overlaps.h"
#include "torch/arguments/sparse.h"
#include "torch/backend.h"
#include "torch/interrupt.h"

namespace nvx {
namespace {

TensorOperations one(TensorOperation&& c) {
  TensorOperations all;
  all.push_back(std::move(c));
  return all;
}

/// What would fail in the middle of the operation, where the other ranks wait for this one.
void check_sparse(const Arguments& args, const std::vector<at::Tensor>& tensors) {
  const std::string type = c10::toString(tensors[0].scalar_type());
  if (!can_coalesce(tensors[0].scalar_type())) {
    args.invalid_type("Cannot use ReduceOp.SUM with sparse " + type +
                      " inputs: torch cannot coalesce them; convert them to another type first");
  }
  for (const at::Tensor& tensor : tensors) {
    if (tensor.sparse_dim() != tensors[0].sparse_dim())
      args.invalid("sparse tensors of one list must have the same number of sparse dimensions");
  }
}

}  // namespace

c10::intrusive_ptr<c10d::Work> ProcessGroupNVX::broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) {
  const Arguments args = arguments("ProcessGroupNVX::broadcast");
  return launch({c10d::OpType::BROADCAST, "nvx:broadcast"},
                one(args.broadcast(tensors, opts.rootRank, opts.rootTensor)), tensors, tensors, opts.timeout,
                mode(opts.asyncOp));
}

c10::intrusive_ptr<c10d::Work> ProcessGroupNVX::allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  const Arguments args = arguments("ProcessGroupNVX::allreduce");
  if (!tensors.empty() && tensors[0].defined() && tensors[0].layout() == at::kSparse)
    return all_reduce_sparse(tensors, opts);
  return launch({c10d::OpType::ALLREDUCE, "nvx:all_reduce"}, one(args.all_reduce(tensors, opts.reduceOp)), tensors,
                tensors, opts.timeout, mode(opts.asyncOp));
}

c10::intrusive_ptr<c10d::Work> ProcessGroupNVX::allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  return allreduce(tensors, opts);
}

c10::intrusive_ptr<c10d::Work> ProcessGroupNVX::allreduce_coalesced(Tensors& tensors,
                                                                    const c10d::AllreduceCoalescedOptions& opts) {
  const Arguments args = arguments_of_several("ProcessGroupNVX::allreduce_coalesced");
  args.check_reduced(tensors);
  const std::vector<bool> again = use_memory_again(tensors);
  TensorOperations all;
  for (size_t i = 0; i < tensors.size(); ++i) all.push_back(args.all_reduce(tensors[i], opts.reduceOp, again[i]));
  return launch({c10d::OpType::ALLREDUCE_COALESCED, "nvx:all_reduce"}, std::move(all), tensors, tensors, opts.timeout,
                mode(opts.asyncOp));
}

c10::intrusive_ptr<c10d::Work> ProcessGroupNVX::reduce(Tensors& tensors, const c10d::ReduceOptions& opts) {
  const Arguments args = arguments("ProcessGroupNVX::reduce");
  if (opts.rootTensor != 0) args.invalid("invalid root tensor: " + std::to_string(opts.rootTensor));
  return launch({c10d::OpType::REDUCE, "nvx:reduce"},
                one(args.reduce(args.single(tensors), opts.reduceOp, opts.rootRank)), tensors, tensors, opts.timeout,
                mode(opts.asyncOp));
}

c10::intrusive_ptr<c10d::Work> ProcessGroupNVX::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                                          const c10d::AllgatherOptions& opts) {
  const Arguments args = arguments("ProcessGroupNVX::allgather");
  TensorOperation c = args.all_gather(outputs, inputs);
  const bool several = outputs.size() > 1;
  Tensors flat;
  if (several) {
    for (const Tensors& list : outputs) flat.insert(flat.end(), list.begin(), list.end());
  }
  return launch({c10d::OpType::ALLGATHER, "nvx:all_gather", several ? outputs.size() : 0}, one(std::move(c)),
                several ? flat : outputs[0], inputs, opts.timeout, mode(opts.asyncOp));
}

c10::intrusive_ptr<c10d::Work> ProcessGroupNVX::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                                const c10d::AllgatherOptions& opts) {
  const Arguments args = arguments("ProcessGroupNVX::_allgather_base");
  Tensors outputs{output}, inputs{input};
  return launch({c10d::OpType::_ALLGATHER_BASE, "nvx:_all_gather_base"}, one(args.all_gather_base(output, input)),
                outputs, inputs, opts.timeout, mode(opts.asyncOp));
}

c10::intrusive_ptr<c10d::Work> ProcessGroupNVX::allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                                                    const c10d::AllgatherOptions& opts) {
  const Arguments args = arguments_of_several("ProcessGroupNVX::allgather_coalesced");
  args.check_coalesced(outputs, inputs);
  TensorOperations all;
  Tensors flat;
  for (size_t i = 0; i < inputs.size(); ++i) {
    Tensors column;
    for (const Tensors& list : outputs) column.push_back(list[i]);
    all.push_back(args.all_gather(column, inputs[i]));
  }
  for (const Tensors& list : outputs) flat.insert(flat.end(), list.begin(), list.end());
  return launch({c10d::OpType::ALLGATHER_COALESCED, "nvx:all_gather", outputs.size()}, std::move(all), flat, inputs,
                opts.timeout, mode(opts.asyncOp));
}

c10::intrusive_ptr<c10d::Work> ProcessGroupNVX::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                                                const c10d::AllgatherOptions& opts) {
  const Arguments args = arguments_of_several("ProcessGroupNVX::allgather_into_tensor_coalesced");
  args.check_same_length(outputs.size(), inputs.size());
  TensorOperations all;
  for (size_t i = 0; i < inputs.size(); ++i) all.push_back(args.all_gather_base(outputs[i], inputs[i]));
  return launch({c10d::OpType::ALLGATHER_COALESCED, "nvx:_all_gather_base"}, std::move(all), outputs, inputs,
                opts.timeout, mode(opts.asyncOp));
}

c10::intrusive_ptr<c10d::Work> ProcessGroupNVX::gather(std::vector<Tensors>& outputs, Tensors& inputs,
                                                       const c10d::GatherOptions& opts) {
  const Arguments args = arguments("ProcessGroupNVX::gather");
  args.check_single(inputs, "input ");
  TensorOperation c = args.gather(outputs, inputs[0], opts.rootRank);
  Tensors none;
  Tensors& flat = outputs.empty() ? none : outputs[0];
  return launch({c10d::OpType::GATHER, "nvx:gather"}, one(std::move(c)), flat, inputs, opts.timeout,
                mode(opts.asyncOp));
}

c10::intrusive_ptr<c10d::Work> ProcessGroupNVX::scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                                        const c10d::ScatterOptions& opts) {
  const Arguments args = arguments("ProcessGroupNVX::scatter");
  args.check_single(outputs, "output ");
  TensorOperation c = args.scatter(outputs[0], inputs, opts.rootRank);
  Tensors none;
  Tensors& flat = inputs.empty() ? none : inputs[0];
  return launch({c10d::OpType::SCATTER, "nvx:scatter"}, one(std::move(c)), outputs, flat, opts.timeout,
                mode(opts.asyncOp));
}

c10::intrusive_ptr<c10d::Work> ProcessGroupNVX::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                                               const c10d::ReduceScatterOptions& opts) {
  const Arguments args = arguments("ProcessGroupNVX::reduce_scatter");
  args.check_single(outputs, "output ");
  args.check_same_length(outputs.size(), inputs.size());
  return launch({c10d::OpType::REDUCE_SCATTER, "nvx:reduce_scatter"},
                one(args.reduce_scatter(outputs[0], inputs[0], opts.reduceOp)), outputs, inputs[0], opts.timeout,
                mode(opts.asyncOp));
}

c10::intrusive_ptr<c10d::Work> ProcessGroupNVX::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                                     const c10d::ReduceScatterOptions& opts) {
  const Arguments args = arguments("ProcessGroupNVX::_reduce_scatter_base");
  Tensors outputs{output}, inputs{input};
  return launch({c10d::OpType::_REDUCE_SCATTER_BASE, "nvx:_reduce_scatter_base"},
                one(args.reduce_scatter_base(output, input, opts.reduceOp)), outputs, inputs, opts.timeout,
                mode(opts.asyncOp));
}

c10::intrusive_ptr<c10d::Work> ProcessGroupNVX::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& opts) {
  const Arguments args = arguments_of_several("ProcessGroupNVX::reduce_scatter_tensor_coalesced");
  args.check_same_length(outputs.size(), inputs.size());
  TensorOperations all;
  for (size_t i = 0; i < inputs.size(); ++i)
    all.push_back(args.reduce_scatter_base(outputs[i], inputs[i], opts.reduceOp));
  return launch({c10d::OpType::REDUCE_SCATTER, "nvx:_reduce_scatter_base"}, std::move(all), outputs, inputs,
                opts.timeout, mode(opts.asyncOp));
}

c10::intrusive_ptr<c10d::Work> ProcessGroupNVX::alltoall_base(at::Tensor& output, at::Tensor& input,
                                                              std::vector<int64_t>& output_splits,
                                                              std::vector<int64_t>& input_splits,
                                                              const c10d::AllToAllOptions& opts) {
  const Arguments args = arguments("ProcessGroupNVX::alltoall_base");
  Tensors outputs{output}, inputs{input};
  return launch({c10d::OpType::ALLTOALL_BASE, "nvx:all_to_all", 0, input_splits, output_splits},
                one(args.all_to_all_base(output, input, output_splits, input_splits)), outputs, inputs, opts.timeout,
                mode(opts.asyncOp));
}

c10::intrusive_ptr<c10d::Work> ProcessGroupNVX::alltoall(Tensors& outputs, Tensors& inputs,
                                                         const c10d::AllToAllOptions& opts) {
  const Arguments args = arguments("ProcessGroupNVX::alltoall");
  return launch({c10d::OpType::ALLTOALL, "nvx:all_to_all"}, one(args.all_to_all(outputs, inputs)), outputs, inputs,
                opts.timeout, mode(opts.asyncOp));
}

c10::intrusive_ptr<c10d::Work> ProcessGroupNVX::barrier(const c10d::BarrierOptions& opts) {
  TensorOperation c;
  c.operation.collective = kernel::Collective::kBarrier;
  // torch routes a barrier without a device to the CPU. But whoever uses a device expects that it has done, after the
  // barrier, what it was given before. In a group that is bound to a device, it is that one.
  c.device = device_in_use(getBoundDeviceId()).value_or(at::kCPU);
  c.facts.on_device = !c.device.is_cpu();
  if (c.facts.on_device && !opts.device_ids.empty()) c.device.set_index(c10::DeviceIndex(opts.device_ids.front()));
  Tensors none;
  const bool on_device = c.facts.on_device;
  if (on_device) see_proxies_end(mode(opts.asyncOp), opts.timeout);
  return launch({c10d::OpType::BARRIER, "nvx:barrier"}, one(std::move(c)), none, none, opts.timeout,
                mode(opts.asyncOp));
}

/// What proxies have begun is of another group than a barrier, which does not pass over what goes wrong there. A
/// synchronous one waits for them, as for what its stream has been given; here it is told why they do not end, which
/// they do by their own timeouts.
void ProcessGroupNVX::see_proxies_end(Mode mode, std::chrono::milliseconds most) {
  const Deadline limit = Deadline::after(std::max(most, std::chrono::milliseconds(0)));  // 0: none
  for (const auto& group : groups()) {
    if (group == group_) continue;
    for (int looks = 0;; ++looks) {
      const bool quiet = mode == Mode::kAsync || group->device().is_quiet();
      if (const Status status = group->device().look(); !status.ok()) {
        tell_failure(status.code());
        group->note_heard();
        raise(status);
      }
      if (quiet || limit.passed(Clock::now())) break;  // then the barrier says so
      pause_after(looks);
      if (looks % 256 != 255) continue;
      group_->look_for_interrupt();
      raise_interrupt();
      if (const Status alive = group_->check_alive(); !alive.ok()) raise(alive);
    }
  }
}

void ProcessGroupNVX::monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) {
  origin_.check(rank_);
  if (const auto device = device_in_use()) refuse_capture(*device);
  const auto timeout = opts.timeout == c10d::kUnsetTimeout ? group_->timeout() : opts.timeout;
  const Status status = group_->monitored_barrier(timeout, wait_all_ranks);
  if (!status.ok()) raise(status);
  raise_interrupt();
}

c10::intrusive_ptr<c10d::Work> ProcessGroupNVX::all_reduce_sparse(Tensors& tensors,
                                                                  const c10d::AllreduceOptions& opts) {
  const Arguments args = arguments("ProcessGroupNVX::allreduce");
  args.check_list(tensors);
  if (opts.reduceOp != c10d::ReduceOp::SUM)
    args.invalid("unsupported reduction operation (allreduce of sparse tensors only works with ReduceOp.SUM)");
  check_sparse(args, tensors);
  args.check_place(tensors[0]);
  origin_.check(rank_);
  if (!tensors[0].is_cpu()) return all_reduce_sparse_on_host(tensors[0], opts);
  if (!opts.asyncOp && !collects() && group_->lane().held_here()) raise(group_->inside_itself());
  Term term = term_of(opts.timeout);
  SparseWork::Call call{term.timeout, group_->next_number(), std::move(term.claim)};
  const auto work = c10::make_intrusive<SparseWork>(group_, facts({c10d::OpType::_ALLREDUCE_SPARSE, "nvx:all_reduce"}),
                                                    args, tensors, std::move(call));
  enqueue(work, group_->lane());
  if (opts.asyncOp || collects()) return work;
  work->wait(std::chrono::milliseconds(0));
  return work;
}

/// Of a device's tensor. How many entries it has is not known before its stream has come to the call, so the host waits
/// for that, and the operation has ended when this returns, asynchronous or not.
c10::intrusive_ptr<c10d::Work> ProcessGroupNVX::all_reduce_sparse_on_host(at::Tensor& tensor,
                                                                          const c10d::AllreduceOptions& opts) {
  refuse_capture(tensor.device());
  const BesideCaptures beside;
  const Movement movement;
  Tensors host{tensor.cpu()};
  c10d::AllreduceOptions now = opts;
  now.asyncOp = false;
  const auto work = all_reduce_sparse(host, now);
  if (work) work->wait();
  tensor.copy_(host[0]);
  const auto done = c10::make_intrusive<DoneWork>(facts({c10d::OpType::_ALLREDUCE_SPARSE, "nvx:all_reduce"}),
                                                  Tensors{tensor}, CommStreams::of_caller(tensor.device()).up);
  done->begin();
  return done;
}

#ifdef C10D_BACKEND_HAS_HOOKS

c10::intrusive_ptr<c10d::Work> ProcessGroupNVX::gather_single(at::Tensor& output, at::Tensor& input,
                                                              const c10d::GatherOptions& opts) {
  TensorOperations all;
  all.push_back(arguments("ProcessGroupNVX::gather_single").gather_base(output, input, opts.rootRank));
  Tensors inputs{input}, outputs;
  if (opts.rootRank == rank_) outputs.push_back(output);
  return launch({c10d::OpType::GATHER, "nvx:gather"}, std::move(all), outputs, inputs, opts.timeout,
                mode(opts.asyncOp));
}

#endif

}  // namespace nvx
