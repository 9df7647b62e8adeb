#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "group/plan/operation.h"

namespace nvx {

/// Runs an operation on a backend, on the current stream. The call is synchronous in torch's sense. Throws the
/// backend's errors.
void call_delegate(c10d::Backend& backend, const Operation& operation, at::Device device);

}  // namespace nvx
