#pragma once

#include <cstddef>
#include <string>

namespace nvx::net {

/// Makes the kernel grow this process's descriptor table by `more` entries, within the limit of the process. The kernel
/// otherwise doubles a full table when the next descriptor is opened. In a process with threads, that open() waits
/// until every processor has passed through the scheduler, and so does every thread that opens a descriptor or waits
/// for a lock of the opener. This takes milliseconds, but seconds if many processes share few processors, and peers
/// get no answer meanwhile.
void grow_descriptor_table(size_t more);

/// Makes the kernel give up a silent connection after NVX_LIVENESS_S and 10 s, 20 s at least, unless the socket has
/// such a limit. The kernel doubles the time to the next retransmission each time, so a link that is back after 7 s may
/// carry nothing until the 13th second. Limits that time to a tenth of NVX_LIVENESS_S, one second at least
/// (Linux 6.15). Without the first limit, the second one would shorten the time after which the kernel gives up.
void limit_silence(int socket);

/// The sockets that an epoll watches, itself or through epolls inside it, such as the event descriptor of a UCX worker.
/// While a child lives that was forked from this process, or started with its sockets open, peers do not notice the end
/// of this process. Sets close-on-exec on the sockets that exist now, limits their silence, and removes inherited
/// filters.
void claim_sockets(int epoll);
/// Closes the sockets in a newly forked child. Allocates nothing and takes no lock.
void close_sockets(int epoll);

/// Throws Error unless this process can open `count` more descriptors now. what: cannot be done without them.
void require_descriptors(size_t count, const std::string& what);

/// "; this process can open no more files, nor connections: raise the limit (ulimit -n)" if that is so, otherwise
/// empty. UCX's own error does not give this cause.
std::string descriptor_limit_hint();

}  // namespace nvx::net
