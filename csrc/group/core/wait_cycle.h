#pragma once

#include <string>

#include "base/deadline.h"
#include "group/core/diagnosis.h"
#include "group/setup/members.h"

namespace nvx {

/// A cycle of waits that a wait of this rank, which has timed out, belongs to: "rank 0 waits in group 1 (all_reduce)
/// for rank 1, rank 1 waits in group 2 (recv) for rank 0", with global ranks. Empty if there is none among the
/// processes of this host whose status pages this process can read. `call`: "all_reduce(sum, f32, 4 elements) #1".
///
/// Each wait of a cycle was in progress at one moment, so only timeouts ended it. Waits of one group's collectives
/// alone are no cycle: a rank that was stopped in one has not seen yet that its wait is over.
std::string cycle_of_waits(const Members& members, const Awaited& awaited, const std::string& call,
                           Clock::time_point began);

}  // namespace nvx
