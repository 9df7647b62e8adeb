#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace nvx {

/// Whether an input uses memory of an output, and not as its counterpart, which is the very same piece. What is
/// received may then be written before what was there is sent. Tensors that are not contiguous never clash: they get
/// stand-ins.
bool clash(const at::Tensor& input, const at::Tensor& output, bool counterparts);
bool clash(const at::Tensor& input, const std::vector<at::Tensor>& outputs, size_t counterpart);
/// The same of a rank's piece and the whole, one of which is the input; the counterpart is that piece of the whole.
bool clash_within(const at::Tensor& piece, const at::Tensor& whole, int rank);

/// Of each tensor, whether it may use memory that one before it in the list uses.
std::vector<bool> use_memory_again(const std::vector<at::Tensor>& tensors);

}  // namespace nvx
