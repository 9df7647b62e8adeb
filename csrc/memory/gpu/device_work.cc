#include "memory/gpu/device_work.h"

#include <thread>
#include <utility>

#include "base/error.h"
#include "memory/driver/thread_call.h"

namespace nvx {

DeviceWork::DeviceWork(std::shared_ptr<DeviceDriver> driver, int device,
                       std::vector<std::shared_ptr<DeviceRegion>> touches)
    : driver_(std::move(driver)), device_(device), touches_(std::move(touches)) {
  demand(*driver_, driver_->open_queue(device_, &queue_), "cuStreamCreateWithPriority", device_);
}

DeviceWork::~DeviceWork() {
  if (settled_) note_refusal(*driver_, driver_->close_queue(device_, queue_), "cuStreamDestroy");
  if (settled_) return;
  for (const auto& region : touches_) region->abandon();
}

void DeviceWork::copy(DevicePtr to, DevicePtr from, size_t bytes) {
  demand(*driver_, driver_->copy(device_, queue_, to, from, bytes), "cuMemcpyAsync", device_);
  settled_ = false;
}

void DeviceWork::fill(DevicePtr to, uint8_t value, size_t bytes) {
  demand(*driver_, driver_->fill(device_, queue_, to, value, bytes), "cuMemsetD8Async", device_);
  settled_ = false;
}

bool DeviceWork::drain(const Deadline& deadline, std::chrono::microseconds pause) {
  while (!settled_) {
    bool done = false;
    demand(*driver_, driver_->drained(device_, queue_, &done), "cuStreamQuery", device_);
    settled_ = done;
    if (done) break;
    if (deadline.passed(Clock::now())) return false;
    if (pause.count() > 0) std::this_thread::sleep_for(pause);
  }
  return true;
}

PairVerdict DeviceWork::carry_out(const std::function<PairVerdict()>& steps) {
  try {
    return steps();
  } catch (const Error& error) {
    if (settled_) throw;
    return {PairState::kHung, error.reason() + ", and earlier work may still be running"};
  }
}

PairVerdict run_work(std::function<PairVerdict()> work, const Deadline& deadline) {
  try {
    return call_or_throw<PairVerdict>("a driver call", deadline, std::move(work));
  } catch (const Error& error) {
    return {error.code() == Code::kTimeout ? PairState::kHung : PairState::kRefused, error.reason()};
  }
}

PairVerdict work_now(const std::shared_ptr<DeviceDriver>& driver, int device,
                     const std::vector<std::shared_ptr<DeviceRegion>>& touches, const std::string& what,
                     const std::function<void(DeviceWork&)>& begin, const Deadline& deadline) {
  const auto work = [=]() -> PairVerdict {
    DeviceWork work(driver, device, touches);
    return work.carry_out([&]() -> PairVerdict {
      begin(work);
      if (work.drain(deadline)) return {};
      return {PairState::kHung, what + " did not end within " + how_long(deadline)};
    });
  };
  return run_work(work, deadline);
}

}  // namespace nvx
