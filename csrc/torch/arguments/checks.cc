#include "torch/arguments/checks.h"

#include <ATen/EmptyTensor.h>
#include <ATen/MemoryOverlap.h>

#include "torch/streams/staging_copies.h"

namespace nvx {
namespace {

std::string at_index(size_t index, const auto& wanted, const auto& there) {
  return c10::str(" at index ", index, " (expected ", in_python(wanted), ", got ", in_python(there), ")");
}

}  // namespace

std::string in_python(at::ScalarType type) { return "torch." + std::string(c10::getDtypeNames(type).first); }

std::string in_python(at::Layout layout) {
  switch (layout) {
    case at::kStrided: return "torch.strided";
    case at::kSparse: return "torch.sparse_coo";
    case at::kSparseCsr: return "torch.sparse_csr";
    case at::kSparseCsc: return "torch.sparse_csc";
    case at::kSparseBsr: return "torch.sparse_bsr";
    case at::kSparseBsc: return "torch.sparse_bsc";
    default: return c10::str(layout);
  }
}

/// torch does not check tensors in nested lists for this.
std::string why_no_memory(const at::Tensor& tensor) {
  constexpr const char* kNone =
      "a tensor has no storage (of vmap or grad, a wrapper subclass or a FakeTensor): pass the tensor that it wraps";
  const c10::Storage& storage = tensor.unsafeGetTensorImpl()->unsafe_storage();
  if (!storage) return kNone;
  if (tensor.numel() == 0) return "";
  // The storage may have been shrunk under its tensors, as FSDP does with parameters that it frees.
  const size_t there = storage.nbytes();
  const size_t needed = at::detail::computeStorageNbytes(tensor.sizes(), tensor.strides(), tensor.itemsize(),
                                                         size_t(tensor.storage_offset()));
  if (there < needed)
    return c10::str("a tensor of ", needed, " bytes has a storage of ", there,
                    " bytes: the storage was freed or shrunk; resize it first (untyped_storage().resize_)");
  return storage.data() ? "" : kNone;
}

std::string Checks::explained(const std::string& wrong) const {
  return text_of(Failure{.code = Code::kInvalid,
                         .cause = std::string(name_) + ": " + wrong,
                         .context = group_.core().diagnosis.me() + " of group " + group_.name(),
                         .advice = std::string("correct the arguments on this rank and call it again") +
                                   (group_.failed() ? "" : "; the group can still be used")});
}

at::Tensor& Checks::single(Tensors& tensors) const {
  if (tensors.empty()) invalid("requires non-empty tensor list");
  check_single(tensors);
  check_tensor(tensors[0]);
  return tensors[0];
}

void Checks::check_single(const Tensors& tensors, const char* side) const {
  if (tensors.size() == 1) return;
  invalid("requires a single-element ", side, "tensor list, not one of ", tensors.size());
}

void Checks::check_tensor(const at::Tensor& tensor) const {
  if (!tensor.defined()) invalid("requires defined tensors");
  if (tensor.layout() != at::kStrided)
    invalid("only supports dense tensors, not one of layout ", tensor.layout(), ": to_dense() it first");
  check_place(tensor);
  if (const std::string why = why_no_memory(tensor); !why.empty()) invalid(why);
}

void Checks::check_place(const at::Tensor& tensor) const {
  if (!supports(tensor.device())) invalid("only supports CPU and accelerator tensors, not one on ", tensor.device());
}

void Checks::check_lists_at_root(const std::vector<Tensors>& lists, const std::string& side, int64_t root) const {
  if (root != rank_ && !lists.empty()) invalid("requires empty ", side, " on non-root: the root is rank ", root);
  if (root != rank_) return;
  if (lists.size() != 1)
    invalid("requires a single-element ", side, " list containing a list with ", size_, " tensors. It has ",
            lists.size(), " elements");
  if (lists[0].size() != size_t(size_))
    invalid("Incorrect ", side, " list size ", lists[0].size(), ". ", side == "input" ? "Input" : "Output",
            " list size should be ", size_, ", same as size of the process group");
}

void Checks::check_root(int64_t root) const {
  if (root < 0 || root >= size_) invalid("invalid root rank: ", root, ", in a group of ", size_);
}

/// Compares each split with the rest of dimension 0 instead of summing the splits, so that no sum overflows.
void Checks::check_splits(const std::vector<int64_t>& splits, const at::Tensor& tensor, const std::string& side) const {
  if (tensor.dim() == 0) invalid("the ", side, " tensor has no dimension 0 that could be split");
  const int64_t rows = tensor.size(0);
  const auto fail = [&](const auto&... what) { invalid(what..., " (the ", side, " tensor has ", rows, " rows)"); };
  if (splits.empty()) {
    if (tensor.numel() % size_ == 0) return;  // equal parts of the memory, as gloo cuts it
    invalid("Tensor's dim 0 does not divide equally across group size, nor do its elements (the ", side, " tensor has ",
            tensor.numel(), ")");
  }
  const std::string name = side + "_split_sizes", wrong = "Split sizes doesn't match total dim 0 size: " + name;
  if (splits.size() != size_t(size_))
    invalid("Number of tensor splits not equal to group size: ", name, " has ", splits.size(), ", the group ", size_);
  int64_t left = rows;
  for (size_t p = 0; p < splits.size(); ++p) {
    if (splits[p] < 0) invalid(name, "[", p, "] is negative: ", splits[p]);
    if (splits[p] > left) fail(wrong, "[", p, "] is ", splits[p]);
    left -= splits[p];
  }
  if (left != 0) fail(wrong, " leaves ", left);
}

/// `whole` must have as many elements as all ranks' parts together. Divides, because a product might overflow.
void Checks::check_times_size(const at::Tensor& out, const at::Tensor& in, const at::Tensor& whole) const {
  check_tensor(in);
  check_tensor(out);
  same_type(out, in);
  const at::Tensor& part = whole.is_same(out) ? in : out;
  if (whole.numel() % size_ == 0 && whole.numel() / size_ == part.numel()) return;
  invalid(whole.is_same(out) ? "output tensor size must be equal to world_size times input tensor size"
                             : "input tensor must be the same size as output size times world size",
          ": the output has ", out.numel(), " elements, the input ", in.numel(), ", the group ", size_, " ranks");
}

void Checks::check_writable(const at::Tensor& tensor) const {
  if (at::has_internal_overlap(tensor) == at::MemOverlap::Yes)
    invalid("several elements of an output tensor share memory (it was expanded): clone() it first");
}

void Checks::same_type(const at::Tensor& a, const at::Tensor& b) const {
  if (a.scalar_type() != b.scalar_type())
    invalid_type("invalid tensor type: output tensor must have the same type as input tensor (", a.scalar_type(),
                 " and ", b.scalar_type(), ")");
}

void Checks::check_layout(const Tensors& tensors, size_t index, const at::Tensor& like) const {
  const at::Tensor& tensor = tensors[index];
  if (!tensor.defined()) invalid("requires defined tensors: tensor ", index, " of the list is undefined");
  if (tensor.layout() != like.layout())
    invalid("invalid tensor layout", at_index(index, like.layout(), tensor.layout()));
}

void Checks::check_type(const Tensors& tensors, size_t index, const at::Tensor& like) const {
  const at::ScalarType wanted = like.scalar_type(), there = tensors[index].scalar_type();
  if (there != wanted) invalid("invalid tensor type", at_index(index, wanted, there));
}

void Checks::check_size(const Tensors& tensors, size_t index, const at::Tensor& like) const {
  const at::IntArrayRef wanted = like.sizes(), there = tensors[index].sizes();
  if (there != wanted) invalid("invalid tensor size", at_index(index, wanted, there));
}

/// Raises with gloo's error texts.
void Checks::check_alike(const Tensors& tensors, const at::Tensor& like) const {
  for (size_t i = 0; i < tensors.size(); ++i) {
    const at::Tensor& tensor = tensors[i];
    check_layout(tensors, i, like);
    check_type(tensors, i, like);
    check_size(tensors, i, like);
    if (tensor.device() != like.device())
      invalid("tensors must be on the same device", at_index(i, like.device(), tensor.device()));
  }
}

/// Raises with gloo's error texts, and like gloo allows sizes that differ.
void Checks::check_reduced(const Tensors& tensors) const {
  if (tensors.empty()) invalid("requires non-empty tensor list");
  for (size_t i = 0; i < tensors.size(); ++i) {
    const at::Tensor &first = tensors[0], &tensor = tensors[i];
    check_layout(tensors, i, first);
    if (tensor.layout() != at::kStrided)
      invalid("unsupported layout: only supports dense tensors", at_index(i, at::kStrided, tensor.layout()));
    if (tensor.scalar_type() != first.scalar_type())
      invalid("tensors must all have the same type", at_index(i, first.scalar_type(), tensor.scalar_type()));
    check_tensor(tensor);
  }
}

void Checks::check_same_length(size_t outputs, size_t inputs) const {
  if (outputs != inputs)
    invalid("requires input/output tensor lists to have the same length: there are ", inputs, " inputs and ", outputs,
            " outputs");
}

void Checks::check_list(const Tensors& tensors) const {
  if (tensors.empty()) invalid("requires non-empty tensor list");
  if (!tensors[0].defined()) invalid("requires defined tensors");
  if (!tensors[0].is_cpu()) check_single(tensors);
  check_alike(tensors, tensors[0]);
}

void Checks::check_coalesced(const std::vector<Tensors>& outputs, const Tensors& inputs) const {
  if (inputs.empty()) invalid("requires non-empty input tensor list");
  if (outputs.size() != size_t(size_))
    invalid("output lists should be equal to world size: ", outputs.size(), " lists for ", size_, " ranks");
  for (const Tensors& list : outputs) {
    if (list.size() != inputs.size())
      invalid("invalid output size: (expected length ", inputs.size(), ", got ", list.size(), ")");
    for (size_t i = 0; i < list.size(); ++i) {
      if (!list[i].defined() || !inputs[i].defined()) invalid("requires defined tensors");
      if (list[i].sizes() != inputs[i].sizes())
        invalid("invalid size of output tensor", at_index(i, inputs[i].sizes(), list[i].sizes()));
      if (list[i].scalar_type() != inputs[i].scalar_type())
        invalid("invalid tensor type", at_index(i, inputs[i].scalar_type(), list[i].scalar_type()));
    }
  }
}

}  // namespace nvx
