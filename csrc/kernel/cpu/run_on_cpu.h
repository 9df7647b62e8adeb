#pragma once

#include <cstddef>

#include "kernel/cpu/channel.h"
#include "kernel/exec.h"

namespace nvx::kernel {

struct Piece;

/// The algorithms inside a host, one row each in run_on_cpu.cc.
enum class Algorithm {
  kBarrier,
  kReduceOneShot,
  kReducePipelined,
  kReduceScatterOneShot,
  kReduceScatterPipelined,
  kPublishOneShot,
  kPublishPipelined,
  kExchange,
};

const char* name(Algorithm algorithm);

/// The inputs and outputs of all algorithms. Each algorithm uses some of the fields.
struct CollectiveArgs {
  Call call;
  const std::byte* in = nullptr;
  std::byte* out = nullptr;
  size_t count = 0;             ///< elements of `in`
  const Piece* send = nullptr;  ///< one piece per rank
  const Piece* recv = nullptr;
  size_t bytes = 0;       ///< the approximate size; 0: unknown, or this rank writes nothing for others
  bool meets_all = true;  ///< in an exchange: this rank waits for all arrivals ...
  int meets = -1;         ///< ... or else for one rank's; -1: for none
};

/// Runs one collective on this rank to its end. On false, the Exec has the verdict.
bool run_on_cpu(Algorithm algorithm, CpuExec& ex, Channel& channel, const CollectiveArgs& args);

}  // namespace nvx::kernel
