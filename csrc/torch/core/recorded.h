#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/record_function.h>
#include <torch/csrc/distributed/c10d/ParamCommsUtils.hpp>

#include <vector>

/// torch's RECORD_PARAM_COMMS_DATA, which reports a call to profilers and observers until the end of the scope. It
/// includes whether the call is asynchronous, except with torch 2.11, which cannot record that.
#ifdef RECORD_PARAM_COMMS_DATA_WITH_ASYNC_OP
#define NVX_RECORD_COMMS(is_async, ...) RECORD_PARAM_COMMS_DATA_WITH_ASYNC_OP(__VA_ARGS__, is_async)
#else
#define NVX_RECORD_COMMS(is_async, ...) RECORD_PARAM_COMMS_DATA(__VA_ARGS__)
#endif

namespace nvx {

/// Records a call for profilers until the end of the scope, with its name and inputs, as torch records works. An
/// asynchronous operation may end after the profiler has stopped and freed its events, so its end is not recorded.
class CallRecord {
 public:
  CallRecord(const char* title, at::TensorList inputs) {
    if (!record_.isActive()) return;
    record_._setAsync();  // torch marks every collective as asynchronous
    const std::vector<c10::IValue> shown(inputs.begin(), inputs.end());
    record_.before(title, c10::ArrayRef<const c10::IValue>(shown.data(), shown.size()));
  }

 private:
  at::RecordFunction record_{at::RecordScope::USER_SCOPE};
};

}  // namespace nvx
