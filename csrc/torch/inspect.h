#pragma once

#include <torch/csrc/utils/pybind.h>

namespace nvx {

/// What `nvx topo` asks of the core: the machine as it sees it, as plain Python objects.
void register_inspection(pybind11::module_& m);

}  // namespace nvx
