#pragma once

#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "group/device/channel_options.h"
#include "memory/gpu/device_work.h"

/// The first operations of a channel. Trial copies have shown that two devices reach each other's memory. Only kernels
/// can show that stores of kernels arrive, and in order, and that they compute what the host computes. So before its
/// first use, all ranks run each hot kernel once on a tiny operation, and the general one on two, in bounded time.
namespace nvx {

/// The operations, and epochs, of a trial: one for each hot kernel, and two in one launch of the general one; with
/// multicast, one more for each of its types.
constexpr uint32_t kTrialEpochs = 14, kMulticastTrialEpochs = 3;

struct Trial {
  const ChannelOptions& options;
  std::chrono::milliseconds drain_timeout{};  ///< the limit for the device to report that the operations have ended
  kernel::DeviceChannel channel{};
  kernel::Control* control = nullptr;    ///< the channel's control block, mapped on the host
  kernel::MulticastView multicast{};     ///< empty if the ranks have no multicast object
  bool shares_gpu = false;               ///< with a rank of another process
  uint32_t first_epoch = 0;              ///< the epoch with which the pads were formatted
  std::vector<kernel::PeerPads> pads{};  ///< this rank's; its pads and its peers' are formatted
  /// Pinned host memory of `trial_bytes()`. `touches`: all memory that the kernels access, `buffer` too.
  std::shared_ptr<DeviceRegion> buffer{};
  std::vector<std::shared_ptr<DeviceRegion>> touches{};

  uint32_t epochs() const { return kTrialEpochs + (multicast.bytes != 0 ? kMulticastTrialEpochs : 0); }
};

/// Whether a result file shows kernels at work on this architecture (90: sm_90) with this CUDA (13000: 13.0).
bool is_shown(int architecture, int cuda);

size_t trial_bytes(const Trial& trial);

struct TrialVerdict {
  std::vector<PairVerdict> peers;  ///< by rank: the result of this rank's pair with it
  /// At least one rank's kernels did not end well. If no pair is to blame, a kernel or a busy device is.
  bool failed = false;
  bool wrong = false;  ///< failed, because a kernel computes other bits than the host: another try would not help
  std::string why;     ///< one of the reasons, the same on all ranks
  /// Why the switch must not add; empty if it may. The same on all ranks, and no failure unless `failed`.
  std::string no_multicast;
  /// The time of one operation, the same on all ranks: the longest of the ranks' times. Of a rank it is the lower
  /// quartile, since other work may delay operations. A rank that shares its GPU takes the median: two processes in
  /// turns end two operations in each turn, so half of the times are near zero.
  std::chrono::microseconds each{0};
};

/// Collective over all ranks, on a thread whose current device is this rank's, after all pads are formatted. Both ranks
/// of a pair get the same verdict, and all ranks the same `failed`. Throws Error; kTimeout if this rank's device does
/// not report that its kernels have ended, so that they may still write.
TrialVerdict try_kernels(std::shared_ptr<DeviceDriver> driver, Bootstrap& bootstrap, kernel::KernelLauncher& launcher,
                         const Trial& trial);

}  // namespace nvx
