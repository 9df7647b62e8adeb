#pragma once

#include <cstddef>
#include <span>

#include "base/config.h"
#include "kernel/cpu/pad.h"
#include "kernel/reduce/dtype.h"

/// Decides which collectives and messages of device tensors go to NCCL. Pure, by facts that all ranks share.
namespace nvx {

/// One collective. `bytes`: the longest input or output of any rank.
struct HandOverCall {
  kernel::Collective collective;
  DType dtype;
  ReduceOp op;  ///< ignored unless the collective reduces
  size_t bytes;
};

/// The reason not to hand the collective over; null if it is handed over.
const char* why_not_handed_over(const HandOverCall& call, std::span<const HandOver> rules);

/// Whether a message is handed over. Its size decides, which alone both its ranks know before they communicate.
bool is_message_handed_over(size_t bytes, std::span<const HandOver> rules);

const HandOver* rule_for(kernel::Collective collective, std::span<const HandOver> rules);

}  // namespace nvx
