#include "net/descriptors.h"

#include <fcntl.h>
#include <sys/eventfd.h>
#include <sys/resource.h>

#include <algorithm>

#include "base/handle.h"

namespace nvx::net {

void make_room_for_descriptors(size_t more) {
  const Fd lowest(eventfd(0, EFD_CLOEXEC));  // takes the lowest free number
  rlimit allowed{};
  if (!lowest || getrlimit(RLIMIT_NOFILE, &allowed) != 0) return;
  const auto wanted = std::min<rlim_t>(rlim_t(lowest.get()) + more, allowed.rlim_cur - 1);
  const Fd high(fcntl(lowest.get(), F_DUPFD_CLOEXEC, int(std::min<rlim_t>(wanted, 1 << 20))));
}

}  // namespace nvx::net
