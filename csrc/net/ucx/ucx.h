#pragma once

#include <memory>
#include <string>

#include "net/link.h"

namespace nvx::net {

/// A link over UCX: RDMA where there is a NIC for it, else TCP. Throws Error where there is no UCX, with what to type.
/// met_at: the host at which the ranks met, by name or address, where that is known.
std::unique_ptr<Link> open_ucx(const std::string& met_at = "");

/// Whether open_ucx() could work: nvx was built with UCX's headers.
bool built_with_ucx();

}  // namespace nvx::net
