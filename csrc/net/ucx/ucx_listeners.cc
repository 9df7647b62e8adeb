#include "net/ucx/ucx_listeners.h"

#include <fcntl.h>
#include <linux/membarrier.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <optional>
#include <sstream>
#include <thread>
#include <utility>

#include "base/error.h"
#include "base/handle.h"
#include "base/log.h"
#include "net/descriptors.h"
#include "net/host_address.h"
#include "net/source_filter.h"

namespace nvx::net {
namespace {

using Listener = UcxListeners::Listener;

[[noreturn]] void refuse(const std::string& what) {
  throw Error(
      Code::kSystem,
      "nvx: " + what + descriptor_limit_hint() +
          ", so nvx cannot restrict which hosts connect to UCX in this process over TCP: each of them could "
          "write to its memory",
      "set NVX_JOB_KEY on all ranks, with which nvx needs no filter, or permit it (a filter may need CAP_NET_ADMIN "
      "here), or, if every host of the network is trusted, set NVX_ALLOW_FROM=0.0.0.0/0,::/0");
}

/// The address and port that a socket of TCP is bound to.
std::optional<Listener> bound(int fd) {
  struct stat what {};
  sockaddr_storage own{};
  socklen_t bytes = sizeof own;
  int type = 0;
  socklen_t type_bytes = sizeof type;
  if (getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &type_bytes) != 0 || type != SOCK_STREAM) return std::nullopt;
  if (getsockname(fd, reinterpret_cast<sockaddr*>(&own), &bytes) != 0) return std::nullopt;
  const std::optional<AddressBytes> address = address_bytes(reinterpret_cast<const sockaddr*>(&own));
  if (!address || fstat(fd, &what) != 0) return std::nullopt;
  const uint16_t port = own.ss_family == AF_INET ? reinterpret_cast<const sockaddr_in*>(&own)->sin_port
                                                 : reinterpret_cast<const sockaddr_in6*>(&own)->sin6_port;
  return Listener{fd, what.st_ino, *address, ntohs(port)};
}

bool listens(int fd) {
  int value = 0;
  socklen_t bytes = sizeof value;
  return getsockopt(fd, SOL_SOCKET, SO_ACCEPTCONN, &value, &bytes) == 0 && value != 0;
}

/// Throws Error if the kernel does not list them.
void each_descriptor(const std::function<void(int fd)>& body) {
  std::error_code error;
  std::vector<int> all;  // that of this list too, which is closed by then
  for (std::filesystem::directory_iterator entry("/proc/thread-self/fd", error), end; entry != end;
       entry.increment(error))
    all.push_back(std::stoi(entry->path().filename()));
  if (error) refuse("nvx cannot read /proc/thread-self/fd");
  std::ranges::for_each(all, body);
}

/// Whether the number is still that socket's: UCX may have closed it, and the number may be another file's.
bool is_still(int fd, const Listener& listener) {
  struct stat what {};
  return fstat(fd, &what) == 0 && what.st_ino == listener.inode;
}

/// A socket's own descriptor. None if UCX has closed it (errno: EBADF), or if this process gets no descriptor.
Fd own_descriptor(const Listener& listener) {
  Fd fd(fcntl(listener.fd, F_DUPFD_CLOEXEC, 0));
  if (!fd || is_still(fd.get(), listener)) return fd;
  fd.reset();
  errno = EBADF;
  return fd;
}

/// Ends a connection: discards the data that has arrived, admits no more, and lets its reader see the end.
void end_connection(int fd) {
  const sockaddr nobody{.sa_family = AF_UNSPEC, .sa_data = {}};
  int error = 0;
  socklen_t bytes = sizeof error;
  (void)connect(fd, &nobody, sizeof nobody);
  (void)shutdown(fd, SHUT_RDWR);
  (void)getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &bytes);  // which takes the error back
}

/// An address and port as /proc/net/tcp has them: "0100007F:1F90".
std::string as_in_table(const Listener& listener, bool version_4) {
  char text[48];
  std::array<uint32_t, 4> words;
  std::memcpy(words.data(), listener.address.data(), sizeof words);
  if (version_4) {
    std::snprintf(text, sizeof text, "%08X:%04X", words[3], listener.port);
  } else {
    std::snprintf(text, sizeof text, "%08X%08X%08X%08X:%04X", words[0], words[1], words[2], words[3], listener.port);
  }
  return text;
}

/// Whether the kernel has connections of these listeners. A half-open one does not count: the filter keeps it so.
bool has_connections(const std::vector<Listener>& listeners) {
  constexpr char kSynReceived[] = "03", kTimeWait[] = "06", kListens[] = "0A";
  std::set<std::string> wanted;
  for (const Listener& listener : listeners) {
    for (const bool version_4 : {true, false}) wanted.insert(as_in_table(listener, version_4));
  }
  for (const char* path : {"/proc/thread-self/net/tcp", "/proc/thread-self/net/tcp6"}) {
    std::ifstream table(path);
    std::string line, number, local, remote, state;
    if (!std::getline(table, line)) {
      if (std::string_view(path).ends_with('6')) continue;  // a kernel without IPv6 has no such table
      refuse(std::string("nvx cannot read ") + path);
    }
    while (std::getline(table, line)) {
      std::istringstream words(line);
      if (!(words >> number >> local >> remote >> state) || !wanted.contains(local)) continue;
      if (state != kSynReceived && state != kTimeWait && state != kListens) return true;
    }
  }
  return false;
}

/// Ends all connections that arrived before the filter. UCX may be accepting one at this moment, so this repeats
/// until the kernel's table has none. The filter drops the packet that would complete a half-open connection, but a
/// packet that passed before the filter may still be in the kernel. The barrier waits for such packets
/// (synchronize_rcu, some milliseconds).
void end_all_connections(const std::vector<Listener>& listeners) {
  const Deadline deadline = Deadline::after(std::chrono::seconds(5));
  if (syscall(SYS_membarrier, MEMBARRIER_CMD_GLOBAL, 0, 0) != 0) usleep(50'000);
  for (;;) {
    for (const Listener& listener : listeners) {
      const Fd own = own_descriptor(listener);
      while (own) {
        const Fd made(accept4(own.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
        if (!made && errno != ECONNABORTED && errno != EINTR) break;
        if (made) end_connection(made.get());
      }
    }
    // Before the descriptors: a connection that its peer resets leaves the table, and can still be read.
    const bool more = has_connections(listeners);
    each_descriptor([&](int fd) {
      const auto socket = bound(fd);
      if (!socket || listens(fd)) return;
      for (const Listener& listener : listeners) {
        if (socket->port != listener.port || socket->address != listener.address) continue;
        if (const Fd own = own_descriptor(*socket)) end_connection(own.get());
      }
    });
    if (!more) return;
    std::this_thread::sleep_for(std::chrono::microseconds(200));
    if (deadline.passed(Clock::now()))
      refuse("connections that were accepted before the filter was attached do not close");
  }
}

/// The worker's listeners among the new ones: another thread may have begun to listen meanwhile. The worker's address
/// contains its ports. If it names fewer listeners than devices, because a UCX encodes its address in another way, all
/// new ones count as the worker's.
std::vector<Listener> of_worker(std::vector<Listener> fresh, std::span<const std::byte> address, size_t devices) {
  std::vector<Listener> named;
  for (const Listener& listener : fresh) {
    const std::byte port[] = {std::byte(listener.port >> 8), std::byte(listener.port)};
    if (std::search(address.begin(), address.end(), std::begin(port), std::end(port)) != address.end())
      named.push_back(listener);
  }
  return devices != 0 && named.size() >= devices ? named : fresh;
}

}  // namespace

UcxListeners::UcxListeners() : admitted_(allowed_sources()), filters_(!holds_every_address(admitted_)) {
  for (const Listener& listener : present()) others_.insert(listener.inode);
}

void UcxListeners::restrict_to_admitted(std::span<const std::byte> address, size_t devices) {
  std::vector<Listener> fresh = present();
  std::erase_if(fresh, [&](const Listener& listener) { return others_.contains(listener.inode); });
  listeners_ = of_worker(std::move(fresh), address, devices);
  for (const Listener& listener : listeners_) (void)fcntl(listener.fd, F_SETFD, FD_CLOEXEC);
  if (!filters_ || (listeners_.empty() && devices == 0)) return;
  if (listeners_.empty()) refuse("nvx does not find the sockets at which UCX listens");
  attach(admitted_);
  end_all_connections(listeners_);
}

/// Without filters, listeners that are not found only stay open in children.
std::vector<Listener> UcxListeners::present() const {
  std::vector<Listener> all;
  try {
    each_descriptor([&](int fd) {
      if (!listens(fd)) return;
      if (const auto socket = bound(fd)) all.push_back(*socket);
    });
  } catch (const Error&) {
    if (filters_) throw;
  }
  return all;
}

void UcxListeners::admit(std::span<const AddressPrefix> more) {
  if (!filters_) return;
  std::set<AddressPrefix> all = admitted_;
  all.insert(more.begin(), more.end());
  if (all.size() == admitted_.size()) return;
  attach(all);
  admitted_ = std::move(all);  // only now: if attach() throws, the next call tries again
}

void UcxListeners::close_in_child() const {
  for (const Listener& listener : listeners_) {
    if (is_still(listener.fd, listener)) close(listener.fd);
  }
}

void UcxListeners::attach(const std::set<AddressPrefix>& admitted) {
  for (const Listener& listener : listeners_) {
    const Fd own = own_descriptor(listener);
    if (!own && errno == EBADF) continue;  // UCX has closed it
    if (!own) refuse(std::string("nvx gets no descriptor for a socket (") + std::strerror(errno) + ")");
    const std::optional<size_t> prefixes = attach_source_filter(own.get(), {admitted.begin(), admitted.end()});
    if (!prefixes) refuse(std::string("the kernel attaches no filter to a socket (") + std::strerror(errno) + ")");
    if (!admitted.empty())
      NVX_LOG(kInfo, "TCP port %u admits %zu prefixes, which hold the %zu addresses of this job", listener.port,
              *prefixes, admitted.size());
  }
}

uint64_t UcxListeners::dropped() {
  uint64_t dropped = 0;
  if (!filters_) return dropped;
  for (const Listener& listener : listeners_) {
    if (const Fd own = own_descriptor(listener)) dropped += dropped_by(own.get());
  }
  return drops_.of_others(dropped);
}

std::string UcxListeners::why_closed() const {
  const auto is_open = [](const Listener& listener) { return is_still(listener.fd, listener); };
  if (std::ranges::all_of(listeners_, is_open)) return "";
  return "; UCX has closed the socket at which ranks connect to this process, because the process had no free "
         "descriptor for a connection: raise the limit (ulimit -n)";
}

void UcxListeners::warn_once() {
  constexpr std::chrono::seconds kBetween{1};
  if (listeners_.empty() || Clock::now() < next_check_) return;
  next_check_ = Clock::now() + kBetween;
  if (const std::string closed = why_closed(); !closed.empty() && !std::exchange(warned_of_end_, true))
    NVX_LOG(kWarn, "ranks that have no connection to this process yet cannot connect%s", closed.c_str());
  if (dropped() == 0 || std::exchange(warned_of_drops_, true)) return;
  NVX_LOG(kWarn,
          "packets to the TCP port of this process were dropped: a host whose address no rank of the job has published "
          "tried to connect, more ranks connect at once than the kernel queues (net.core.somaxconn), or the network "
          "lost packets of a connection. If a rank is behind address translation, set NVX_ALLOW_FROM here to its "
          "translated address");
}

}  // namespace nvx::net
