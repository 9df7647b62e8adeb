// Asks `nvx/pool.py` for tensors of a pool, which torch makes.

#include <ATen/ops/empty.h>
#include <torch/csrc/utils/pybind.h>

#include "torch/device/pool.h"

namespace nvx {

at::Tensor pool_tensor(int64_t size, const at::TensorOptions& options) {
  namespace py = pybind11;
  const py::gil_scoped_acquire locked;
  const at::Device device = options.device();
  return py::module_::import("nvx.pool")
      .attr("empty")(size, at::typeMetaToScalarType(options.dtype()), py::cast(c10::Device(device)))
      .cast<at::Tensor>();
}

}  // namespace nvx
