#pragma once

#include <pthread.h>

namespace nvx {

/// The one T of this process. A forked child gets a new one, because the parent's may have been locked at the fork. It
/// is never destroyed: threads may use it after static destructors ran.
template <class T>
T& of_this_process() {
  static T* here = new T;
  static const int kRegistered = pthread_atfork(nullptr, nullptr, [] { here = new T; });
  (void)kRegistered;
  return *here;
}

}  // namespace nvx
