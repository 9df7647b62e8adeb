#include "base/interrupt.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <utility>

#include "base/deadline.h"

namespace nvx {
namespace {

std::string& stored_text() {
  static auto* const kText = new std::string("interrupted by the user");
  return *kText;
}

}  // namespace

const std::string& interrupt_text() { return stored_text(); }
void set_interrupt_text(std::string text) { stored_text() = std::move(text); }

bool stop_requested() {
  constexpr std::chrono::milliseconds kInterval{100};
  const InterruptCheck check = interrupt_check.load(std::memory_order_relaxed);
  if (!check || Uninterrupted::depth != 0 || syscall(SYS_gettid) != getpid()) return false;
  static Clock::time_point next{};  // used by the main thread only
  const auto now = Clock::now();
  if (now < next) return false;
  next = now + kInterval;
  return check();
}

}  // namespace nvx
