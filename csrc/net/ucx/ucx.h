#pragma once

#include <memory>
#include <string>

#include "net/link.h"

namespace nvx::net {

/// Opens a link over UCX: RDMA if there is a NIC for it, otherwise TCP. Throws Error, with the command to install UCX,
/// if there is none. `store_host`: the name or address of the host that serves the store, if known.
std::unique_ptr<Link> open_ucx(const std::string& store_host = "");

/// Whether nvx was built with UCX's headers, which open_ucx() needs.
bool built_with_ucx();

}  // namespace nvx::net
