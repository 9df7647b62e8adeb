// The devices of the fake accelerator and their streams, as torch names them.
#pragma once

#include <c10/core/Device.h>
#include <c10/core/Stream.h>

#include <array>
#include <atomic>
#include <cstdint>

#include "queue.h"

namespace fake {

constexpr c10::DeviceType kFake = c10::DeviceType::PrivateUse1;
constexpr int kMostDevices = 8;

enum class Priority { kNormal, kHigh };

c10::DeviceIndex device_count();  // FAKE_DEVICE_COUNT, or 2

// The state of the calling thread. Each thread begins on device 0 and on the default stream of every device.
c10::DeviceIndex current_device();
c10::DeviceIndex exchange_device(c10::DeviceIndex device);
c10::Stream current_stream(c10::DeviceIndex device);  // -1: of the current device
c10::Stream exchange_stream(c10::Stream stream);

c10::Stream default_stream(c10::DeviceIndex device);
c10::Stream pool_stream(c10::DeviceIndex device, Priority priority);  // round robin over a shared pool
c10::Stream new_stream(c10::DeviceIndex device);                      // unique until a device has 32 of them

Queue& queue_of(c10::Stream stream);
Queue& current_queue(c10::DeviceIndex device);

void drain_device(c10::DeviceIndex device);
bool drain_all(int64_t most_ms);  // false: timed out

// Counters for tests. A synchronisation is a wait of the host for a queue, from any caller.
enum Counter {
  kStreamSyncs,
  kEventSyncs,
  kDeviceSyncs,
  kDeviceAllocations,
  kPinnedAllocations,
  kStreamWaits,    // a stream that was made to wait for an event
  kDataRecorded,   // recordDataPtrOnStream, record_stream
  kFallbacks,      // operators that ran on the CPU
  kCaptureFaults,  // calls that CUDA forbids during a capture
  kUnreusedFrees,  // blocks freed in a capture after another of its streams used them: the capture does not reuse them
  kPinnedBytes,    // allocated
  kLaunches,       // of kernels that other libraries simulate
  kEventsMade,
  kEventRecords,   // on streams
  kStrayCalls,     // about an event, a capture or a device, on a thread whose current device is another one: CUDA would
                   // use both devices
  kDevicesChosen,  // by guards, a bit each: CUDA makes a context on each of them
  kCounters,
};

extern std::array<std::atomic<int64_t>, kCounters> counters;
extern const std::array<const char*, kCounters> counter_names;

inline void count(Counter counter, int64_t by = 1) { counters[counter] += by; }
inline void expect_on(c10::DeviceIndex device) { count(kStrayCalls, device >= 0 && device != current_device()); }

void synchronize_stream(c10::Stream stream);  // waits, and counts

}  // namespace fake
