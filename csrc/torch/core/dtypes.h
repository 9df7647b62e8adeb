#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

#include "kernel/reduce/dtype.h"

namespace nvx {

DType dtype_of(at::ScalarType type);
inline DType dtype_of(const at::Tensor& tensor) { return dtype_of(tensor.scalar_type()); }
/// The reverse. None for `DType::kBytes`, which stands for any type.
std::optional<at::ScalarType> torch_type_of(DType dtype);

}  // namespace nvx
