#pragma once

#include <torch/csrc/utils/pybind.h>

namespace nvx {

/// Exposes the core's view of the machine for `nvx topo`, as plain Python objects.
void register_inspection(pybind11::module_& m);

}  // namespace nvx
