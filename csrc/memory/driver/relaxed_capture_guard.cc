#include "memory/driver/relaxed_capture_guard.h"

#include <dlfcn.h>

#include <atomic>

#include "memory/driver/driver_abi.h"

namespace nvx {
namespace {

/// Null while the driver is not loaded in this process, which then has no captures. Does not load it.
template <class Function>
Function function_of_driver(const char* name, std::atomic<Function>& known) {
  if (const Function found = known.load(std::memory_order_acquire)) return found;
  void* const driver = dlopen("libcuda.so.1", RTLD_NOLOAD | RTLD_LAZY);
  if (!driver) return nullptr;
  const auto found = reinterpret_cast<Function>(dlsym(driver, name));
  known.store(found, std::memory_order_release);
  return found;
}

constexpr int kNone = -1;

/// Returns the thread's previous mode, or kNone if nothing was changed.
int change_to(int mode) {
  static std::atomic<decltype(cuda::Api::cuThreadExchangeStreamCaptureMode)> known{nullptr};
  if (mode == kNone) return kNone;
  const auto change = function_of_driver("cuThreadExchangeStreamCaptureMode", known);
  return change && change(&mode) == cuda::kSuccess ? mode : kNone;
}

}  // namespace

RelaxedCaptureGuard::RelaxedCaptureGuard() : before_(change_to(cuda::kCaptureModeRelaxed)) {}

RelaxedCaptureGuard::~RelaxedCaptureGuard() { (void)change_to(before_); }

/// The driver refuses to answer for the legacy stream while another stream captures: it is not captured itself.
bool is_captured(void* stream) {
  static std::atomic<cuda::StreamIsCapturing*> known{nullptr};
  const auto query = function_of_driver("cuStreamIsCapturing", known);
  int status = cuda::kNotCaptured;
  return query && query(stream, &status) == cuda::kSuccess && status != cuda::kNotCaptured;
}

}  // namespace nvx
