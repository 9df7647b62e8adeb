#include "torch/arguments/arguments.h"

#include "base/hash.h"
#include "group/plan/chunks.h"
#include "torch/arguments/overlaps.h"
#include "torch/device/delegate.h"
#include "torch/device/host_proxy_path.h"
#include "torch/device/kernel_path.h"

namespace nvx {
namespace {

using kernel::Piece;

size_t bytes_of_all(at::TensorList tensors) {
  size_t bytes = 0;
  for (const at::Tensor& tensor : tensors) bytes += tensor.defined() ? tensor.nbytes() : 0;
  return bytes;
}

std::byte* memory_of(const at::Tensor& tensor) { return static_cast<std::byte*>(tensor.data_ptr()); }

size_t count_of(at::TensorList tensors) {
  size_t count = 0;
  for (const at::Tensor& tensor : tensors) count += size_t(tensor.numel());
  return count;
}

/// Whether the operation can use the tensor's own memory: by its route, and a contiguous tensor without lazy bits.
bool plain(const at::Tensor& tensor, const TensorOperation& c) {
  return uses_tensors(c.route()) && tensor.is_contiguous() && !tensor.is_conj() && !tensor.is_neg();
}

at::Tensor empty_stand_in(const at::Tensor& tensor, const TensorOperation& c) {
  if (!uses_tensors(c.route())) return host_stand_in(tensor);
  return at::empty(tensor.sizes(), tensor.options().memory_format(at::MemoryFormat::Contiguous));
}

/// The stand-in is filled when the operation begins, after those that were issued before.
at::Tensor stand_in_of(const at::Tensor& tensor, TensorOperation& c) {
  const WithoutAutograd guard;
  at::Tensor copy = empty_stand_in(tensor, c);
  c.copies_in.emplace_back(tensor.alias(), copy);
  return copy;
}

/// 0 if all pieces have one length: a call with one tensor matches one of another rank with a list of equal ones.
uint64_t shape_of(const Pieces& pieces) {
  Hash hash;
  for (const Piece& piece : pieces) hash.add(piece.bytes);
  return pieces.of_one_length() ? 0 : hash.value();
}

/// The ranks' parts of a tensor's memory. splits: how many rows of dimension 0 each part has; empty: equal parts.
Pieces cut(const at::Tensor& tensor, const std::vector<int64_t>& splits, std::byte* base, int ranks) {
  Pieces pieces{size_t(ranks)};
  const size_t total = tensor.nbytes();
  const size_t rows = tensor.dim() && tensor.size(0) ? size_t(tensor.size(0)) : 1;
  for (size_t p = 0; p < pieces.size(); ++p) {
    const size_t bytes = splits.empty() ? total / pieces.size() : size_t(splits[p]) * (total / rows);
    pieces[p] = {base, bytes};
    base = base ? base + bytes : base;
  }
  return pieces;
}

}  // namespace

TensorOperation Arguments::begin(kernel::Collective collective, const at::Tensor& like, at::TensorList whole,
                                 const c10d::ReduceOp* op) const {
  TensorOperation c;
  c.operation.collective = collective;
  c.operation.dtype = dtype_of(like);
  // Types that nvx does not know have elements of several sizes, so ranks compare their bytes.
  c.operation.count = c.operation.dtype == DType::kBytes ? bytes_of_all(whole) : count_of(whole);
  c.device = like.device();
  if (c.device.is_cpu()) {
    if (op) reduces_with(c, *op, like);
    return c;
  }
  c.facts.on_device = true;
  c.facts.kernels_serve = kernels_ && kernels_->agree_to_serve(c.device);
  c.facts.is_large = goes_in_chunks(collective, c.operation.dtype, c.operation.count);
  c.facts.delegate_named = delegate_ != nullptr;
  if (proxies_ && may_be_proxied(c.facts)) c.facts.proxies_serve = proxies_->agree_to_serve(c.operation, c.device);
  if (!c.facts.kernels_serve && route_of(c.facts) != Route::kHostProxy) refuse_capture(c.device);
  if (op) reduces_with(c, *op, like);
  if (delegate_ && !whole.empty()) c.facts.delegate_serves = delegate_->agree_to_serve(c, bytes_of_all(whole));
  return c;
}

void Arguments::same_device(const TensorOperation& c, const at::Tensor& tensor) const {
  if (tensor.device() != c.device)
    invalid("tensors must be on the same device, not on ", c.device, " and ", tensor.device());
}

const std::byte* Arguments::input(TensorOperation& c, const at::Tensor& tensor, bool apart) const {
  same_device(c, tensor);
  if (plain(tensor, c) && !apart) return memory_of(tensor);
  const at::Tensor stand_in = stand_in_of(tensor, c);
  c.stand_ins.push_back(stand_in);
  return memory_of(stand_in);
}

Piece Arguments::input_piece(TensorOperation& c, const at::Tensor& tensor, bool apart) const {
  return piece_of(input(c, tensor, apart), tensor.nbytes());
}

std::byte* Arguments::output(TensorOperation& c, at::Tensor& tensor, bool apart, bool filled) const {
  same_device(c, tensor);
  if (plain(tensor, c) && !apart) return memory_of(tensor);
  check_writable(tensor);
  const WithoutAutograd guard;
  const at::Tensor stand_in = filled ? stand_in_of(tensor, c) : empty_stand_in(tensor, c);
  c.copies_out.emplace_back(tensor.alias(), stand_in);
  return memory_of(stand_in);
}

TensorOperation Arguments::begin_reduce(kernel::Collective collective, at::Tensor& tensor, const c10d::ReduceOp& op,
                                        bool apart, bool written) const {
  check_tensor(tensor);
  TensorOperation c = begin(collective, tensor, tensor, &op);
  c.operation.out = written ? output(c, tensor, apart, /*filled=*/true) : only_read(c, tensor);
  c.operation.in = c.operation.out;
  return c;
}

TensorOperation Arguments::all_reduce(at::Tensor& tensor, const c10d::ReduceOp& op, bool apart) const {
  return begin_reduce(kernel::Collective::kAllReduce, tensor, op, apart, /*written=*/true);
}

TensorOperation Arguments::reduce(at::Tensor& tensor, const c10d::ReduceOp& op, int64_t root) const {
  check_root(root);
  TensorOperation c = begin_reduce(kernel::Collective::kReduce, tensor, op, /*apart=*/false, root == rank_);
  c.operation.root = int(root);
  return c;
}

TensorOperation Arguments::broadcast(at::Tensor& tensor, int64_t root) const {
  check_tensor(tensor);
  check_root(root);
  TensorOperation c = begin(kernel::Collective::kBroadcast, tensor, tensor);
  c.operation.out = root == rank_ ? only_read(c, tensor) : output(c, tensor);
  c.operation.in = c.operation.out;
  c.operation.root = int(root);
  c.operation.recv = Pieces(size_t(size_));
  for (int p = 0; p < size_; ++p) c.operation.recv[size_t(p)] = {c.operation.out, tensor.nbytes()};
  return c;
}

TensorOperation Arguments::all_gather(Tensors& outputs, const at::Tensor& tensor, bool apart) const {
  check_tensor(tensor);
  if (outputs.size() != size_t(size_))
    invalid("invalid output tensor list at index 0 (expected length ", size_, ", got ", outputs.size(), ")");
  for (const at::Tensor& out : outputs) {
    check_tensor(out);
    same_type(out, tensor);
  }
  TensorOperation c = begin(kernel::Collective::kAllGather, tensor, outputs);
  const Outputs written(outputs);
  c.operation.in = input(c, tensor, apart || written.clash(tensor, size_t(rank_)));
  c.operation.recv = Pieces(outputs.size());
  for (size_t p = 0; p < outputs.size(); ++p)
    c.operation.recv[p] = {output(c, outputs[p], apart || written.overlaps_earlier(p)), outputs[p].nbytes()};
  const int64_t own = outputs[size_t(rank_)].numel();
  if (own != tensor.numel()) invalid("the input has ", tensor.numel(), " elements, the output for this rank ", own);
  c.operation.shape = shape_of(c.operation.recv);
  return c;
}

TensorOperation Arguments::all_gather_base(at::Tensor& out, const at::Tensor& in, bool apart) const {
  check_times_size(out, in, /*whole=*/out);
  TensorOperation c = begin(kernel::Collective::kAllGather, in, out);
  c.operation.in = input(c, in, apart || clash_within(in, out, rank_));
  c.operation.recv = cut(out, {}, output(c, out, apart), size_);
  return c;
}

TensorOperation Arguments::reduce_scatter(at::Tensor& out, const Tensors& inputs, const c10d::ReduceOp& op) const {
  check_tensor(out);
  if (inputs.size() != size_t(size_))
    invalid("invalid input tensor list at index 0 (expected length ", size_, ", got ", inputs.size(), ")");
  for (const at::Tensor& in : inputs) {
    check_tensor(in);
    same_type(out, in);
  }
  TensorOperation c = begin(kernel::Collective::kReduceScatter, out, inputs, &op);
  c.operation.send = Pieces(inputs.size());
  for (size_t p = 0; p < inputs.size(); ++p)
    c.operation.send[p] = input_piece(c, inputs[p], clash(inputs[p], out, int(p) == rank_));
  const int64_t own = inputs[size_t(rank_)].numel();
  if (own != out.numel()) invalid("the output has ", out.numel(), " elements, the input for this rank ", own);
  c.operation.shape = shape_of(c.operation.send);
  c.operation.out = output(c, out);
  return c;
}

TensorOperation Arguments::reduce_scatter_base(at::Tensor& out, const at::Tensor& in, const c10d::ReduceOp& op,
                                               bool apart) const {
  check_times_size(out, in, /*whole=*/in);
  TensorOperation c = begin(kernel::Collective::kReduceScatter, in, in, &op);
  c.operation.send = cut(in, {}, input_piece(c, in, apart || clash_within(out, in, rank_)).data, size_);
  c.operation.out = output(c, out, apart);
  return c;
}

/// For a gather or a scatter, of which only the root has all pieces. own: the tensor that each rank has.
TensorOperation Arguments::begin_rooted(kernel::Collective collective, const at::Tensor& own, int64_t root) const {
  check_root(root);
  check_tensor(own);
  TensorOperation c = begin(collective, own);
  c.operation.root = int(root);
  c.operation.send = Pieces(size_t(size_));
  c.operation.recv = Pieces(size_t(size_));
  return c;
}

TensorOperation Arguments::gather(std::vector<Tensors>& outputs, const at::Tensor& tensor, int64_t root) const {
  TensorOperation c = begin_rooted(kernel::Collective::kGather, tensor, root);
  const bool apart = outputs.size() == 1 && Outputs(outputs[0]).clash(tensor, size_t(rank_));
  c.operation.send[size_t(root)] = input_piece(c, tensor, apart);
  check_lists_at_root(outputs, "output", root);
  if (root != rank_) return c;
  const Outputs written(outputs[0]);
  for (size_t p = 0; p < outputs[0].size(); ++p) {
    at::Tensor& out = outputs[0][p];
    check_tensor(out);
    check_type(outputs[0], p, tensor);
    c.operation.recv[p] = {output(c, out, written.overlaps_earlier(p)), out.nbytes()};
  }
  if (outputs[0][size_t(rank_)].numel() != tensor.numel()) check_size(outputs[0], size_t(rank_), tensor);
  return c;
}

TensorOperation Arguments::gather_base(at::Tensor& out, const at::Tensor& in, int64_t root) const {
  TensorOperation c = begin_rooted(kernel::Collective::kGather, in, root);
  c.operation.send[size_t(root)] = input_piece(c, in, /*apart=*/root == rank_ && clash_within(in, out, rank_));
  if (root != rank_) return c;
  check_times_size(out, in, /*whole=*/out);
  c.operation.recv = cut(out, {}, output(c, out), size_);
  return c;
}

TensorOperation Arguments::scatter(at::Tensor& out, const std::vector<Tensors>& inputs, int64_t root) const {
  TensorOperation c = begin_rooted(kernel::Collective::kScatter, out, root);
  c.operation.recv[size_t(root)] = {output(c, out), out.nbytes()};
  check_lists_at_root(inputs, "input", root);
  if (root != rank_) return c;
  for (size_t p = 0; p < inputs[0].size(); ++p) {
    check_tensor(inputs[0][p]);
    check_type(inputs[0], p, out);
    c.operation.send[p] = input_piece(c, inputs[0][p], clash(inputs[0][p], out, int(p) == rank_));
  }
  if (inputs[0][size_t(rank_)].numel() != out.numel()) check_size(inputs[0], size_t(rank_), out);
  return c;
}

TensorOperation Arguments::all_to_all(Tensors& outputs, const Tensors& inputs) const {
  if (inputs.size() != size_t(size_))
    invalid("input tensor list size ", inputs.size(), " does not match world size ", size_);
  if (outputs.size() != size_t(size_))
    invalid("output tensor list size ", outputs.size(), " does not match world size ", size_);
  check_tensor(inputs[0]);
  TensorOperation c = begin(kernel::Collective::kAllToAll, inputs[0]);
  c.operation.send = Pieces(inputs.size());
  c.operation.recv = Pieces(outputs.size());
  const Outputs written(outputs);
  for (size_t p = 0; p < inputs.size(); ++p) {
    check_tensor(inputs[p]);
    check_tensor(outputs[p]);
    same_type(inputs[0], inputs[p]);
    same_type(outputs[p], inputs[0]);
    c.operation.send[p] = input_piece(c, inputs[p], written.clash(inputs[p], p));
    c.operation.recv[p] = {output(c, outputs[p], written.overlaps_earlier(p)), outputs[p].nbytes()};
  }
  const int64_t sent = inputs[size_t(rank_)].numel(), kept = outputs[size_t(rank_)].numel();
  if (sent != kept)
    invalid("the input and the output for this rank itself differ in size: ", sent, " and ", kept, " elements");
  return c;
}

TensorOperation Arguments::all_to_all_base(at::Tensor& out, const at::Tensor& in,
                                           const std::vector<int64_t>& output_splits,
                                           const std::vector<int64_t>& input_splits) const {
  check_tensor(in);
  check_tensor(out);
  same_type(out, in);
  check_splits(input_splits, in, "input");
  check_splits(output_splits, out, "output");
  TensorOperation c = begin(kernel::Collective::kAllToAll, in);
  const bool apart = clash(in, out, /*counterparts=*/input_splits == output_splits);
  c.operation.send = cut(in, input_splits, input_piece(c, in, apart).data, size_);
  c.operation.recv = cut(out, output_splits, output(c, out), size_);
  const size_t sent = c.operation.send[size_t(rank_)].bytes, kept = c.operation.recv[size_t(rank_)].bytes;
  if (sent != kept)
    invalid("the input and the output split for this rank itself differ in size: ", sent / in.element_size(), " and ",
            kept / in.element_size(), " elements");
  return c;
}

}  // namespace nvx
