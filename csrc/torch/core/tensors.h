#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include <cstddef>
#include <optional>
#include <vector>

#include "kernel/reduce/dtype.h"

namespace nvx {

using Tensors = std::vector<at::Tensor>;
using IntrusiveWork = c10::intrusive_ptr<c10d::Work>;

/// Memory of a tensor.
struct MemorySpan {
  const std::byte* begin = nullptr;
  const std::byte* end = nullptr;

  bool overlaps(const MemorySpan& other) const { return begin < other.end && other.begin < end; }
  bool operator==(const MemorySpan&) const = default;
};

DType dtype_of(at::ScalarType type);
inline DType dtype_of(const at::Tensor& tensor) { return dtype_of(tensor.scalar_type()); }
/// The reverse. None for `DType::kBytes`, which stands for any type.
std::optional<at::ScalarType> torch_type_of(DType dtype);

}  // namespace nvx
