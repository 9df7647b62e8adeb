#pragma once

#include <cstddef>

namespace nvx::net {

/// Has the kernel make room in this process's table of descriptors for so many more, as far as the process may have
/// them. By itself it doubles a table that is full, when the next one is opened. In a process with threads whoever
/// opens that one waits until every processor has passed through the scheduler, and with it all who open one or wait
/// for a lock that it holds: milliseconds, but seconds where many processes share few processors, in which peers hear
/// nothing.
void make_room_for_descriptors(size_t more);

}  // namespace nvx::net
