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
  bool bridge = false;    ///< of containers or virtual machines: another host has one with the same address
  bool hardware = false;  ///< of a network card, or stacked on one
  int64_t mbits = 0;      ///< per second; 0 if unknown
  bool tunnel = false;    ///< of a VPN: what enters it must not take another way
};

std::vector<Interface> interfaces();
/// "mlx5_0:1" for each active port of an RDMA device.
std::vector<std::string> rdma_ports();
bool has_rdma();

/// The user's choice of interfaces, and the variable that contains it.
struct InterfaceRule {
  const char* variable = nullptr;  ///< null: no variable is set
  std::string text;
  /// False: NCCL's syntax, a list of prefixes; with '=' in front a list of names, with '^' a list of prefixes to
  /// exclude. True: Gloo's syntax, a list of names.
  bool exact = false;
  bool own = false;  ///< nvx's own variable
};
/// NVX_SOCKET_IFNAME, else GLOO_SOCKET_IFNAME, else NCCL_SOCKET_IFNAME.
InterfaceRule interface_rule();

/// The interfaces that the rule names. Without a rule: only `towards`, an interface that is known to lead to the other
/// hosts. If that is empty: all but bridges, and the loopback only if there is no other.
std::vector<std::string> choose(const InterfaceRule& rule, std::span<const Interface> present,
                                const std::string& towards = "");
/// The interface that leads to the other hosts and its rails: interfaces of network cards that are at least as fast. A
/// tunnel has none.
std::vector<std::string> with_rails(const std::string& towards, std::span<const Interface> present);
/// The order in which peers try them: fast ones first, and `towards` before those of its speed, or if its speed is
/// unknown before all.
std::vector<std::string> fast_first(std::vector<std::string> names, std::span<const Interface> present,
                                    const std::string& towards);
/// The interfaces for connections to other hosts: those that the user named, else the one that leads to the host that
/// serves the store, with its rails if wanted, else those of choose(), fast ones first. Empty, with a warning, if
/// another library's variable names none. Throws Error if NVX_SOCKET_IFNAME names none.
std::vector<std::string> chosen_interfaces(const std::string& store_host, bool rails);
/// The failure for a rule that names none of the interfaces present.
Failure none_named(const InterfaceRule& rule, std::span<const Interface> present);

}  // namespace nvx::net
