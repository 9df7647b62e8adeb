// The memory of the fake accelerator.
//
// Device addresses are not mapped: a host access there raises SIGSEGV. Their contents lie elsewhere, and only tasks of
// queues access them, through `real()`.
//
// A stream may reuse freed memory immediately after the free in its own order. A task simulates the next owner by
// poisoning the block: on free, as soon as the recorded streams have passed the free, and again when the block is
// allocated. A stream that uses a tensor without waiting for the tensor's stream, or without keeping or recording the
// tensor, therefore reads poison or loses its writes. Memory allocated in a capture belongs to the graph for ever:
// there the poisoning is part of each replay.
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

// The host address behind a device address; for tasks and for `peek()`. Memory that others map for the device, such as
// pools of peers, has its own addresses.
std::byte* real(const void* address);

// Prevents reuse of the block until `queue` has passed its position at the time of the free.
void record_use(const void* address, Queue& queue);

c10::Allocator& device_allocator();  // allocates on the current device and stream

bool is_pinned(const void* address);

// States that a task of `queue` uses the pinned block that holds this address. A free before that task has run is
// deferred until then.
void record_pinned_use(const void* address, Queue& queue);

c10::Allocator& pinned_allocator();

}  // namespace fake
