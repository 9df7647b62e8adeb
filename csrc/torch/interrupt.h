#pragma once

#include <functional>

namespace nvx {

/// Ctrl-C, and every other signal whose Python handler raises. A waiter on the main thread lets the handlers run; what
/// they raise is kept here, apart from Python's own record of errors, until the call that waited is about to return. So
/// it is raised whether the operation failed or still ended well, and code that runs in between finds Python in order.

/// Lets Python's handlers of pending signals run: true if one of them raised. For base/interrupt.h.
bool run_signal_handlers();

/// Throws what a handler has raised, if there is something. Does nothing on other threads than the main one.
void raise_interrupt();

/// Python's lock is taken last, or alone: what may wait for another lock lets go of it meanwhile, where this thread has
/// it.
void without_python_lock(const std::function<void()>& act);

}  // namespace nvx
