#include "torch/sparse_call.h"

#include "memory/driver/beside_captures.h"
#include "torch/arguments/sparse.h"

namespace nvx {
namespace {

constexpr Kind kSparse{c10d::OpType::_ALLREDUCE_SPARSE, "nvx:all_reduce"};

/// Rejects tensors on which the operation would fail midway, while the other ranks wait for this one.
void check_sparse(const Arguments& args, const Tensors& tensors) {
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

IntrusiveWork all_reduce_through_host(CallContext& context, const Arguments& args, at::Tensor& tensor,
                                      const c10d::AllreduceOptions& opts) {
  refuse_capture(tensor.device());
  const BesideCaptures beside;
  const Movement movement;
  Tensors host{tensor.cpu()};
  c10d::AllreduceOptions now = opts;
  now.asyncOp = false;
  const auto work = all_reduce_sparse(context, args, host, now);
  if (work) work->wait();
  tensor.copy_(host[0]);
  const auto done = c10::make_intrusive<DoneWork>(context.facts(kSparse), Tensors{tensor},
                                                  CommStreams::of_caller(tensor.device()).up);
  done->begin();
  return done;
}

}  // namespace

IntrusiveWork all_reduce_sparse(CallContext& context, const Arguments& args, Tensors& tensors,
                                const c10d::AllreduceOptions& opts) {
  args.check_list(tensors);
  if (opts.reduceOp != c10d::ReduceOp::SUM)
    args.invalid("unsupported reduction operation (allreduce of sparse tensors only works with ReduceOp.SUM)");
  check_sparse(args, tensors);
  args.check_place(tensors[0]);
  Group& group = context.checked_group();
  if (!tensors[0].is_cpu()) return all_reduce_through_host(context, args, tensors[0], opts);
  const bool waits = !opts.asyncOp && !context.scopes.is_open();
  if (waits && group.lane().held_here()) raise(group.inside_itself());
  CallContext::Term term = context.term_of(opts.timeout);
  SparseWork::Call call{term.timeout, group.next_number(), std::move(term.claim)};
  const auto work =
      c10::make_intrusive<SparseWork>(context.groups.of_cpu(), context.facts(kSparse), args, tensors, std::move(call));
  context.enqueue(work, group.lane());
  if (waits) work->wait(std::chrono::milliseconds(0));
  return work;
}

}  // namespace nvx
