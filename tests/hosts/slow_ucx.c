/* Delays the threads that listen and that first look for events without waiting, as a busy processor may. For
 * LD_PRELOAD: strangers then connect to UCX's port before nvx has filtered it, and UCX accepts them. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdatomic.h>
#include <sys/epoll.h>
#include <unistd.h>

int listen(int socket, int backlog) {
  int (*real)(int, int) = (int (*)(int, int))dlsym(RTLD_NEXT, "listen");
  const int result = real(socket, backlog);
  usleep(300 * 1000);
  return result;
}

int epoll_wait(int epoll, struct epoll_event* events, int most, int timeout_ms) {
  static atomic_int calls;
  int (*real)(int, struct epoll_event*, int, int) =
      (int (*)(int, struct epoll_event*, int, int))dlsym(RTLD_NEXT, "epoll_wait");
  if (timeout_ms == 0 && atomic_fetch_add(&calls, 1) < 5) usleep(100 * 1000);
  return real(epoll, events, most, timeout_ms);
}
