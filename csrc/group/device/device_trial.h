#pragma once

#include <chrono>
#include <memory>
#include <vector>

#include "base/words.h"
#include "kernel/gpu/launch_cuda.h"
#include "memory/gpu/device_share.h"
#include "memory/gpu/device_work.h"

/// The first operations of a channel. Trial copies have shown that two devices reach each other's memory. Only kernels
/// can show that stores of kernels arrive, and in order. So before its first use, all pairs exchange one piece in
/// packets and one in chunks, in one launch and in bounded time.
namespace nvx {

/// The number of operations of a trial, and of epochs that it takes.
constexpr uint32_t kTrialEpochs = 2;

struct TrialSetting {
  int rank = 0;
  int device = 0;
  kernel::DeviceChannel channel;
  const kernel::Control* control = nullptr;  ///< the channel's control block, mapped on the host
  uint32_t first_epoch = 0;                  ///< the epoch with which the pads were formatted
  std::vector<kernel::PeerPads> pads;        ///< this rank's; its pads and its peers' are formatted
  std::chrono::milliseconds patience{2000};  ///< the limit for kernels, for each of the two operations
  std::chrono::milliseconds farewell{};      ///< the limit for the device to report that they have ended
  RankNames name = of_rank;
  /// Pinned host memory of at least `trial_bytes()`. `touches` is all memory that the kernels access, including `desk`.
  std::shared_ptr<DeviceRegion> desk;
  std::vector<std::shared_ptr<DeviceRegion>> touches;
};

/// The size of the pinned host memory that a trial needs.
size_t trial_bytes(const kernel::DeviceShape& shape);

struct TrialVerdict {
  std::vector<PairVerdict> peers;  ///< by rank: the result of this rank's pair with it
  /// At least one rank's kernels did not end well. If no pair is to blame, a rank may have come too late.
  bool failed = false;
  std::string why;  ///< one of the reasons, the same on all ranks
};

/// Collective over all ranks, on a thread whose current device is this rank's, after all pads are formatted. Both ranks
/// of a pair get the same verdict, and all ranks the same `failed`. Throws Error; kTimeout if this rank's device does
/// not report that its kernels have ended, so that they may still write.
TrialVerdict try_kernels(std::shared_ptr<DeviceDriver> driver, Exchange& exchange, kernel::KernelLauncher& launcher,
                         const TrialSetting& setting);

}  // namespace nvx
