// The memory of the fake accelerator.
//
// A device's addresses lead nowhere: a host that reads or writes there is killed by SIGSEGV. What they stand for lies
// elsewhere, and only tasks of queues touch it, through real().
//
// Memory that was freed is another's at once in the order of the stream on which it was allocated. This other one is
// played by a task that poisons it: on free as soon as the streams that were recorded for it have come so far, and
// once more when the memory is handed out. So who uses a tensor on a stream that does not wait for its own stream, or
// neither keeps nor records it, reads poison or loses what it wrote. What is allocated in a capture is the graph's for
// ever: there the poison is part of what is replayed.
#pragma once

#include <c10/core/Allocator.h>

#include <cstddef>
#include <utility>

#include "queue.h"
#include "streams.h"

namespace fake {

constexpr int kPoison = 0xA5;

bool is_device_address(const void* address);
c10::DeviceIndex device_of(const void* address);

// The host address of what a device address stands for; for tasks, and for peeking.
std::byte* real(const void* address);

// Keeps the block at this address from others until `queue` has come to where it is when the block is freed.
void record_use(const void* address, Queue& queue);

c10::Allocator& device_allocator();  // on the current device, for its current stream

bool is_pinned(const void* address);

// A task of `queue` uses the pinned block that holds this address: where it is freed before, it lives on until then.
void record_pinned_use(const void* address, Queue& queue);

c10::Allocator& pinned_allocator();

}  // namespace fake
