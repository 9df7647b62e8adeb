#pragma once

#include <memory>
#include <string>

#include "net/link.h"

namespace nvx::net {

/// Opens a link over UCX: RDMA if there is a NIC for it, otherwise TCP. Throws Error, with the command to install UCX,
/// if there is none. `met_at`: the name or address of the host at which the ranks met, if known.
std::unique_ptr<Link> open_ucx(const std::string& met_at = "");

/// Whether nvx was built with UCX's headers, which open_ucx() needs.
bool built_with_ucx();

}  // namespace nvx::net
