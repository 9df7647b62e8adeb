#pragma once

#include <cstddef>

namespace nvx::net {

/// Makes the kernel grow this process's descriptor table by `more` entries, within the limit of the process. The kernel
/// otherwise doubles a full table when the next descriptor is opened. In a process with threads, that open() waits
/// until every processor has passed through the scheduler, and so does every thread that opens a descriptor or waits
/// for a lock of the opener. This takes milliseconds, but seconds if many processes share few processors, and peers
/// hear nothing meanwhile.
void make_room_for_descriptors(size_t more);

}  // namespace nvx::net
