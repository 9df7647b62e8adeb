#pragma once

#include <cstdint>

#include "base/error.h"
#include "kernel/exec.h"
#include "kernel/gpu/device_pad.h"

/// The signals of symmetric memory (group/p2p/symmetric.h) in the order of a stream, by one block. Its pads are not the
/// channel's. Of the channel it uses the rank, and the words by which kernels give up: the deadline, the abort word and
/// the verdict.
namespace nvx::kernel {

struct SignalJob {
  static constexpr uint32_t kCall = UINT32_MAX;  ///< the number of the operation, in verdicts

  uint32_t* const* pads = nullptr;  ///< by rank, in memory of the device
  uint32_t channel = 0;
  int32_t peer = -1;        ///< -1: all others
  bool puts = false;        ///< puts a signal to the peer
  bool waits = false;       ///< then takes one of the peer's
  uint64_t timeout_ns = 0;  ///< 0: no limit
};

/// Release by its puts, acquire by its waits, at system scope: a barrier orders the writes of all ranks' streams before
/// it and their reads behind it. Only the sender sets a word to 1, and only the receiver to 0, so loads and stores
/// suffice: over PCIe, an atomic exchange would be a separate read and write. False on a lane that gave up.
template <class Machine>
NVX_HD bool run_signals(const Machine& machine, const DeviceChannel& channel, const SignalJob& job) {
  auto* const state = reinterpret_cast<RankState*>(channel.state + DeviceState::rank());
  TileExec<Machine> ex(machine, state, channel.control, job.timeout_ns, SignalJob::kCall);
  const uint32_t ranks = channel.shape.ranks, first = job.peer < 0 ? 0 : uint32_t(job.peer);
  const uint32_t end = job.peer < 0 ? ranks : first + 1;
  bool well = ex.load(state->failed) == 0;
  const auto each = [&](uint32_t receiver, uint32_t sender, uint32_t peer, uint32_t from, uint32_t to) {
    uint32_t& word = job.pads[receiver][job.channel * ranks + sender];
    PendingWait pending{int(peer), Stamp(from), Stamp(to)};
    well = well && ex.wait(pending, [&] { return ex.acquire(word) == from; });
    if (well) ex.signal(word, to);
  };
  for (uint32_t p = first + uint32_t(ex.lane()); job.puts && p < end; p += uint32_t(ex.lanes())) {
    if (job.peer >= 0 || p != channel.rank) each(p, channel.rank, p, 0, 1);
  }
  for (uint32_t p = first + uint32_t(ex.lane()); job.waits && p < end; p += uint32_t(ex.lanes())) {
    if (job.peer >= 0 || p != channel.rank) each(channel.rank, p, p, 1, 0);
  }
  return well;
}

/// Runs the job on a stream (a cudaStream_t) of the device of the rank's memory. Neither waits nor allocates.
Status signal_cuda(const DeviceChannel& channel, const SignalJob& job, void* stream);

/// The kernel, for load_cuda(). A build without CUDA has none.
const void* signal_kernel();

}  // namespace nvx::kernel
