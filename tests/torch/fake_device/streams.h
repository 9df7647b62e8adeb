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

// The calling thread's; each thread begins on device 0 and on every device's default stream.
c10::DeviceIndex current_device();
c10::DeviceIndex exchange_device(c10::DeviceIndex device);
c10::Stream current_stream(c10::DeviceIndex device);  // -1: of the current device
c10::Stream exchange_stream(c10::Stream stream);

c10::Stream default_stream(c10::DeviceIndex device);
c10::Stream pool_stream(c10::DeviceIndex device, Priority priority);  // by turns, as of a pool that all share
c10::Stream new_stream(c10::DeviceIndex device);                      // its own, until a device has 32 of them

Queue& queue_of(c10::Stream stream);
Queue& current_queue(c10::DeviceIndex device);

void drain_device(c10::DeviceIndex device);
bool drain_all(int64_t most_ms);  // whether everything was done in time

// What tests read. A synchronisation is the host waiting for a queue, whoever made it wait.
enum Counter {
  kStreamSyncs,
  kEventSyncs,
  kDeviceSyncs,
  kDeviceAllocations,
  kPinnedAllocations,
  kStreamWaits,    // a stream told to wait for an event
  kDataRecorded,   // recordDataPtrOnStream, record_stream
  kFallbacks,      // operators that ran on the CPU
  kCaptureFaults,  // what CUDA forbids while a graph is captured
  kUnreusedFrees,  // memory let go of in a capture that another stream of it had used, and so used no more in it
  kPinnedBytes,    // allocated
  kLaunches,       // of kernels that others play
  kCounters,
};

extern std::array<std::atomic<int64_t>, kCounters> counters;
extern const std::array<const char*, kCounters> counter_names;

inline void count(Counter counter, int64_t by = 1) { counters[counter] += by; }

void synchronize_stream(c10::Stream stream);  // waits, and counts

}  // namespace fake
