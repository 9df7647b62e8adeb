// Makes the delegate in Python: `nvx/delegate.py`.

#include <torch/csrc/utils/pybind.h>

#include "torch/device/delegate_setup.h"

namespace nvx {
namespace {

namespace py = pybind11;

py::object device_object(at::Device device) {
  return py::module_::import("torch").attr("device")(c10::DeviceTypeName(device.type(), /*lower_case=*/true),
                                                     int(device.index()));
}

}  // namespace

DelegateCard look_for_delegate(at::Device device) {
  const py::gil_scoped_acquire locked;
  try {
    const auto [gpu, why_not] = py::module_::import("nvx.delegate")
                                    .attr("look")(device_object(device))
                                    .cast<std::pair<std::string, std::string>>();
    return {gpu, why_not};
  } catch (py::error_already_set& error) {
    throw std::runtime_error(error.what());  // with the GIL held: a Python exception must not leave this function
  }
}

c10::intrusive_ptr<c10d::Backend> make_delegate(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                                at::Device device) {
  const py::gil_scoped_acquire locked;
  try {
    return py::module_::import("nvx.delegate")
        .attr("make")(store, rank, size, device_object(device))
        .cast<c10::intrusive_ptr<c10d::Backend>>();
  } catch (py::error_already_set& error) {
    throw std::runtime_error(error.what());
  }
}

bool python_sees_capture(at::Device device) {
  const py::gil_scoped_acquire locked;
  try {
    return py::module_::import("nvx.delegate").attr("captures")(device_object(device)).cast<bool>();
  } catch (py::error_already_set& error) {
    throw std::runtime_error(error.what());
  }
}

}  // namespace nvx
