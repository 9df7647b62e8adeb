#pragma once

#include "torch/arguments/arguments.h"
#include "torch/call/call.h"

namespace nvx {

/// Begins an all-reduce of a sparse tensor. A device's tensor goes through host memory: how many entries it has is not
/// known before its stream has come to the call, so the host waits for that, and the operation has ended when this
/// returns, asynchronous or not.
IntrusiveWork all_reduce_sparse(CallContext& context, const Arguments& args, Tensors& tensors,
                                const c10d::AllreduceOptions& opts);

}  // namespace nvx
