// The interface for libraries that simulate a device's kernels on its streams. `dlsym` finds these names. A stream is
// given by its native handle.

#include <mutex>

#include "graph.h"
#include "memory.h"
#include "queue.h"
#include "rules.h"
#include "streams.h"

namespace {
std::mutex of_context;
}

#pragma GCC visibility push(default)

extern "C" {

// For simulated kernels: how long each of a trial takes. Tests set it before they make a group.
int fake_device_trials_take_ms = 0;
// Whether a launch returns when its kernel has ended. As in CUDA, it then holds the lock of its context.
int fake_device_launches_block = 0;

// Enqueues a task. A replay may run it again; `drop` runs when no further run is possible.
void fake_device_push(void* stream, void (*task)(void*), void (*drop)(void*), void* context) {
  fake::count(fake::kLaunches);
  const std::shared_ptr<void> kept(context, drop);
  auto& queue = *static_cast<fake::Queue*>(stream);
  queue.push([task, kept] { task(kept.get()); });
  if (!fake_device_launches_block || queue.graph()) return;
  const std::lock_guard lock(of_context);
  queue.drain();
}

// The host address behind a device address, for tasks; other addresses are returned unchanged.
void* fake_device_real(void* address) { return fake::is_device_address(address) ? fake::real(address) : address; }

// The number of the stream's capture; 0: none.
uint64_t fake_device_capture(void* stream) {
  const auto& queue = *static_cast<fake::Queue*>(stream);
  fake::expect_on(queue.device());
  const auto graph = queue.graph();
  return graph ? graph->id() : 0;
}

// `cudaThreadExchangeStreamCaptureMode` with CUDA's values.
int fake_device_exchange_capture_mode(int* mode) {
  if (!fake::is_broken(fake::Rule::kCaptureMode)) *mode = int(fake::exchange_mode(fake::Mode(*mode)));
  return 0;
}

// Events that graphs and streams share. A capture records the call: each replay records the event or waits for it like
// the host does.
void* fake_device_event() {
  fake::count(fake::kEventsMade);
  auto* const event = new fake::Event;
  event->device = fake::current_device();
  return event;
}

void fake_device_record(void* event, void* stream) {
  fake::count(fake::kEventRecords);
  auto& queue = *static_cast<fake::Queue*>(stream);
  if (const auto graph = queue.graph()) return graph->record_outside(queue, *static_cast<fake::Event*>(event));
  static_cast<fake::Event*>(event)->set(queue.mark(fake::Pace::kDelayed));
}

// In a capture only: the record stands beside the stream's work, which does not wait for it. The graph has one such
// record of an event, behind the work of all calls.
void fake_device_record_beside(void* event, void* stream) {
  auto& queue = *static_cast<fake::Queue*>(stream);
  queue.graph()->record_beside(queue, *static_cast<fake::Event*>(event));
}

void fake_device_wait(void* event, void* stream) {
  if (fake::is_broken(fake::Rule::kEventWaits)) return;
  auto& queue = *static_cast<fake::Queue*>(stream);
  if (const auto graph = queue.graph()) {
    if (!static_cast<fake::Event*>(event)->get()) graph->fault("a graph waits for an event that was never recorded");
    return graph->wait_outside(queue, *static_cast<fake::Event*>(event));
  }
  fake::count(fake::kStreamWaits);
  if (fake::MarkPtr mark = static_cast<fake::Event*>(event)->get()) queue.wait_for(std::move(mark));
}

bool fake_device_passed(void* event) {
  const fake::MarkPtr mark = static_cast<fake::Event*>(event)->get();
  fake::expect_on(static_cast<fake::Event*>(event)->device);
  const std::lock_guard lock(of_context);
  return !mark || mark->passed();
}
}

#pragma GCC visibility pop
