#pragma once

#include <pthread.h>
#include <signal.h>

namespace nvx {

/// The first thing that a thread of nvx's own does. Sets the name by which top and debuggers show it, at most 15
/// letters, and blocks all signals: these are for the threads that the user knows.
inline void begin_own_thread(const char* name) {
  pthread_setname_np(pthread_self(), name);
  sigset_t all;
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, nullptr);
}

}  // namespace nvx
