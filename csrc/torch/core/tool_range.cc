#include "torch/core/tool_range.h"

// CMake adds NVTX's headers, which come with CUDA, to builds with kernels and to those of the tests.
#if __has_include(<nvtx3/nvToolsExt.h>)
#include <nvtx3/nvToolsExt.h>

#include <mutex>

namespace nvx {

std::atomic<void*> tool_domain{nullptr};

void attach_tool() {
  static std::once_flag once;
  std::call_once(once, [] { tool_domain.store(nvtxDomainCreateA("nvx"), std::memory_order_relaxed); });
}

void ToolRange::push(const char* name, uint64_t bytes) {
  nvtxEventAttributes_t range{};
  range.version = NVTX_VERSION;
  range.size = NVTX_EVENT_ATTRIB_STRUCT_SIZE;
  range.messageType = NVTX_MESSAGE_TYPE_ASCII;
  range.message.ascii = name;
  range.payloadType = NVTX_PAYLOAD_TYPE_UNSIGNED_INT64;
  range.payload.ullValue = bytes;
  nvtxDomainRangePushEx(static_cast<nvtxDomainHandle_t>(tool_domain.load(std::memory_order_relaxed)), &range);
}

void ToolRange::pop() {
  nvtxDomainRangePop(static_cast<nvtxDomainHandle_t>(tool_domain.load(std::memory_order_relaxed)));
}

bool built_with_nvtx() { return true; }

}  // namespace nvx

#else

namespace nvx {

std::atomic<void*> tool_domain{nullptr};

void attach_tool() {}
void ToolRange::push(const char*, uint64_t) {}
void ToolRange::pop() {}
bool built_with_nvtx() { return false; }

}  // namespace nvx

#endif
