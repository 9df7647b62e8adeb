// Calls of Python: `nvx/delegate.py` makes the delegate, `nvx/pool.py` tensors of a pool.

#include <torch/csrc/utils/pybind.h>

#include "torch/device/delegate_setup.h"
#include "torch/device/pool.h"

namespace nvx {
namespace {

namespace py = pybind11;

py::object device_object(at::Device device) {
  return py::module_::import("torch").attr("device")(c10::DeviceTypeName(device.type(), /*lower_case=*/true),
                                                     int(device.index()));
}

/// Calls a function of `nvx/delegate.py`. Its exception is rethrown as one of C++: a Python exception must not leave a
/// scope that holds the GIL.
template <class Answer, class... Args>
Answer call_delegate_module(const char* function, at::Device device, const Args&... args) {
  const py::gil_scoped_acquire locked;
  try {
    return py::module_::import("nvx.delegate").attr(function)(args..., device_object(device)).template cast<Answer>();
  } catch (py::error_already_set& error) {
    throw std::runtime_error(error.what());
  }
}

}  // namespace

DelegateInfo find_delegate(at::Device device) {
  const auto [gpu, why_not] = call_delegate_module<std::pair<std::string, std::string>>("probe", device);
  return {gpu, why_not};
}

c10::intrusive_ptr<c10d::Backend> make_delegate(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                                at::Device device) {
  return call_delegate_module<c10::intrusive_ptr<c10d::Backend>>("make", device, store, rank, size);
}

at::Tensor pool_tensor(int64_t size, const at::TensorOptions& options) {
  const py::gil_scoped_acquire locked;
  const at::Device device = options.device();
  return py::module_::import("nvx.pool")
      .attr("empty")(size, at::typeMetaToScalarType(options.dtype()), py::cast(c10::Device(device)))
      .cast<at::Tensor>();
}

}  // namespace nvx
