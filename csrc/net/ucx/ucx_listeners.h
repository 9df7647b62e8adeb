#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "base/address_prefix.h"
#include "base/deadline.h"
#include "net/source_filter.h"

namespace nvx::net {

/// The sockets at which a UCX worker accepts connections over TCP. UCX accepts them from any host, and writes to any
/// memory of this process that a connection requests. So a filter lets only packets from admitted addresses through.
class UcxListeners {
 public:
  /// To be made before the worker: notes the sockets that already listen, which are not the worker's.
  UcxListeners();
  /// To be called before the worker first makes progress: until then UCX has read nothing. The worker's listeners then
  /// admit only the addresses in NVX_ALLOW_FROM, and connections made in between are closed. `address` is the worker's;
  /// `devices` is the number of its TCP devices. Throws Error if a listener cannot be filtered.
  void restrict_to_admitted(std::span<const std::byte> address, size_t devices);
  /// Lets in more. Throws Error, and then lets in as many as before.
  void admit(std::span<const AddressPrefix> more);
  /// The number of packets that the listeners have dropped; see Drops.
  uint64_t dropped();
  void connection_lost() { drops_.connection_lost(); }
  /// "; UCX has closed the socket ..." if it has, otherwise empty. UCX does that for good if this process has no free
  /// descriptor when a rank connects.
  std::string why_closed() const;
  /// Warns once of dropped packets, and once of a closed listener. Cheap enough for every sleep.
  void warn_once();
  /// Closes the listeners in a child just forked: allocates nothing, takes no lock.
  void close_in_child() const;

  struct Listener {
    int fd;
    ino_t inode;
    AddressBytes address;
    uint16_t port;
  };

 private:
  std::vector<Listener> present() const;
  void attach(const std::set<AddressPrefix>& admitted);

  std::set<AddressPrefix> admitted_;
  const bool filters_;  // false: NVX_ALLOW_FROM names all addresses
  std::set<ino_t> others_;
  std::vector<Listener> listeners_;
  Drops drops_;
  bool warned_of_drops_ = false, warned_of_end_ = false;
  Clock::time_point next_check_{};
};

}  // namespace nvx::net
