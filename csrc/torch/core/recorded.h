#pragma once

#include <torch/csrc/distributed/c10d/ParamCommsUtils.hpp>

/// torch's RECORD_PARAM_COMMS_DATA, which reports a call to profilers and observers until the end of the scope. It
/// includes whether the call is asynchronous, except with torch 2.11, which cannot record that.
#ifdef RECORD_PARAM_COMMS_DATA_WITH_ASYNC_OP
#define NVX_RECORD_COMMS(is_async, ...) RECORD_PARAM_COMMS_DATA_WITH_ASYNC_OP(__VA_ARGS__, is_async)
#else
#define NVX_RECORD_COMMS(is_async, ...) RECORD_PARAM_COMMS_DATA(__VA_ARGS__)
#endif
