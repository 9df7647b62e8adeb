#pragma once

#include <string>

#include "memory/shm/shm_registry.h"
#include "torch/core/argument_error.h"

namespace nvx {

/// The process in which an object was made. A forked child has copies of its parent's groups and works, but neither
/// their memory nor the threads that held their locks at the fork. So the child must not touch them.
class Origin {
 public:
  bool elsewhere() const { return generation_ != fork_generation(); }
  void check(int rank) const {
    if (!elsewhere()) return;
    throw_argument_error(
        "nvx: this process was forked from rank " + std::to_string(rank) +
        "; a group does not cross a fork. Next: start ranks with spawn, or, if the parent has no connections to other "
        "hosts, call init_process_group in the child");
  }

 private:
  uint32_t generation_ = fork_generation();
};

}  // namespace nvx
