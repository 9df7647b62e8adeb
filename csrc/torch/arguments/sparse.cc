#include "torch/arguments/sparse.h"

#include <algorithm>
#include <atomic>

#include "base/contain.h"
#include "base/hash.h"
#include "base/thread_state.h"
#include "memory/driver/relaxed_capture_guard.h"
#include "torch/core/recorded.h"

namespace nvx {
namespace {

/// Concatenates all entries. operator+ would sum them as well, but lacks types that coalesce() supports.
at::Tensor concatenated(const Tensors& tensors) {
  if (tensors.size() == 1) return tensors[0];
  Tensors indices, values;
  for (const at::Tensor& tensor : tensors) {
    indices.push_back(tensor._indices());
    values.push_back(tensor._values());
  }
  return at::sparse_coo_tensor(at::cat(indices, 1), at::cat(values, 0), tensors[0].sizes());
}

/// Whether torch can sum entries of this type that share an index: tried, until it has worked once for the type.
bool can_coalesce(at::ScalarType type) {
  static std::atomic<bool> known[size_t(at::ScalarType::NumOptions)] = {};
  std::atomic<bool>& can = known[size_t(type)];
  if (can) return true;
  const WithoutAutograd guard;
  contain_and(
      [&] {
        const at::Tensor twice = at::zeros({1, 2}, at::kLong);  // torch sums only if an index has two entries
        (void)at::sparse_coo_tensor(twice, at::zeros({2}, type), {1}).coalesce();
        can = true;
      },
      [](const std::exception*) {});  // a failure is not cached: it may be a lack of memory
  return can;
}

/// Ranks may hold different numbers of entries. So these numbers are gathered first, then the indices and values of all
/// ranks, which every rank sums in rank order.
class SparseWork final : public LaneWork {
 public:
  SparseWork(Facts facts, const Arguments& arguments, Tensors tensors, CallContext::Timeout timeout, uint64_t number)
      : LaneWork(std::move(facts), tensors),
        arguments_(arguments),
        timeout_(std::move(timeout)),
        number_(number),
        tensors_(std::move(tensors)) {}

 private:
  Status carry_out(Group& group, Runner runner) override;
  void release_tensors() override;
  Status gather(Group& group, Runner runner, const at::Tensor& in, at::Tensor& out);
  Status gather_sizes(Group& group, Runner runner, const at::Tensor& mine, std::vector<int64_t>& entries);

  const Arguments arguments_;
  CallContext::Timeout timeout_;
  const uint64_t number_;
  Whole whole_;  // the ranks compare it in each step
  Tensors tensors_;
};

void SparseWork::release_tensors() {
  tensors_.clear();
  timeout_.claim.reset();
}

Status SparseWork::gather(Group& group, Runner runner, const at::Tensor& in, at::Tensor& out) {
  std::vector<int64_t> shape = in.sizes().vec();
  shape.insert(shape.begin(), group.size());
  out = at::empty(shape, in.options());
  TensorOperation c = arguments_.all_gather_base(out, in);
  c.operation.timeout = timeout_.value;
  c.operation.number = number_;
  whole_.bytes = in.nbytes();
  whole_.fingerprint.shape = Hash().add(c.operation.count).add(c.operation.shape).value();
  c.operation.whole = &whole_;
  return group.run(c.operation, runner);
}

/// The shape that a rank has described.
std::string shape_of(const Group& group, const at::Tensor& all, int64_t rank) {
  const auto number = [&](int64_t i) { return all[rank][i].item<int64_t>(); };
  std::string sizes;
  for (int64_t i = 3; i < all.size(1); ++i) sizes += (i > 3 ? ", " : "") + std::to_string(number(i));
  return group.topology().describe(int(rank)) + " has one of sizes [" + sizes + "], of which " +
         std::to_string(number(1)) + " dimensions are sparse";
}

/// Gathers the number of entries of each rank, and checks that all have the same shape.
Status SparseWork::gather_sizes(Group& group, Runner runner, const at::Tensor& mine, std::vector<int64_t>& entries) {
  std::vector<int64_t> described{mine._nnz(), mine.sparse_dim(), mine.dense_dim()};
  described.insert(described.end(), mine.sizes().begin(), mine.sizes().end());
  at::Tensor all;
  NVX_TRY(gather(group, runner, at::tensor(described, at::kLong), all));
  for (int64_t r = 0; r < group.size(); ++r) {
    if (!all[r].slice(0, 1).equal(all[0].slice(0, 1))) {
      arguments_.invalid("sparse tensors of all ranks must have the same shape: ", shape_of(group, all, 0), ", ",
                         shape_of(group, all, r));
    }
    entries.push_back(all[r][0].item<int64_t>());
  }
  return {};
}

Status SparseWork::carry_out(Group& group, Runner runner) {
  const WithoutAutograd guard;
  const DefaultFloatMode mode;  // coalesce() adds
  const at::Tensor mine = concatenated(tensors_).coalesce();
  whole_.fingerprint.collective = kernel::Collective::kAllReduce;
  whole_.fingerprint.dtype = dtype_of(mine.values());
  whole_.fingerprint.form = kernel::Form::kSparse;
  whole_.deadline = Deadline::after(group.span_of(timeout_.value));
  std::vector<int64_t> entries;
  NVX_TRY(gather_sizes(group, runner, mine, entries));
  const int64_t most = *std::ranges::max_element(entries);
  const at::Tensor values = mine.values();
  std::vector<int64_t> shape = values.sizes().vec();
  shape[0] = most;
  at::Tensor padded_indices = at::zeros({most, mine.sparse_dim()}, mine.indices().options());
  at::Tensor padded_values = at::zeros(shape, values.options());
  padded_indices.slice(0, 0, mine._nnz()).copy_(mine.indices().t());
  padded_values.slice(0, 0, mine._nnz()).copy_(values);
  at::Tensor all_indices, all_values;
  NVX_TRY(gather(group, runner, padded_indices, all_indices));
  NVX_TRY(gather(group, runner, padded_values, all_values));
  Tensors indices, parts;
  for (int64_t r = 0; r < group.size(); ++r) {
    indices.push_back(all_indices[r].slice(0, 0, entries[size_t(r)]).t());
    parts.push_back(all_values[r].slice(0, 0, entries[size_t(r)]));
  }
  const at::Tensor sum = at::sparse_coo_tensor(at::cat(indices, 1), at::cat(parts, 0), mine.sizes()).coalesce();
  for (at::Tensor& tensor : tensors_) tensor.copy_(sum);
  return {};
}

constexpr Kind kSparse{c10d::OpType::_ALLREDUCE_SPARSE, "nvx:all_reduce"};

/// Rejects tensors on which the operation would fail midway, while the other ranks wait for this one.
void check_sparse(const Arguments& args, const Tensors& tensors) {
  if (!can_coalesce(tensors[0].scalar_type())) {
    args.invalid_type("Cannot use ReduceOp.SUM with sparse ", tensors[0].scalar_type(),
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
  const RelaxedCaptureGuard relaxed;
  const WithoutAutograd guard;
  Tensors host{tensor.cpu()};
  c10d::AllreduceOptions now = opts;
  now.asyncOp = false;
  const auto work = all_reduce_sparse(context, args, host, now);
  if (work) work->wait();
  tensor.copy_(host[0]);
  const auto done = c10::make_intrusive<DoneWork>(context.facts(kSparse), Tensors{tensor},
                                                  CommStreams::of_caller(tensor.device()).h2d);
  done->begin();
  return done;
}

}  // namespace

IntrusiveWork all_reduce_sparse(CallContext& context, const Arguments& args, Tensors& tensors,
                                const c10d::AllreduceOptions& opts) {
  args.check_list(tensors);
  if (opts.reduceOp != c10d::ReduceOp::SUM)
    args.invalid("unsupported reduction operation (all_reduce of sparse tensors only works with ReduceOp.SUM)");
  check_sparse(args, tensors);
  args.check_place(tensors[0]);
  Group& group = context.checked_group();
  if (!tensors[0].is_cpu()) return all_reduce_through_host(context, args, tensors[0], opts);
  const bool waits = !opts.asyncOp && !context.scopes.is_open();
  if (waits && group.lane().held_here()) raise(group.reentrant());
  const CallRecord record(kSparse.title, tensors);
  context.count_call(kSparse);
  const uint64_t number = group.next_number();  // before facts(), which states it
  const auto work =
      c10::make_intrusive<SparseWork>(context.facts(kSparse), args, tensors, context.timeout_of(opts.timeout), number);
  context.enqueue(work, group.lane());
  if (waits) work->wait(std::chrono::milliseconds(0));
  return work;
}

}  // namespace nvx
