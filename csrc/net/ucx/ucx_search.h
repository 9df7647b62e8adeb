#pragma once

#include <string>
#include <vector>

#include "net/ucx/ucx_address.h"

namespace nvx::net {

/// A libucp.so.0 of this machine, not loaded.
struct UcxCandidate {
  std::string path;    ///< without links
  UcxVersion version;  ///< as its file says; 0.0.0 if that is not to be found
  bool rdma = false;   ///< it has a module for RDMA
};

/// The candidate that this file is, if it is one. A folder stands for the libucp.so.0 in it.
std::vector<UcxCandidate> look_at(const std::string& path);

/// One more place where a libucp.so.0 may be: a file or its folder. Counts until the first link is opened.
void add_ucx_place(std::string path);

/// Wherever one may be: the loader's folders, UCX_HOME, HPCX_UCX_DIR, and the places that were added.
std::vector<UcxCandidate> find_ucx();

/// Best first: with RDMA where the machine has RDMA, then the newer. What is too old is left out.
std::vector<UcxCandidate> in_order(std::vector<UcxCandidate> candidates, bool machine_has_rdma);

/// The libucps of any version that are in this process, in the order in which they came. Two of the same SONAME would
/// share libucs, and crash.
std::vector<std::string> loaded_ucx();

}  // namespace nvx::net
