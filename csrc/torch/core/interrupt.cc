#include "torch/core/interrupt.h"

#include <sys/syscall.h>
#include <torch/csrc/utils/pybind.h>
#include <unistd.h>

#include <atomic>
#include <exception>
#include <string>
#include <utility>

#include "base/interrupt.h"

namespace nvx {
namespace {

/// Used on the main thread only, except the flag, which makes the check cheap.
struct Kept {
  std::atomic<bool> something{false};
  std::exception_ptr raised;
};

Kept& kept() {
  static Kept* here = new Kept;  // never destroyed: the interpreter may have been finalized by then
  return *here;
}

/// "TimeoutError"
std::string name_of(const pybind11::object& type) {
  return PyType_Check(type.ptr()) ? reinterpret_cast<PyTypeObject*>(type.ptr())->tp_name : "an exception";
}

}  // namespace

bool run_signal_handlers() {
  if (!Py_IsInitialized()) return false;
  pybind11::gil_scoped_acquire gil;
  const pybind11::error_scope saved;  // saves the exception that a caller up the stack is about to raise
  if (PyErr_CheckSignals() == 0) return false;
  const pybind11::error_already_set raised;
  kept().raised = std::make_exception_ptr(raised);
  const bool by_user = raised.matches(PyExc_KeyboardInterrupt);
  set_interrupt_text(by_user ? "interrupted by the user"
                             : "interrupted by a signal handler that raised " + name_of(raised.type()));
  kept().something.store(true, std::memory_order_release);
  return true;
}

void raise_interrupt() {
  if (!kept().something.load(std::memory_order_relaxed) || syscall(SYS_gettid) != getpid()) return;
  kept().something.store(false, std::memory_order_relaxed);
  std::rethrow_exception(std::exchange(kept().raised, nullptr));
}

void without_python_lock(const std::function<void()>& act) {
  if (!Py_IsInitialized() || !PyGILState_Check()) return act();
  const pybind11::gil_scoped_release unlocked;
  act();
}

}  // namespace nvx
