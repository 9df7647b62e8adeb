#pragma once

#include <cstddef>

#include "kernel/cpu/channel.h"
#include "kernel/exec.h"

namespace nvx::kernel {

struct Piece;

/// The algorithms inside a host, one row each in launch_cpu.cc.
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

/// Everything that algorithms read and write. Each uses some of the fields.
struct Work {
  Call call;
  const std::byte* in = nullptr;
  std::byte* out = nullptr;
  size_t count = 0;             ///< elements of in
  const Piece* send = nullptr;  ///< a piece for each rank
  const Piece* recv = nullptr;
  size_t bytes = 0;  ///< about how large it is; 0: not told, or this rank writes nothing for others
  bool meets_all = true;
  int meets = -1;
};

/// Runs one collective of this rank to its end. False: the Exec has the verdict.
bool launch_cpu(Algorithm algorithm, CpuExec& ex, Channel& channel, const Work& work);

}  // namespace nvx::kernel
