#include "torch/streams/staging_copies.h"

namespace nvx {

at::DeviceType kernel_device() { return at::kCUDA; }

}  // namespace nvx
