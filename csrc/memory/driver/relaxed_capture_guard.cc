#include "memory/driver/relaxed_capture_guard.h"

#include <dlfcn.h>

#include <atomic>

#include "memory/driver/driver_abi.h"

namespace nvx {
namespace {

using ExchangeMode = decltype(cuda::Api::cuThreadExchangeStreamCaptureMode);

/// Null while the driver is not loaded in this process, which then has no captures. Does not load it.
ExchangeMode exchange_mode() {
  static std::atomic<ExchangeMode> known{nullptr};
  if (const ExchangeMode found = known.load(std::memory_order_acquire)) return found;
  void* const driver = dlopen("libcuda.so.1", RTLD_NOLOAD | RTLD_LAZY);
  if (!driver) return nullptr;
  const auto found = reinterpret_cast<ExchangeMode>(dlsym(driver, "cuThreadExchangeStreamCaptureMode"));
  known.store(found, std::memory_order_release);
  return found;
}

constexpr int kNone = -1;

/// Returns the thread's previous mode, or kNone if nothing was changed.
int change_to(int mode) {
  const ExchangeMode change = mode == kNone ? nullptr : exchange_mode();
  return change && change(&mode) == cuda::kSuccess ? mode : kNone;
}

}  // namespace

RelaxedCaptureGuard::RelaxedCaptureGuard() : before_(change_to(cuda::kCaptureModeRelaxed)) {}

RelaxedCaptureGuard::~RelaxedCaptureGuard() { (void)change_to(before_); }

}  // namespace nvx
