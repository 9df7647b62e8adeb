#pragma once

#include <atomic>
#include <cstdint>

namespace nvx {

/// NVTX's domain "nvx"; null without a tool that listens, such as Nsight Systems, and in builds without NVTX's headers.
extern std::atomic<void*> tool_domain;
/// Attaches the tool that the process was started with, if any. Call it before the first range.
void attach_tool();

/// A range of this thread in that domain, until the end of the scope. Without a tool it costs a load and a branch.
class ToolRange {
 public:
  /// name: a literal. bytes: a function, called only if a tool listens; it returns the range's payload.
  template <class Bytes>
  ToolRange(const char* name, const Bytes& bytes) : open_(tool_domain.load(std::memory_order_relaxed) != nullptr) {
    if (open_) [[unlikely]]
      push(name, bytes());
  }
  ~ToolRange() {
    if (open_) [[unlikely]]
      pop();
  }
  ToolRange(const ToolRange&) = delete;
  ToolRange& operator=(const ToolRange&) = delete;

 private:
  static void push(const char* name, uint64_t bytes);
  static void pop();

  const bool open_;
};

bool built_with_nvtx();

}  // namespace nvx
