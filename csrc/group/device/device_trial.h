#pragma once

#include <chrono>
#include <memory>
#include <vector>

#include "base/words.h"
#include "kernel/gpu/launch_cuda.h"
#include "memory/gpu/device_share.h"
#include "memory/gpu/device_work.h"

/// The first operations of a channel. Copies have shown that two devices reach each other's memory; whether what
/// kernels store there arrives, and in order, only kernels show. So before anybody relies on it they exchange a piece
/// in packets and one in chunks, in one launch for all pairs, and for a bounded time.
namespace nvx {

/// Operations that a trial is, and epochs that it takes.
constexpr uint32_t kTrialEpochs = 2;

struct TrialSetting {
  int rank = 0;
  int device = 0;
  kernel::DeviceChannel channel;
  const kernel::Control* control = nullptr;  ///< the channel's, as the host sees it
  uint32_t first_epoch = 0;                  ///< with which the pads were formatted
  std::vector<kernel::PeerPads> pads;        ///< this rank's; each formatted, and so are the peers'
  std::chrono::milliseconds patience{2000};  ///< of kernels, with each of the two operations
  std::chrono::milliseconds farewell{};      ///< with the device, to say that they have ended
  RankNames name = of_rank;
  /// Pinned host memory of trial_bytes() or more, and all that the kernels touch, that too.
  std::shared_ptr<DeviceRegion> desk;
  std::vector<std::shared_ptr<DeviceRegion>> touches;
};

/// What a trial needs of pinned host memory.
size_t trial_bytes(const kernel::DeviceShape& shape);

struct TrialVerdict {
  std::vector<PairVerdict> peers;  ///< by rank: how this one and that one get on with each other
  /// Of one rank at least they did not end well. Where no pair is to blame, a rank may have come too late.
  bool failed = false;
  std::string why;  ///< one of the reasons, the same on all ranks
};

/// A step of all ranks together, on a thread whose current device is this rank's, when all pads are formatted. The
/// verdicts of a pair are the same on both of its ranks, and so is `failed` on all. Throws Error: kTimeout where this
/// rank's device does not say that its kernels have ended, so that they may write yet.
TrialVerdict try_kernels(std::shared_ptr<DeviceDriver> driver, Exchange& exchange, kernel::KernelLauncher& launcher,
                         const TrialSetting& setting);

}  // namespace nvx
