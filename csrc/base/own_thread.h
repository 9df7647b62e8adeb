#pragma once

#include <pthread.h>
#include <signal.h>

namespace nvx {

/// Every thread of nvx calls this first. Sets the name that top and debuggers show, at most 15 characters, and blocks
/// all signals, which are for the user's threads.
inline void begin_own_thread(const char* name) {
  pthread_setname_np(pthread_self(), name);
  sigset_t all;
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, nullptr);
}

}  // namespace nvx
