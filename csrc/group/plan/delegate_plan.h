#pragma once

#include <cstddef>
#include <span>

#include "base/config.h"
#include "kernel/cpu/pad.h"
#include "kernel/reduce/dtype.h"

/// Decides which collectives and messages of device tensors go to NCCL. Pure, by facts that all ranks share.
namespace nvx {

/// A collective that may be delegated. `bytes`: the longest input or output of any rank.
struct DelegateQuery {
  kernel::Collective collective;
  DType dtype;
  ReduceOp op;  ///< ignored unless the collective reduces
  size_t bytes;
};

/// The reason why the collective is not delegated; null if it is.
const char* why_not_delegated(const DelegateQuery& call, std::span<const DelegateRule> rules);

/// Whether a message is delegated. That depends on its size alone: both its ranks know it before they communicate.
bool is_message_delegated(size_t bytes, std::span<const DelegateRule> rules);

const DelegateRule* rule_for(kernel::Collective collective, std::span<const DelegateRule> rules);

}  // namespace nvx
