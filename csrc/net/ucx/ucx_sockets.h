#pragma once

#include <string>

namespace nvx::net {

/// The sockets behind the event descriptor of a UCX worker. UCX lets children inherit them. While a child lives that
/// was forked from this process, or started with its descriptors open, peers do not notice the end of this process.
/// Sets close-on-exec on the sockets that exist now.
void close_sockets_on_exec(int sleeps_on);
/// Closes the sockets in a newly forked child. Allocates nothing and takes no lock.
void close_sockets(int sleeps_on);

/// "; this process can open no more files, nor connections: raise the limit (ulimit -n)" if that is so, otherwise
/// empty. UCX's own error does not give this cause.
std::string why_nothing_opens();

}  // namespace nvx::net
