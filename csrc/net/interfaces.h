#pragma once

#include <span>
#include <string>
#include <vector>

namespace nvx::net {

/// A network interface that is up and has an address.
struct Interface {
  std::string name;
  bool loopback = false;
  bool bridge = false;  ///< of containers or virtual machines: the other host has one with the same address
};

std::vector<Interface> interfaces();
/// "mlx5_0:1" for each active port of an RDMA device.
std::vector<std::string> rdma_ports();
bool has_rdma();

/// What the user said about interfaces, and in which variable.
struct InterfaceRule {
  const char* variable = nullptr;  ///< null: nothing was said
  std::string text;
  /// NCCL's syntax: a list of prefixes, of names behind '=', of what to leave out behind '^'. Gloo's is names alone.
  bool exact = false;
  bool own = false;  ///< said to nvx, and not to others
};
/// NVX_SOCKET_IFNAME, else GLOO_SOCKET_IFNAME, else NCCL_SOCKET_IFNAME.
InterfaceRule interface_rule();

/// The interfaces that the rule names; all but bridges, and the loopback where there is another, if it names none.
std::vector<std::string> choose(const InterfaceRule& rule, std::span<const Interface> present);
/// What is said where it names none of them, and what to do.
std::string none_named(const InterfaceRule& rule, std::span<const Interface> present);

}  // namespace nvx::net
