#pragma once

#include <string>
#include <vector>

#include "net/ucx/ucx_address.h"

namespace nvx::net {

/// A libucp.so.0 on this machine, not loaded.
struct UcxCandidate {
  std::string path;    ///< with symbolic links resolved
  UcxVersion version;  ///< the version in the file; 0.0.0 if none is found
  bool rdma = false;   ///< an RDMA module is installed beside it
};

/// The candidate at this path, which may be the library or its folder; empty if there is none.
std::vector<UcxCandidate> candidates_at(const std::string& path);

/// Adds a path, of a library or its folder, to the search. Has an effect until the first link is opened.
void add_ucx_place(std::string path);

/// Searches the loader's folders, UCX_HOME, HPCX_UCX_DIR, and the added paths.
std::vector<UcxCandidate> find_ucx();

/// Sorts candidates: those with RDMA first if the machine has RDMA, then newer before older. Omits too old versions.
std::vector<UcxCandidate> in_order(std::vector<UcxCandidate> candidates, bool machine_has_rdma);

/// All libucps in this process, of any version, in load order. Two of the same SONAME would share libucs and crash.
std::vector<std::string> loaded_ucx();

}  // namespace nvx::net
