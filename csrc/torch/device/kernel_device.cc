#include "torch/device/kernel_path.h"

namespace nvx {

at::DeviceType kernel_device() { return at::kCUDA; }

}  // namespace nvx
