// Preloaded by resources.py: lets the n-th call of one function of the C library fail as if a resource had run out.
// Only calls from nvx's module count, and for threads also those from the C++ library.

#include <dlfcn.h>
#include <pthread.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>

#include <atomic>
#include <cerrno>
#include <cstdarg>
#include <cstring>

namespace {

std::atomic<const char*> function{nullptr};
std::atomic<long> left{0};

bool counts(const void* caller) {
  Dl_info facts{};
  if (!dladdr(caller, &facts) || !facts.dli_fname) return false;
  const char* const wanted = std::strcmp(function, "pthread_create") == 0 ? "libstdc++" : "/nvx/_C";
  return std::strstr(facts.dli_fname, wanted) != nullptr;
}

bool fails(const char* name, const void* caller) {
  const char* const armed = function;
  return armed && std::strcmp(armed, name) == 0 && counts(caller) && left.fetch_sub(1) == 1;
}

template <class Function>
Function* real(const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}

}  // namespace

extern "C" {

/// From now on the n-th call of the function fails. No name: none does.
void nvx_fail(const char* name, long n) {
  left = n;
  function = name && *name ? strdup(name) : nullptr;
}

/// Whether it has failed.
int nvx_failed() { return left <= 0; }

#define FAILING(result, name, parameters, arguments, error)                \
  result name parameters {                                                 \
    static auto* const next = real<result parameters>(#name);              \
    if (!fails(#name, __builtin_return_address(0))) return next arguments; \
    errno = error;                                                         \
    return (result)-1;                                                     \
  }

FAILING(int, memfd_create, (const char* name, unsigned flags), (name, flags), EMFILE)
FAILING(int, ftruncate, (int fd, off_t size), (fd, size), ENOSPC)
FAILING(int, fallocate, (int fd, int mode, off_t at, off_t size), (fd, mode, at, size), ENOSPC)
FAILING(void*, mmap, (void* at, size_t size, int prot, int flags, int fd, off_t from),
        (at, size, prot, flags, fd, from), ENOMEM)
FAILING(int, socket, (int domain, int type, int protocol), (domain, type, protocol), EMFILE)
FAILING(int, bind, (int fd, const sockaddr* to, socklen_t size), (fd, to, size), ENOMEM)
FAILING(int, listen, (int fd, int backlog), (fd, backlog), ENOMEM)
FAILING(int, connect, (int fd, const sockaddr* to, socklen_t size), (fd, to, size), ENOMEM)
FAILING(int, accept4, (int fd, sockaddr* from, socklen_t* size, int flags), (fd, from, size, flags), EMFILE)
FAILING(ssize_t, sendmsg, (int fd, const msghdr* message, int flags), (fd, message, flags), ENOBUFS)
FAILING(ssize_t, recvmsg, (int fd, msghdr* message, int flags), (fd, message, flags), ENOMEM)
FAILING(int, eventfd, (unsigned value, int flags), (value, flags), EMFILE)
FAILING(int, epoll_create1, (int flags), (flags), EMFILE)
FAILING(int, epoll_ctl, (int fd, int what, int other, epoll_event* event), (fd, what, other, event), ENOSPC)

int pthread_create(pthread_t* thread, const pthread_attr_t* how, void* (*run)(void*), void* with) {
  static auto* const next = real<int(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*)>("pthread_create");
  return fails("pthread_create", __builtin_return_address(0)) ? EAGAIN : next(thread, how, run, with);
}

/// Of the calls that have no function of the C library: pidfd_open.
long syscall(long number, ...) {
  static auto* const next = real<long(long, ...)>("syscall");
  va_list rest;
  va_start(rest, number);
  long a[6];
  for (long& one : a) one = va_arg(rest, long);
  va_end(rest);
  if (number != SYS_pidfd_open || !fails("pidfd_open", __builtin_return_address(0)))
    return next(number, a[0], a[1], a[2], a[3], a[4], a[5]);
  errno = EMFILE;
  return -1;
}
}
