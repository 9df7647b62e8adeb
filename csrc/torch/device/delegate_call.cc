#include "torch/device/delegate_call.h"

#include <ATen/ATen.h>

#include "group/plan/plan.h"
#include "torch/core/dtypes.h"

namespace nvx {
namespace {

using Tensors = std::vector<at::Tensor>;

struct TorchOp {
  ReduceOp op;
  c10d::ReduceOp::RedOpType type;
};
constexpr TorchOp kTorchOps[] = {
    {ReduceOp::kSum, c10d::ReduceOp::SUM},         {ReduceOp::kAvg, c10d::ReduceOp::AVG},
    {ReduceOp::kMin, c10d::ReduceOp::MIN},         {ReduceOp::kMax, c10d::ReduceOp::MAX},
    {ReduceOp::kProduct, c10d::ReduceOp::PRODUCT},
};

/// Collectives that only move data use bytes. Reductions use the type itself; `group/plan/delegate_plan.cc` admits only
/// types that the backend supports.
at::ScalarType torch_type_of(const Operation& o) {
  if (!reduces(o.collective)) return at::kByte;
  const std::optional<at::ScalarType> type = torch_type_of(o.dtype);
  TORCH_CHECK(type, "nvx hands no ", name(o.dtype), " over");
  return *type;
}

c10d::ReduceOp torch_op_of(const Operation& o) {
  for (const TorchOp& row : kTorchOps) {
    if (row.op == o.op) return row.type;
  }
  TORCH_CHECK(false, "nvx hands no ", name(o.op), " over");
}

/// Whether the pieces are contiguous and of equal size.
bool is_even(const Pieces& pieces) {
  for (size_t p = 1; p < pieces.size(); ++p) {
    if (pieces[p].bytes != pieces[0].bytes || pieces[p].data != pieces[0].data + p * pieces[0].bytes) return false;
  }
  return true;
}

/// Wraps memory in tensors of the operation's type. They do not own the memory; the caller of the operation does.
class Views {
 public:
  Views(const Operation& o, at::Device device) : options_(at::TensorOptions().device(device).dtype(torch_type_of(o))) {}

  at::Tensor of(const std::byte* data, size_t bytes) const {
    const auto count = int64_t(bytes / options_.dtype().itemsize());
    if (count == 0) return at::empty({0}, options_);
    return at::for_blob(const_cast<std::byte*>(data), {count})
        .options(options_)
        .target_device(options_.device())
        .make_tensor();
  }
  Tensors of(const Pieces& pieces) const {
    Tensors all;
    for (size_t p = 0; p < pieces.size(); ++p) all.push_back(of(pieces[p].data, pieces[p].bytes));
    return all;
  }
  at::Tensor of_whole(const Pieces& pieces) const { return of(pieces[0].data, pieces[0].bytes * pieces.size()); }

 private:
  const at::TensorOptions options_;
};

template <class Options>
Options synchronous() {
  Options options;
  options.asyncOp = false;
  return options;
}

c10::intrusive_ptr<c10d::Work> all_gather(c10d::Backend& backend, const Operation& o, const Views& views) {
  const auto options = synchronous<c10d::AllgatherOptions>();
  at::Tensor input = views.of(o.in, o.recv[size_t(backend.getRank())].bytes);
  if (is_even(o.recv)) {
    at::Tensor output = views.of_whole(o.recv);
    return backend._allgather_base(output, input, options);
  }
  std::vector<Tensors> outputs{views.of(o.recv)};
  Tensors inputs{input};
  return backend.allgather(outputs, inputs, options);
}

c10::intrusive_ptr<c10d::Work> reduce_scatter(c10d::Backend& backend, const Operation& o, const Views& views) {
  auto options = synchronous<c10d::ReduceScatterOptions>();
  options.reduceOp = torch_op_of(o);
  at::Tensor output = views.of(o.out, o.send[size_t(backend.getRank())].bytes);
  if (is_even(o.send)) {
    at::Tensor input = views.of_whole(o.send);
    return backend._reduce_scatter_base(output, input, options);
  }
  std::vector<Tensors> inputs{views.of(o.send)};
  Tensors outputs{output};
  return backend.reduce_scatter(outputs, inputs, options);
}

c10::intrusive_ptr<c10d::Work> call(c10d::Backend& backend, const Operation& o, const Views& views) {
  switch (o.collective) {
    case kernel::Collective::kAllReduce: {
      auto options = synchronous<c10d::AllreduceOptions>();
      options.reduceOp = torch_op_of(o);
      Tensors tensors{views.of(o.out, o.count * size_of(o.dtype))};
      return backend.allreduce(tensors, options);
    }
    case kernel::Collective::kReduce: {
      auto options = synchronous<c10d::ReduceOptions>();
      options.reduceOp = torch_op_of(o);
      options.rootRank = o.root;
      Tensors tensors{views.of(o.out, o.count * size_of(o.dtype))};
      return backend.reduce(tensors, options);
    }
    case kernel::Collective::kBroadcast: {
      auto options = synchronous<c10d::BroadcastOptions>();
      options.rootRank = o.root;
      Tensors tensors{views.of(o.out, o.recv[0].bytes)};
      return backend.broadcast(tensors, options);
    }
    case kernel::Collective::kAllGather: return all_gather(backend, o, views);
    case kernel::Collective::kReduceScatter: return reduce_scatter(backend, o, views);
    default: TORCH_CHECK(false, "nvx hands no ", name(o.collective), " over");
  }
}

}  // namespace

/// Does not block the host: wait() on the work that the backend may return makes the current stream wait.
void call_delegate(c10d::Backend& backend, const Operation& operation, at::Device device) {
  const auto work = call(backend, operation, Views(operation, device));
  if (work) work->wait();
}

}  // namespace nvx
