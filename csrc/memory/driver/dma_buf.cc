#include "memory/driver/dma_buf.h"

#include "base/error.h"
#include "memory/driver/thread_call.h"

namespace nvx {

std::vector<DmaBuf> dma_bufs(const std::shared_ptr<DeviceDriver>& driver, const Deadline& deadline) {
  const auto ask = [driver] {
    std::vector<DmaBuf> found;
    const auto done = [&](DriverCode code, const char* call) {
      if (code) throw Error(Code::kSystem, std::string("nvx: ") + call + ": " + driver->words(code));
    };
    int count = 0;
    done(driver->count(&count), "cuDeviceGetCount");
    for (int device = 0; device < count; ++device) {
      DeviceFacts facts;
      done(driver->describe(device, &facts), "cuDeviceGetAttribute");
      found.push_back({facts.bus, facts.name, facts.exports_dma_buf});
    }
    return found;
  };
  return call_or_throw<std::vector<DmaBuf>>("the query of the GPUs' export capabilities", deadline, ask);
}

}  // namespace nvx
