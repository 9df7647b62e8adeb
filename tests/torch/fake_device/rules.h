// The guarantees of a device and of torch's interface to it. Each can be broken: a test that claims to check that code
// relies on a guarantee must then fail.
#pragma once

namespace fake {

// Numbered as __init__.py names them.
enum class Rule {
  kEventWaits,     // a stream waits for the event of cudaStreamWaitEvent
  kRecordedUse,    // memory is not reused before its recorded streams have passed the free
  kCaptureMode,    // a thread in the relaxed mode may make any call beside captures
  kCurrentStream,  // a query for the current stream returns it and not the default stream
  kRules,
};

bool is_broken(Rule rule);
void break_rule(Rule rule, bool broken);

}  // namespace fake
