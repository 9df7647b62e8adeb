#pragma once

#include <memory>
#include <string>

#include "net/link.h"
#include "net/tcp/job_key.h"

namespace nvx::net {

/// Opens a link over TCP whose connections are made between holders of the key only. Throws Error. `met_at`: the name
/// or address of the host at which the ranks met, if known.
std::unique_ptr<Link> open_tcp(const JobKey& key, const std::string& met_at = "");

}  // namespace nvx::net
