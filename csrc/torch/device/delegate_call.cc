#include "torch/device/delegate_setup.h"

#include <ATen/ATen.h>

#include "torch/core/tensors.h"
#include "torch/streams/staging_copies.h"

namespace nvx {
namespace {

/// Collectives that only move data use bytes. Reductions use the type itself; `group/plan/delegate_plan.cc` admits only
/// types that the backend supports.
at::ScalarType torch_type_of(const Operation& o) {
  if (!reduces(o.collective)) return at::kByte;
  const std::optional<at::ScalarType> type = torch_type_of(o.dtype);
  TORCH_CHECK(type, "nvx passes no ", name(o.dtype), " to a delegate");
  return *type;
}

c10d::ReduceOp torch_op_of(const Operation& o) {
  switch (o.op) {
    case ReduceOp::kSum: return c10d::ReduceOp::SUM;
    case ReduceOp::kAvg: return c10d::ReduceOp::AVG;
    case ReduceOp::kMin: return c10d::ReduceOp::MIN;
    case ReduceOp::kMax: return c10d::ReduceOp::MAX;
    case ReduceOp::kProduct: return c10d::ReduceOp::PRODUCT;
    default: TORCH_CHECK(false, "nvx passes no ", name(o.op), " to a delegate");
  }
}

bool is_even(const Pieces& pieces) { return pieces.of_one_length() && pieces.whole(); }

/// Wraps memory in tensors of the operation's type. They do not own the memory; the caller of the operation does.
class Views {
 public:
  Views(const Operation& o, at::Device device) : options_(at::TensorOptions().device(device).dtype(torch_type_of(o))) {}

  at::Tensor of(const std::byte* data, size_t bytes) const {
    const auto count = int64_t(bytes / options_.dtype().itemsize());
    if (count == 0) return at::empty({0}, options_);
    return tensor_over(const_cast<std::byte*>(data), count, options_);
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

/// The options of a synchronous call of this operation.
template <class Options>
Options options_of(const Operation& o) {
  Options options;
  options.asyncOp = false;
  if constexpr (requires { options.rootRank; }) options.rootRank = o.root;
  if constexpr (requires { options.reduceOp; }) options.reduceOp = torch_op_of(o);
  return options;
}

IntrusiveWork call_in_place(c10d::Backend& backend, const Operation& o, const Views& views) {
  Tensors tensors{views.of(o.out, reduces(o.collective) ? o.count * size_of(o.dtype) : o.recv[0].bytes)};
  if (o.collective == kernel::Collective::kBroadcast)
    return backend.broadcast(tensors, options_of<c10d::BroadcastOptions>(o));
  if (o.collective == kernel::Collective::kReduce) return backend.reduce(tensors, options_of<c10d::ReduceOptions>(o));
  return backend.allreduce(tensors, options_of<c10d::AllreduceOptions>(o));
}

IntrusiveWork all_gather(c10d::Backend& backend, const Operation& o, const Views& views) {
  const auto options = options_of<c10d::AllgatherOptions>(o);
  Tensors input{views.of(o.in, o.recv[size_t(backend.getRank())].bytes)};
  const bool even = is_even(o.recv);
  std::vector<Tensors> outputs{even ? Tensors{views.of_whole(o.recv)} : views.of(o.recv)};
  return even ? backend._allgather_base(outputs[0][0], input[0], options) : backend.allgather(outputs, input, options);
}

IntrusiveWork reduce_scatter(c10d::Backend& backend, const Operation& o, const Views& views) {
  const auto options = options_of<c10d::ReduceScatterOptions>(o);
  Tensors output{views.of(o.out, o.send[size_t(backend.getRank())].bytes)};
  const bool even = is_even(o.send);
  std::vector<Tensors> inputs{even ? Tensors{views.of_whole(o.send)} : views.of(o.send)};
  return even ? backend._reduce_scatter_base(output[0], inputs[0][0], options)
              : backend.reduce_scatter(output, inputs, options);
}

IntrusiveWork call(c10d::Backend& backend, const Operation& o, const Views& views) {
  switch (o.collective) {
    case kernel::Collective::kAllReduce:
    case kernel::Collective::kReduce:
    case kernel::Collective::kBroadcast: return call_in_place(backend, o, views);
    case kernel::Collective::kAllGather: return all_gather(backend, o, views);
    case kernel::Collective::kReduceScatter: return reduce_scatter(backend, o, views);
    default: TORCH_CHECK(false, "nvx passes no ", name(o.collective), " to a delegate");
  }
}

}  // namespace

/// Does not block the host: wait() on the work that the backend may return makes the current stream wait.
void call_delegate(c10d::Backend& backend, const Operation& operation, at::Device device) {
  const auto work = call(backend, operation, Views(operation, device));
  if (work) work->wait();
}

void call_delegate(c10d::Backend& backend, const DelegatedMessages& batch) {
  backend.startCoalescing();
  for (const DelegatedMessage& message : batch) {
    const at::Tensor& t = message.tensor;
    Tensors bytes{
        tensor_over(static_cast<std::byte*>(t.data_ptr()), int64_t(t.nbytes()), t.options().dtype(at::kByte))};
    if (message.receives) {
      (void)backend.recv(bytes, message.peer, message.tag);
    } else {
      (void)backend.send(bytes, message.peer, message.tag);
    }
  }
  const auto work = backend.endCoalescing();
  if (work) work->wait();
}

}  // namespace nvx
