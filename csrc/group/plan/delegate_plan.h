#pragma once

#include <cstddef>
#include <span>

#include "base/config.h"
#include "kernel/cpu/pad.h"
#include "kernel/reduce/dtype.h"

/// Which collectives of devices' tensors are handed over to a backend of torch's own, NCCL. Pure, and of what all ranks
/// know alike, so that no rank hands over what another one does not.
namespace nvx {

/// One collective. bytes: of the whole, which is the longest that any rank has of it, given or got.
struct HandOverQuestion {
  kernel::Collective collective;
  DType dtype;
  ReduceOp op;  ///< counts where it reduces
  size_t bytes;
};

/// What keeps it here; null where it is handed over.
const char* why_not_handed_over(const HandOverQuestion& question, std::span<const HandOver> rules);

/// The rule for a collective; null where there is none.
const HandOver* rule_for(kernel::Collective collective, std::span<const HandOver> rules);

}  // namespace nvx
