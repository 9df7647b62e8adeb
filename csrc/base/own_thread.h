#pragma once

#include <pthread.h>
#include <signal.h>

namespace nvx {

/// The first thing in a thread of nvx's own: what it is called in top and in debuggers, at most 15 letters. Signals are
/// for the threads that the user knows.
inline void begin_own_thread(const char* name) {
  pthread_setname_np(pthread_self(), name);
  sigset_t all;
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, nullptr);
}

}  // namespace nvx
