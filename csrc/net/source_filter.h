#pragma once

#include <linux/filter.h>

#include <cstdint>
#include <optional>
#include <set>
#include <span>
#include <vector>

#include "base/address_prefix.h"
#include "base/deadline.h"

namespace nvx::net {

/// A filter for sockets of TCP (classic BPF, SO_ATTACH_FILTER) that lets packets in whose source address has one of
/// these prefixes. A listener that has it drops all others without an answer, so that no connection comes about; the
/// connections that it accepts inherit it.
std::vector<sock_filter> source_filter(std::span<const AddressPrefix> admitted);

/// The sources that NVX_ALLOW_FROM names. Throws Error.
std::set<AddressPrefix> allowed_sources();
/// Whether these are all addresses, so that a filter would drop nothing.
bool holds_every_address(const std::set<AddressPrefix>& admitted);

/// Makes a socket admit packets from these addresses only; the change is atomic. If the kernel refuses a filter of that
/// length, neighbouring addresses are joined to prefixes that hold more addresses. Returns the number of prefixes, or
/// nothing and errno if the kernel refuses every filter.
std::optional<size_t> attach_source_filter(int socket, const std::vector<AddressPrefix>& admitted);

/// Removes the filter that a connection has inherited: it would run for every packet, which can come from one address
/// only. Does nothing to a listener.
void detach_source_filter(int socket);

/// The number of packets that a listener has dropped: by its filter, because its backlog was full, or as resets of
/// connections that have ended here.
uint32_t dropped_by(int socket);

/// The packets that the listeners of a link have dropped, without those around the loss of a connection: these may be
/// resets by its peer.
class Drops {
 public:
  void connection_lost() { ignored_until_ = Clock::now() + std::chrono::seconds(1); }
  /// Whether of_others() should be called now, so that it ignores no more than it must.
  bool is_due() const { return ignored_until_ != Clock::time_point{} && Clock::now() >= ignored_until_; }
  /// `all`: the sum of dropped_by() over all listeners.
  uint64_t of_others(uint64_t all);

 private:
  uint64_t ignored_ = 0;
  Clock::time_point ignored_until_{};
};

}  // namespace nvx::net
