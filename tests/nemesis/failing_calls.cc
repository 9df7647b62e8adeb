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

template <class Result, class... Arguments>
Result call(const char* name, const void* caller, int error, Arguments... arguments) {
  if (!fails(name, caller)) return real<Result(Arguments...)>(name)(arguments...);
  errno = error;
  return (Result)-1;
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

int memfd_create(const char* name, unsigned flags) {
  return call<int>("memfd_create", __builtin_return_address(0), EMFILE, name, flags);
}

int ftruncate(int fd, off_t size) { return call<int>("ftruncate", __builtin_return_address(0), ENOSPC, fd, size); }

int fallocate(int fd, int mode, off_t at, off_t size) {
  return call<int>("fallocate", __builtin_return_address(0), ENOSPC, fd, mode, at, size);
}

void* mmap(void* at, size_t size, int prot, int flags, int fd, off_t from) {
  return call<void*>("mmap", __builtin_return_address(0), ENOMEM, at, size, prot, flags, fd, from);
}

int socket(int domain, int type, int protocol) {
  return call<int>("socket", __builtin_return_address(0), EMFILE, domain, type, protocol);
}

int bind(int fd, const sockaddr* to, socklen_t size) {
  return call<int>("bind", __builtin_return_address(0), ENOMEM, fd, to, size);
}

int listen(int fd, int backlog) { return call<int>("listen", __builtin_return_address(0), ENOMEM, fd, backlog); }

int connect(int fd, const sockaddr* to, socklen_t size) {
  return call<int>("connect", __builtin_return_address(0), ENOMEM, fd, to, size);
}

int accept4(int fd, sockaddr* from, socklen_t* size, int flags) {
  return call<int>("accept4", __builtin_return_address(0), EMFILE, fd, from, size, flags);
}

ssize_t sendmsg(int fd, const msghdr* message, int flags) {
  return call<ssize_t>("sendmsg", __builtin_return_address(0), ENOBUFS, fd, message, flags);
}

ssize_t recvmsg(int fd, msghdr* message, int flags) {
  return call<ssize_t>("recvmsg", __builtin_return_address(0), ENOMEM, fd, message, flags);
}

int eventfd(unsigned value, int flags) {
  return call<int>("eventfd", __builtin_return_address(0), EMFILE, value, flags);
}

int epoll_create1(int flags) { return call<int>("epoll_create1", __builtin_return_address(0), EMFILE, flags); }

int epoll_ctl(int fd, int what, int other, epoll_event* event) {
  return call<int>("epoll_ctl", __builtin_return_address(0), ENOSPC, fd, what, other, event);
}

int pthread_create(pthread_t* thread, const pthread_attr_t* how, void* (*run)(void*), void* with) {
  if (fails("pthread_create", __builtin_return_address(0))) return EAGAIN;
  return real<int(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*)>("pthread_create")(thread, how, run,
                                                                                                 with);
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
