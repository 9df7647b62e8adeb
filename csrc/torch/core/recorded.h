#pragma once

#include <torch/csrc/distributed/c10d/ParamCommsUtils.hpp>

/// torch's RECORD_PARAM_COMMS_DATA, which tells profilers and observers of a call, up to the end of the scope; with
/// whether it is asynchronous, where torch has a word for that: not in 2.11.
#ifdef RECORD_PARAM_COMMS_DATA_WITH_ASYNC_OP
#define NVX_RECORD_COMMS(is_async, ...) RECORD_PARAM_COMMS_DATA_WITH_ASYNC_OP(__VA_ARGS__, is_async)
#else
#define NVX_RECORD_COMMS(is_async, ...) RECORD_PARAM_COMMS_DATA(__VA_ARGS__)
#endif
