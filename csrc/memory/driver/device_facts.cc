#include "memory/driver/device_facts.h"

#include "base/error.h"
#include "memory/driver/thread_call.h"

namespace nvx {

std::vector<DeviceFacts> device_facts(const std::shared_ptr<DeviceDriver>& driver, const Deadline& deadline) {
  const auto ask = [driver] {
    std::vector<DeviceFacts> found;
    const auto done = [&](DriverCode code, const char* call) {
      if (code) throw Error(Code::kSystem, std::string("nvx: ") + call + ": " + driver->words(code));
    };
    int count = 0;
    done(driver->count(&count), "cuDeviceGetCount");
    for (int device = 0; device < count; ++device) {
      done(driver->describe(device, &found.emplace_back()), "cuDeviceGetAttribute");
    }
    return found;
  };
  return call_or_throw<std::vector<DeviceFacts>>("the query of the GPUs", deadline, ask);
}

}  // namespace nvx
