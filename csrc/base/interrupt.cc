#include "base/interrupt.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <utility>

#include "base/deadline.h"

namespace nvx {
namespace {

std::string& words() {
  static auto* const kWords = new std::string("interrupted by the user");
  return *kWords;
}

}  // namespace

const std::string& stop_words() { return words(); }
void set_stop_words(std::string text) { words() = std::move(text); }

bool stop_requested() {
  constexpr std::chrono::milliseconds kInterval{100};
  const InterruptCheck check = interrupt_check.load(std::memory_order_relaxed);
  if (!check || syscall(SYS_gettid) != getpid()) return false;
  static Clock::time_point next{};  // used by the main thread only
  const auto now = Clock::now();
  if (now < next) return false;
  next = now + kInterval;
  return check();
}

}  // namespace nvx
