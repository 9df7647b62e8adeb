// The device interface of c10: streams, events, pinned host memory.

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

#include <pthread.h>
#include <torch/version.h>

#include "graph.h"
#include "kernels.h"
#include "memory.h"
#include "rules.h"
#include "streams.h"

namespace fake {

namespace {

MarkPtr mark_of(void* event) { return event == nullptr ? nullptr : static_cast<Event*>(event)->get(); }

// For queries from the host, which a capture may forbid.
MarkPtr asked_for(void* event) {
  MarkPtr mark = mark_of(event);
  if (mark) expect_on(static_cast<Event*>(event)->device);
  if (mark && mark->graph()) {
    char thread[16] = "";
    pthread_getname_np(pthread_self(), thread, sizeof thread);
    mark->graph()->fault("no thread can query an event of a capture, but this thread did: " + std::string(thread));
  }
  check_query();
  if (mark) forbid_beside_captures("no thread may query an event beside this capture");
  return mark;
}

struct FakeGuard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kFake; }

  c10::Device exchangeDevice(c10::Device device) const override {
    if (device.index() >= 0) counters[kDevicesChosen] |= int64_t(1) << device.index();
    return {kFake, exchange_device(device.index())};
  }
  c10::Device getDevice() const override { return {kFake, current_device()}; }
  void setDevice(c10::Device device) const override { exchange_device(device.index()); }
  void uncheckedSetDevice(c10::Device device) const noexcept override {
    if (device.index() < device_count()) exchange_device(device.index());
  }
  c10::DeviceIndex deviceCount() const noexcept override { return device_count(); }
  c10::DeviceCapability getDeviceCapability(c10::Device) const override { return {}; }

  c10::Stream getStream(c10::Device device) const override {
    if (is_broken(Rule::kCurrentStream)) return default_stream(device.index());
    return current_stream(device.index());
  }
  c10::Stream getDefaultStream(c10::Device device) const override { return default_stream(device.index()); }
  c10::Stream getStreamFromGlobalPool(c10::Device device, bool high_priority = false) const override {
    return pool_stream(device.index(), high_priority ? Priority::kHigh : Priority::kNormal);
  }
  c10::Stream getNewStream(c10::Device device, int = 0) const override { return new_stream(device.index()); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return exchange_stream(stream); }
  void* getStreamNativeHandle(const c10::Stream stream) const override { return &queue_of(stream); }
  bool queryStream(const c10::Stream& stream) const override {
    if (const auto graph = queue_of(stream).graph()) graph->fault("no thread can query a stream in a capture");
    forbid_beside_captures("no thread may query a stream beside this capture");
    return queue_of(stream).idle();
  }
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 13
  bool isStreamCapturing(const c10::Stream& stream) const override {
    expect_on(stream.device_index());
    return queue_of(stream).graph() != nullptr;
  }
#endif
  void synchronizeStream(const c10::Stream& stream) const override { synchronize_stream(stream); }
  void synchronizeDevice(const c10::DeviceIndex device) const override {
    count(kDeviceSyncs);
    if (is_capturing()) fault("no thread can wait for a device during a capture");
    expect_on(device);
    drain_device(device);
  }

  void record(void** event, const c10::Stream& stream, const c10::DeviceIndex device,
              const c10::EventFlag) const override {
    TORCH_CHECK(device == -1 || device == stream.device_index(), "an event of fakegpu:", int(device),
                " cannot be recorded on ", stream);
    check_record();
    if (*event == nullptr) *event = new Event(), count(kEventsMade);
    count(kEventRecords);
    expect_on(stream.device_index());
    static_cast<Event*>(*event)->device = stream.device_index();
    static_cast<Event*>(*event)->set(queue_of(stream).mark(Pace::kDelayed));
  }
  void block(void* event, const c10::Stream& stream) const override {
    MarkPtr mark = mark_of(event);
    if (mark == nullptr || is_broken(Rule::kEventWaits)) return;
    count(kStreamWaits);
    expect_on(stream.device_index());
    queue_of(stream).wait_for(std::move(mark));
  }
  bool queryEvent(void* event) const override {
    const MarkPtr mark = asked_for(event);
    return mark == nullptr || mark->passed();
  }
  void synchronizeEvent(void* event) const override {
    count(kEventSyncs);
    if (const MarkPtr mark = asked_for(event)) mark->wait();
  }
  double elapsedTime(void* first, void* last, const c10::DeviceIndex) const override {
    const MarkPtr from = mark_of(first), to = mark_of(last);
    TORCH_CHECK(from && to && from->passed() && to->passed(), "both events must have been recorded and have passed");
    return std::chrono::duration<double, std::milli>(to->when() - from->when()).count();
  }
  void destroyEvent(void* event, const c10::DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }

  // Like CUDA's allocator, this finds only its own blocks, not views that others made of them.
  void recordDataPtrOnStream(const c10::DataPtr& data, const c10::Stream& stream) const override {
    if (data.get() == nullptr || data.get_deleter() != device_allocator().raw_deleter()) return;
    count(kDataRecorded);
    if (!is_broken(Rule::kRecordedUse)) record_use(data.get(), queue_of(stream));
  }
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, FakeGuard);

struct FakeHooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return device_count(); }
  c10::DeviceIndex getCurrentDevice() const override { return current_device(); }
  void setCurrentDevice(c10::DeviceIndex device) const override { exchange_device(device); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const override { return exchange_device(device); }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const override { return exchange_device(device); }

  bool isPinnedPtr(const void* data) const override { return is_pinned(data); }
  c10::Allocator* getPinnedMemoryAllocator() const override { return &pinned_allocator(); }
  // Memory that others map counts as the current device's.
  c10::Device getDeviceFromPtr(void* data) const override {
    return {kFake, is_device_address(data) ? device_of(data) : current_device()};
  }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const override {
    resize_storage(storage, bytes);
  }

  // Random operators run on the CPU with the CPU's generator.
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override {
    return at::detail::getDefaultCPUGenerator();
  }
  at::Generator getNewGenerator(c10::DeviceIndex = -1) const override { return at::detail::createCPUGenerator(); }
};

const bool registered = [] {
  at::RegisterPrivateUse1HooksInterface(new FakeHooks());
  c10::SetAllocator(kFake, &device_allocator());
  return true;
}();

}  // namespace

}  // namespace fake
