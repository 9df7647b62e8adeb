// What a device and torch's interface to it promise to their users, each to be broken for once: a test that is to show
// that somebody relies on it as he should must fail then.
#pragma once

namespace fake {

// Numbered as __init__.py names them.
enum class Rule {
  kEventWaits,     // a stream that is told to wait for an event does
  kRecordedUse,    // memory that a stream was recorded for is not used for something else before that has come past
  kCaptureMode,    // a thread that says so is not forbidden anything beside captures
  kCurrentStream,  // who asks for the current stream is told that one, and not the default one
  kRules,
};

bool is_broken(Rule rule);
void break_rule(Rule rule, bool broken);

}  // namespace fake
