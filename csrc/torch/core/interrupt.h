#pragma once

#include <functional>

namespace nvx {

/// Handles Ctrl-C, and every other signal whose Python handler raises. A waiter on the main thread runs the handlers.
/// Their exception is kept here, apart from Python's own error indicator, until the waiting call is about to return. So
/// it is raised whether the operation has failed or succeeded, and code that runs in between finds no pending error in
/// Python.

/// Runs Python's handlers of pending signals; returns true if one of them raised. For `base/interrupt.h`.
bool run_signal_handlers();

/// Throws the kept exception of a handler, if there is one. Does nothing on threads other than the main one.
void raise_interrupt();

/// Runs `act` without the GIL, which this thread releases meanwhile if it holds it. The GIL is always taken last, or
/// alone. So use this for any `act` that may wait for another lock.
void without_python_lock(const std::function<void()>& act);

}  // namespace nvx
