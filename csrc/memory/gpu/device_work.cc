#include "memory/gpu/device_work.h"

#include <cstring>
#include <string>
#include <thread>
#include <utility>

#include "base/error.h"
#include "base/hash.h"
#include "base/text.h"
#include "memory/driver/thread_call.h"

namespace nvx {

DeviceWork::DeviceWork(std::shared_ptr<DeviceDriver> driver, int device,
                       std::vector<std::shared_ptr<DeviceRegion>> touches)
    : driver_(std::move(driver)), device_(device), touches_(std::move(touches)) {
  check_driver(*driver_, driver_->create_stream(device_, &stream_), "cuStreamCreateWithPriority", device_);
}

DeviceWork::~DeviceWork() {
  if (settled_) log_failed_call(*driver_, driver_->destroy_stream(device_, stream_), "cuStreamDestroy");
  if (settled_) return;
  for (const auto& region : touches_) region->abandon();
}

void DeviceWork::copy(DevicePtr to, DevicePtr from, size_t bytes) {
  check_driver(*driver_, driver_->copy(device_, stream_, to, from, bytes), "cuMemcpyAsync", device_);
  settled_ = false;
}

void DeviceWork::fill(DevicePtr to, uint8_t value, size_t bytes) {
  check_driver(*driver_, driver_->fill(device_, stream_, to, value, bytes), "cuMemsetD8Async", device_);
  settled_ = false;
}

bool DeviceWork::drain(const Deadline& deadline, std::chrono::microseconds pause) {
  while (!settled_) {
    bool done = false;
    check_driver(*driver_, driver_->drained(device_, stream_, &done), "cuStreamQuery", device_);
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

// --- checks by moving data

namespace {

uint64_t word_of(uint64_t seed, uint64_t i) { return Hash().add(seed + i * 0x9e3779b97f4a7c15).value(); }

void write_pattern(std::byte* at, uint64_t seed) {
  for (size_t i = 0; i < kCheckBytes / sizeof(uint64_t); ++i) {
    const uint64_t word = word_of(seed, i);
    std::memcpy(at + i * sizeof word, &word, sizeof word);
  }
}

/// The offset of the first byte that differs, or kCheckBytes if none does.
size_t first_difference(const std::byte* at, uint64_t seed) {
  for (size_t i = 0; i < kCheckBytes / sizeof(uint64_t); ++i) {
    const uint64_t word = word_of(seed, i);
    if (std::memcmp(at + i * sizeof word, &word, sizeof word) != 0) return i * sizeof word;
  }
  return kCheckBytes;
}

PairVerdict move_data(PinnedMemory& pinned, const PairCheck& check, const Deadline& deadline) {
  const std::shared_ptr<DeviceRegion> buffer = pinned.get(check.device, kCheckBytes);
  std::vector<std::shared_ptr<DeviceRegion>> touches = check.holds;
  touches.push_back(buffer);
  DeviceWork work(pinned.driver(), check.device, std::move(touches));
  const auto hung = [&](const char* what) {
    return PairVerdict{PairState::kHung, std::string(what) + " did not end within " + how_long(deadline)};
  };
  return work.carry_out([&]() -> PairVerdict {
    if (check.from) {
      work.copy(buffer->base(), check.from, kCheckBytes);
      if (!work.drain(deadline)) return hung("reading");
      const size_t at = first_difference(buffer->host(), check.expect);
      if (at < kCheckBytes) return {PairState::kCorrupt, "the data read differs at byte " + std::to_string(at)};
    }
    if (check.to) {
      // By the deadline the other ranks have decided, so nothing may be written to memory that they expect at rest.
      if (deadline.passed(Clock::now())) return hung("reading");
      write_pattern(buffer->host(), check.leave);
      work.copy(check.to, buffer->base(), kCheckBytes);
      if (!work.drain(deadline)) return hung("writing");
    }
    return {};
  });
}

}  // namespace

PairVerdict run_check(const std::shared_ptr<PinnedMemory>& pinned, const PairCheck& check, const Deadline& deadline) {
  return run_work([pinned, check, deadline] { return move_data(*pinned, check, deadline); }, deadline);
}

}  // namespace nvx
