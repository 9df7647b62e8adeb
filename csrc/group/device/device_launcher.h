#pragma once

#include <memory>
#include <span>
#include <vector>

#include "base/error.h"
#include "kernel/gpu/launch_cuda.h"
#include "memory/driver/device_driver.h"

namespace nvx {

/// Who runs kernels: the device, or the threads of a test that play one. As kernel/gpu/launch_cuda.h has it.
class Launcher {
 public:
  virtual ~Launcher() = default;
  /// Waits for no kernel. stream: of the rank's device, which is the calling thread's current one.
  virtual Status launch(const kernel::DeviceChannel& channel, std::span<const kernel::Job> jobs,
                        std::span<const kernel::Piece> table, void* stream) = 0;
  /// The same on a queue that the driver has opened, for what is tried before anybody has streams.
  virtual Status launch_on_queue(DeviceQueue queue, const kernel::DeviceChannel& channel,
                                 std::span<const kernel::Job> jobs, std::span<const kernel::Piece> table) {
    return launch(channel, jobs, table, reinterpret_cast<void*>(queue));  // libcuda's streams are the runtime's too
  }
  /// Loads every kernel on the calling thread's current device, and says what each asks for.
  virtual Status facts(std::vector<kernel::KernelFacts>* facts) = 0;
  /// Whether all that was launched is known to have ended, well or not. Kernels that ended badly do not say so
  /// themselves: without this, what they used is not used again.
  virtual bool ended() { return false; }
  /// Whether no graph is running that has launches in it, as far as that can be known.
  virtual bool replays_ended() { return true; }
};

/// CUDA's. Whoever has the streams knows better than it what has ended on them.
std::shared_ptr<Launcher> cuda_launcher();

}  // namespace nvx
