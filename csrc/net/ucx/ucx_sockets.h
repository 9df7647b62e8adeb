#pragma once

#include <string>

namespace nvx::net {

/// The sockets behind what a UCX worker sleeps on. UCX lets children inherit them: while one lives that was forked from
/// this process, or started by it with its descriptors open, peers would not hear that this process has ended.
///
/// Marks those that there are now, so that they are closed where another program begins.
void close_sockets_on_exec(int sleeps_on);
/// Closes them, in a child just forked: allocates nothing, takes no lock.
void close_sockets(int sleeps_on);

/// "; this process can open no more files, nor connections: raise the limit (ulimit -n)", where that is so; else empty.
/// UCX itself says only that something failed.
std::string why_nothing_opens();

}  // namespace nvx::net
