#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "group/plan/operation.h"

namespace nvx {

/// Has a backend carry an operation out on the current stream, synchronously as torch calls it. Throws what that does.
void call_delegate(c10d::Backend& backend, const Operation& operation, at::Device device);

}  // namespace nvx
