#pragma once

#include <functional>

namespace nvx {

/// Deals with Ctrl-C, and with every other signal whose Python handler raises. A waiter on the main thread lets the
/// handlers run. What they raise is kept here, apart from Python's own record of errors, until the call that waited is
/// about to return. So it is raised whether the operation has failed or has ended well, and code that runs in between
/// finds no error pending in Python.

/// Lets Python's handlers of pending signals run: true if one of them raised. For base/interrupt.h.
bool run_signal_handlers();

/// Throws what a handler has raised, if there is something. Does nothing on other threads than the main one.
void raise_interrupt();

/// Runs `act` without Python's lock, which this thread lets go of meanwhile if it has it. That lock is always taken
/// last, or alone: so `act` is what may wait for another lock.
void without_python_lock(const std::function<void()>& act);

}  // namespace nvx
