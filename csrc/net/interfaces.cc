#include "net/interfaces.h"

#include <net/if.h>
#include <net/if_arp.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <limits>
#include <string_view>
#include <utility>

#include "base/config.h"
#include "base/error.h"
#include "base/log.h"
#include "base/text.h"
#include "net/host_address.h"

namespace nvx::net {
namespace {

constexpr char kRdmaDevices[] = "/sys/class/infiniband";

std::vector<std::string> listed(const std::string& folder) {
  std::vector<std::string> names;
  std::error_code error;
  for (std::filesystem::directory_iterator entry(folder, error), end; entry != end; entry.increment(error))
    names.push_back(entry->path().filename());
  std::ranges::sort(names);
  return names;
}

std::string about(const std::string& interface, const std::string& what) {
  return "/sys/class/net/" + interface + "/" + what;
}

/// A bond, a VLAN or a bridge lists its lower interfaces.
bool is_hardware(const std::string& name, int deepest = 3) {
  if (access(about(name, "device").c_str(), F_OK) == 0) return true;
  constexpr std::string_view kLower = "lower_";
  for (const std::string& entry : listed(about(name, ""))) {
    if (entry.starts_with(kLower) && deepest > 0 && is_hardware(entry.substr(kLower.size()), deepest - 1)) return true;
  }
  return false;
}

/// A bridge that contains a network card leads to other hosts, so it does not count as one.
bool is_bridge(const std::string& name) {
  return access(about(name, "bridge").c_str(), F_OK) == 0 && !is_hardware(name);
}

/// 0 if the system knows none.
int64_t number_of(const std::string& name, const char* what) {
  std::ifstream file(about(name, what));
  int64_t number = 0;
  return file >> number && number > 0 ? number : 0;
}

/// WireGuard, PPP, GRE and the like have a type of their own. The device of a user-space VPN may look like Ethernet.
bool is_tunnel(const std::string& name) {
  const int64_t type = number_of(name, "type");
  const bool network = type == 0 || type == ARPHRD_ETHER || type == ARPHRD_INFINIBAND || type == ARPHRD_LOOPBACK;
  return !network || access(about(name, "tun_flags").c_str(), F_OK) == 0;
}

const char* set_in_environment(const char* name) {
  const char* value = std::getenv(name);
  return value && *value ? value : nullptr;
}

}  // namespace

std::vector<Interface> interfaces() {
  std::vector<Interface> found;
  each_interface([&](const ifaddrs& entry) {
    constexpr unsigned kActive = IFF_UP | IFF_RUNNING;
    const std::string name = entry.ifa_name;
    if (!address_bytes(entry.ifa_addr) || (entry.ifa_flags & kActive) != kActive) return;
    if (std::ranges::find(found, name, &Interface::name) != found.end()) return;
    const bool loopback = (entry.ifa_flags & IFF_LOOPBACK) != 0;
    found.push_back({name, loopback, is_bridge(name), is_hardware(name), number_of(name, "speed"), is_tunnel(name)});
  });
  return found;
}

std::vector<std::string> rdma_ports() {
  std::vector<std::string> active;
  for (const std::string& device : listed(kRdmaDevices)) {
    const std::string ports = std::string(kRdmaDevices) + "/" + device + "/ports";
    for (const std::string& port : listed(ports)) {
      std::ifstream file(ports + "/" + port + "/state");
      std::string state;
      std::getline(file, state);  // "4: ACTIVE"
      if (state.find("ACTIVE") != std::string::npos) active.push_back(device + ":" + port);
    }
  }
  return active;
}

bool has_rdma() { return !listed(kRdmaDevices).empty(); }

InterfaceRule interface_rule() {
  if (const std::string& own = config().socket_ifname; !own.empty()) return {"NVX_SOCKET_IFNAME", own, false, true};
  if (const char* text = set_in_environment("GLOO_SOCKET_IFNAME")) return {"GLOO_SOCKET_IFNAME", text, true};
  if (const char* text = set_in_environment("NCCL_SOCKET_IFNAME")) return {"NCCL_SOCKET_IFNAME", text, false};
  return {};
}

std::vector<std::string> choose(const InterfaceRule& rule, std::span<const Interface> present,
                                const std::string& towards) {
  const auto leads = [&](const Interface& interface) { return interface.name == towards && !interface.loopback; };
  if (!rule.variable && std::ranges::any_of(present, leads)) return {towards};
  const bool anything_else = std::ranges::any_of(present, [](const Interface& i) { return !i.loopback; });
  std::string_view text = rule.text;
  const auto begins_with = [&](char mark) {
    if (rule.exact || !text.starts_with(mark)) return false;
    text.remove_prefix(1);
    return true;
  };
  const bool leaves_out = begins_with('^');
  const bool exact = begins_with('=') || rule.exact;
  std::vector<std::string> names = items(std::string(text));
  for (std::string& name : names) name.resize(std::min(name.size(), name.find(':')));  // "eth0:1" labels an address
  const auto named = [&](const Interface& interface) {
    return std::ranges::any_of(names, [&](const std::string& name) {
      return exact ? interface.name == name : interface.name.starts_with(name);
    });
  };
  const auto plain = [&](const Interface& i) { return !i.bridge && !(i.loopback && anything_else); };
  std::vector<std::string> chosen;
  for (const Interface& interface : present) {
    if (!rule.variable ? plain(interface) : leaves_out ? plain(interface) && !named(interface) : named(interface))
      chosen.push_back(interface.name);
  }
  return chosen;
}

std::vector<std::string> with_rails(const std::string& towards, std::span<const Interface> present) {
  const auto leads = std::ranges::find(present, towards, &Interface::name);
  std::vector<std::string> chosen;
  for (const Interface& i : present) {
    const bool beside = leads != present.end() && !leads->tunnel && i.mbits >= leads->mbits;
    if (i.name == towards || (beside && i.hardware && !i.bridge && !i.loopback)) chosen.push_back(i.name);
  }
  return chosen;
}

std::vector<std::string> fast_first(std::vector<std::string> names, std::span<const Interface> present,
                                    const std::string& towards) {
  std::ranges::stable_sort(names, {}, [&](const std::string& name) {
    const auto found = std::ranges::find(present, name, &Interface::name);
    const int64_t mbits = found == present.end() ? 0 : found->mbits;
    const bool leads = name == towards;
    return std::pair(leads && mbits == 0 ? std::numeric_limits<int64_t>::min() : -mbits, !leads);
  });
  return names;
}

std::vector<std::string> chosen_interfaces(const std::string& store_host, bool rails) {
  const InterfaceRule rule = interface_rule();
  const std::string towards = rule.variable ? "" : interface_to(store_host);
  const std::vector<Interface> present = interfaces();
  std::vector<std::string> chosen;
  if (rails && !towards.empty()) chosen = with_rails(towards, present);
  if (chosen.empty()) chosen = choose(rule, present, towards);
  // Traffic must not leave the interfaces that the user named for nvx. Names for gloo or NCCL may not fit nvx.
  if (chosen.empty() && rule.own) throw Error(none_named(rule, present));
  if (chosen.empty() && rule.variable) NVX_LOG(kWarn, "%s", none_named(rule, present).cause.c_str());
  return fast_first(std::move(chosen), present, towards);
}

Failure none_named(const InterfaceRule& rule, std::span<const Interface> present) {
  std::vector<std::string> names;
  for (const Interface& interface : present) names.push_back(interface.name);
  const std::string what = std::string(rule.variable) + "=" + rule.text +
                           " names no interface that is up on this host, where there " +
                           (names.empty() ? "is none" : (present.size() == 1 ? "is " : "are ") + joined(names));
  if (rule.own) return {.code = Code::kInvalid, .cause = what, .advice = "name one of them, or unset it"};
  return {Code::kInvalid, what + "; any may be used (NVX_DEBUG=info logs which), unless NVX_SOCKET_IFNAME names one"};
}

}  // namespace nvx::net
