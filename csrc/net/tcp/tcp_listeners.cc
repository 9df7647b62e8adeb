#include "net/tcp/tcp_listeners.h"

#include <netinet/in.h>
#include <sys/epoll.h>

#include <algorithm>

#include "base/error.h"
#include "base/log.h"
#include "base/text.h"
#include "net/descriptors.h"
#include "net/interfaces.h"

namespace nvx::net {

class TcpListeners::Listener final : public Socket {
 public:
  Listener(int epoll, Fd fd, const HostAddress& at) : Socket(Kind::kListener, epoll), address(at) {
    watch(std::move(fd), EPOLLIN);
  }
  using Socket::change;
  using Socket::fd;
  HostAddress address;
  bool filtered = false;  // not if NVX_ALLOW_FROM names all addresses, or if the kernel refuses filters
};

namespace {

uint16_t port_of(int fd) {
  sockaddr_storage own{};
  socklen_t bytes = sizeof own;
  if (getsockname(fd, reinterpret_cast<sockaddr*>(&own), &bytes) != 0) return 0;
  return ntohs(reinterpret_cast<sockaddr_in&>(own).sin_port);  // IPv6 has it at the same place
}

std::vector<HostAddress> own_listeners(const std::string& store_host) {
  std::vector<std::string> chosen = chosen_interfaces(store_host, /*rails=*/true);
  if (chosen.empty()) chosen = choose({}, interfaces());
  return host_addresses(chosen);
}

}  // namespace

TcpListeners::TcpListeners(int epoll, const std::string& store_host) : admitted_(allowed_sources()) {
  const bool filters = !holds_every_address(admitted_);
  int error = 0;
  for (HostAddress& address : own_listeners(store_host)) {
    Fd fd = new_socket(address);
    const auto [at, bytes] = sockaddr_of(address);
    if (!fd || bind(fd.get(), reinterpret_cast<const sockaddr*>(&at), bytes) != 0) {
      error = errno;  // such as an IPv6 address that is still being checked for duplicates
      continue;
    }
    const bool filtered = filters && attach_source_filter(fd.get(), {admitted_.begin(), admitted_.end()});
    if (listen(fd.get(), SOMAXCONN) != 0) throw system_error("cannot listen for ranks of other hosts");
    address.port = port_of(fd.get());
    listeners_.emplace_back(epoll, std::move(fd), address).filtered = filtered;
  }
  if (listeners_.empty() && error == 0)
    throw Error(Code::kSystem,
                "nvx: cannot listen for ranks of other hosts: no interface in use has an address for them",
                kGiveAddress);
  if (listeners_.empty()) throw system_error("cannot listen for ranks of other hosts" + descriptor_limit_hint(), error);
  if (filters && !std::ranges::all_of(listeners_, &Listener::filtered))
    NVX_LOG(kWarn, "the kernel refuses to filter connections, so the job's key alone keeps other hosts out");
}

TcpListeners::~TcpListeners() = default;

std::vector<HostAddress> TcpListeners::addresses() const {
  std::vector<HostAddress> all;
  for (const Listener& listener : listeners_) all.push_back(listener.address);
  return all;
}

void TcpListeners::admit(std::span<const AddressPrefix> more) {
  std::set<AddressPrefix> all = admitted_;
  all.insert(more.begin(), more.end());
  if (all.size() == admitted_.size()) return;
  for (const Listener& listener : listeners_) {
    if (!listener.filtered || attach_source_filter(listener.fd(), {all.begin(), all.end()})) continue;
    throw system_error("the kernel does not change the filter of a socket");
  }
  admitted_ = std::move(all);  // only now: if a filter fails, the next call tries again
}

uint64_t TcpListeners::dropped() {
  uint64_t dropped = 0;
  for (const Listener& listener : listeners_) dropped += listener.filtered ? dropped_by(listener.fd()) : 0;
  return drops_.of_others(dropped);
}

Fd TcpListeners::accept(Socket& listener, std::string& from) {
  sockaddr_storage source{};
  auto* const at = reinterpret_cast<sockaddr*>(&source);
  socklen_t bytes = sizeof source;
  Fd fd(accept4(static_cast<Listener&>(listener).fd(), at, &bytes, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (fd) from = AddressPrefix::of(address_bytes(at).value_or(AddressBytes())).text();
  if (fd || (errno != EMFILE && errno != ENFILE && errno != ENOBUFS && errno != ENOMEM)) return fd;
  if (no_descriptor_ == Clock::time_point{})
    NVX_LOG(kWarn, "a rank cannot connect to this process yet (%s)%s", std::strerror(errno),
            descriptor_limit_hint().c_str());
  pause(listener);
  no_descriptor_ = Clock::now();
  return fd;
}

void TcpListeners::pause(Socket& socket) {
  constexpr std::chrono::milliseconds kPause{100};
  static_cast<Listener&>(socket).change(0);
  paused_ = true;
  paused_until_ = Clock::now() + kPause;
}

void TcpListeners::resume() {
  if (drops_.is_due()) dropped();
  if (Clock::now() < paused_until_ || !paused_.exchange(false)) return;
  for (Listener& listener : listeners_) listener.change(EPOLLIN);
}

std::string TcpListeners::why_paused() const {
  constexpr std::chrono::milliseconds kRecently{1100};
  if (Clock::now() > no_descriptor_ + kRecently) return "";
  return "; ranks cannot connect to this process, because it has no free descriptor: raise the limit (ulimit -n)";
}

void TcpListeners::close() { listeners_.clear(); }

}  // namespace nvx::net
