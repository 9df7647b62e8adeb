#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/failure.h"

namespace nvx::net {

/// A network interface that is up and has an address.
struct Interface {
  std::string name;
  bool loopback = false;
  bool bridge = false;    ///< of containers or virtual machines: the other host has one with the same address
  bool hardware = false;  ///< a network card's, or stacked on one
  int64_t mbits = 0;      ///< a second; 0 where it does not say
};

std::vector<Interface> interfaces();
/// "mlx5_0:1" for each active port of an RDMA device.
std::vector<std::string> rdma_ports();
bool has_rdma();

/// The user's choice of interfaces, and the variable that contains it.
struct InterfaceRule {
  const char* variable = nullptr;  ///< null: nothing was said
  std::string text;
  /// False: NCCL's syntax, which is a list of prefixes, of whole names if it begins with '=', or of what to leave out
  /// if it begins with '^'. True: names alone, as Gloo's is.
  bool exact = false;
  bool own = false;  ///< said to nvx, and not to others
};
/// NVX_SOCKET_IFNAME, else GLOO_SOCKET_IFNAME, else NCCL_SOCKET_IFNAME.
InterfaceRule interface_rule();

/// The interfaces that the rule names. Where there is no rule: `towards` alone, an interface that is known to lead to
/// the other hosts; where none is known, all but bridges, and the loopback only if there is nothing else.
std::vector<std::string> choose(const InterfaceRule& rule, std::span<const Interface> present,
                                const std::string& towards = "");
/// The interface that leads to the other hosts and its rails: those of network cards that are no slower.
std::vector<std::string> with_rails(const std::string& towards, std::span<const Interface> present);
/// The failure for a rule that names none of the interfaces present.
Failure none_named(const InterfaceRule& rule, std::span<const Interface> present);

}  // namespace nvx::net
