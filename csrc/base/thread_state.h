#pragma once

#include <pthread.h>
#include <signal.h>

#include <cstdint>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace nvx {

/// Every thread of nvx calls this first. Sets the name that top and debuggers show, at most 15 characters, and blocks
/// all signals, which are for the user's threads.
inline void begin_own_thread(const char* name) {
  pthread_setname_np(pthread_self(), name);
  sigset_t all;
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, nullptr);
}

/// The default floating-point mode, as long as it lives: rounding to nearest, subnormals kept, no traps. A program may
/// choose another one for its threads (`torch.set_flush_denormal`), and the bits of a result must not depend on the
/// thread that computes it.
class DefaultFloatMode {
 public:
  DefaultFloatMode() : kept_(read()), changes_((kept_ & kControl) != kDefault) {
    if (changes_) write(kDefault);
  }
  ~DefaultFloatMode() {
    if (changes_) write(kept_);
  }
  DefaultFloatMode(const DefaultFloatMode&) = delete;
  DefaultFloatMode& operator=(const DefaultFloatMode&) = delete;

 private:
#if defined(__x86_64__)
  static constexpr uint64_t kDefault = 0x1f80, kControl = 0xffc0;  // of MXCSR, without its six sticky flags
  static uint64_t read() { return _mm_getcsr(); }
  static void write(uint64_t mode) { _mm_setcsr(unsigned(mode)); }
#elif defined(__aarch64__)
  static constexpr uint64_t kDefault = 0, kControl = ~uint64_t(0);  // of FPCR
  static uint64_t read() {
    uint64_t mode;
    asm volatile("mrs %0, fpcr" : "=r"(mode));
    return mode;
  }
  static void write(uint64_t mode) { asm volatile("msr fpcr, %0" : : "r"(mode) : "memory"); }
#else
  static constexpr uint64_t kDefault = 0, kControl = 0;
  static uint64_t read() { return 0; }
  static void write(uint64_t) {}
#endif

  const uint64_t kept_;
  const bool changes_;
};

}  // namespace nvx
