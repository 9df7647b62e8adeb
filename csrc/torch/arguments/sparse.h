#pragma once

#include "torch/arguments/arguments.h"
#include "torch/call/call.h"

namespace nvx {

/// Begins the all-reduce of sparse tensors. Several tensors are summed first, and each gets the result. A device's
/// tensor goes through host memory: the number of its entries is not known before its stream has reached the call. So
/// the host waits for that, and the operation has ended when this returns, asynchronous or not.
IntrusiveWork all_reduce_sparse(CallContext& context, const Arguments& args, Tensors& tensors,
                                const c10d::AllreduceOptions& opts);

}  // namespace nvx
