#include "group/device/device_launcher.h"

namespace nvx {
namespace {

class CudaLauncher final : public Launcher {
 public:
  Status launch(const kernel::DeviceChannel& channel, std::span<const kernel::Job> jobs,
                std::span<const kernel::Piece> table, void* stream) override {
    return kernel::launch_cuda(channel, jobs, table, stream);
  }
  Status facts(std::vector<kernel::KernelFacts>* facts) override { return kernel::load_cuda(facts); }
};

}  // namespace

std::shared_ptr<Launcher> cuda_launcher() { return std::make_shared<CudaLauncher>(); }

}  // namespace nvx
