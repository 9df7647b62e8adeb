// For libraries that play a device's kernels: what they do on its streams, by names that dlsym finds. Streams are given
// by their native handles.

#include "graph.h"
#include "memory.h"
#include "queue.h"
#include "rules.h"
#include "streams.h"

#pragma GCC visibility push(default)

extern "C" {

// Enqueues a task, which a replay may run again; drop: for when nobody can any more.
void fake_device_push(void* stream, void (*task)(void*), void (*drop)(void*), void* context) {
  fake::count(fake::kLaunches);
  const std::shared_ptr<void> kept(context, drop);
  static_cast<fake::Queue*>(stream)->push([task, kept] { task(kept.get()); });
}

// What an address stands for: for tasks. Of any other address than the device's, itself.
void* fake_device_real(void* address) { return fake::is_device_address(address) ? fake::real(address) : address; }

// The number of the capture that a stream is in; 0: none.
uint64_t fake_device_capture(void* stream) {
  const auto graph = static_cast<fake::Queue*>(stream)->graph();
  return graph ? graph->id() : 0;
}

// CUDA's cudaThreadExchangeStreamCaptureMode, with its numbers.
int fake_device_exchange_capture_mode(int* mode) {
  if (!fake::is_broken(fake::Rule::kCaptureMode)) *mode = int(fake::exchange_mode(fake::Mode(*mode)));
  return 0;
}

// Events that graphs and streams share: in a capture, each replay records them or waits for them as the host does.
void* fake_device_event() { return new fake::Event; }

void fake_device_record(void* event, void* stream) {
  auto& queue = *static_cast<fake::Queue*>(stream);
  if (const auto graph = queue.graph()) return graph->record_outside(queue, *static_cast<fake::Event*>(event));
  static_cast<fake::Event*>(event)->set(queue.mark(fake::Pace::kDelayed));
}

void fake_device_wait(void* event, void* stream) {
  if (fake::is_broken(fake::Rule::kEventWaits)) return;
  auto& queue = *static_cast<fake::Queue*>(stream);
  if (const auto graph = queue.graph()) return graph->wait_outside(queue, *static_cast<fake::Event*>(event));
  if (fake::MarkPtr mark = static_cast<fake::Event*>(event)->get()) queue.wait_for(std::move(mark));
}

bool fake_device_passed(void* event) {
  const fake::MarkPtr mark = static_cast<fake::Event*>(event)->get();
  return !mark || mark->passed();
}
}

#pragma GCC visibility pop
