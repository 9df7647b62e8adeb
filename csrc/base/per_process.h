#pragma once

#include <pthread.h>

namespace nvx {

/// The one T of this process. A forked child begins with one of its own: the parent's is not the child's, and was
/// perhaps locked at the fork. Never destroyed: who uses it may outlive static destructors.
template <class T>
T& of_this_process() {
  static T* here = new T;
  static const int kRegistered = pthread_atfork(nullptr, nullptr, [] { here = new T; });
  (void)kRegistered;
  return *here;
}

}  // namespace nvx
