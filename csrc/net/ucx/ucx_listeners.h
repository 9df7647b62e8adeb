#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <set>
#include <span>
#include <vector>

#include "base/address_prefix.h"
#include "base/deadline.h"

namespace nvx::net {

/// The sockets at which a UCX worker takes connections over TCP. UCX itself takes them from everybody, and writes to
/// any memory of this process that a connection asks it to. So nothing reaches these sockets but what comes from
/// admitted addresses.
class UcxListeners {
 public:
  /// Before a worker is made: notes which sockets listen already, which are others'.
  UcxListeners();
  /// After it was made, and before it is first progressed: UCX has read nothing by then. Shuts the worker's listeners
  /// to all but those that NVX_ALLOW_FROM names, and takes away the connections that were made in between. address is
  /// the worker's, and devices how many devices it has TCP on. Throws Error where that cannot be done.
  void shut(std::span<const std::byte> address, size_t devices);
  /// Lets in more. Throws Error, and then lets in as many as before.
  void admit(std::span<const AddressPrefix> more);
  /// How many packets from others have been dropped.
  uint64_t dropped() const;
  /// Warns once if there are any. Cheap enough to be called before every sleep.
  void look_for_strangers();
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

  bool filters_ = true;  // false: NVX_ALLOW_FROM names all addresses
  std::set<ino_t> others_;
  std::vector<Listener> listeners_;
  std::set<AddressPrefix> admitted_;
  bool warned_ = false;
  Clock::time_point next_look_{};
};

}  // namespace nvx::net
