#pragma once

#include <memory>
#include <string>

#include "net/link.h"
#include "net/tcp/job_key.h"

namespace nvx::net {

/// Opens a link over TCP between holders of the key only. Throws Error. `store_host`: as for open_ucx().
std::unique_ptr<Link> open_tcp(const JobKey& key, const std::string& store_host = "");

}  // namespace nvx::net
