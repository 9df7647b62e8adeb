// For libraries that play a device's kernels: what they do on its streams, by names that dlsym finds.

#include "memory.h"
#include "queue.h"

extern "C" {

// Enqueues a task on a stream, given by its native handle.
__attribute__((visibility("default"))) void fake_device_push(void* stream, void (*task)(void*), void* context) {
  static_cast<fake::Queue*>(stream)->push([task, context] { task(context); });
}

// What an address stands for: for tasks. Of any other address than the device's, itself.
__attribute__((visibility("default"))) void* fake_device_real(void* address) {
  return fake::is_device_address(address) ? fake::real(address) : address;
}
}
