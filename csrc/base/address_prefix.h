#pragma once

#include <array>
#include <compare>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace nvx {

/// An address of IPv6, or one of IPv4 mapped into it (::ffff:10.0.0.7).
using AddressBytes = std::array<uint8_t, 16>;

/// All addresses of one version of IP that share their first bits: 10.0.0.0/24, or one address alone.
struct AddressPrefix {
  AddressBytes address{};  ///< the bits behind the prefix are 0
  uint8_t family = 0;      ///< 4 or 6
  uint8_t bits = 0;        ///< of 32 or 128
  auto operator<=>(const AddressPrefix&) const = default;

  static AddressPrefix of(const AddressBytes& address);
  /// "10.0.0.7", "10.0.0.0/24", "fd00::/8".
  static std::optional<AddressPrefix> parse(const std::string& text);
  std::string text() const;
  /// Where its bits begin in the address: behind what maps IPv4 into IPv6.
  unsigned begin() const { return family == 4 ? 96 : 0; }
  bool holds(const AddressPrefix& other) const;
};

/// Those of a list with commas, as NVX_ALLOW_FROM has it; nothing if any of it is none.
std::optional<std::vector<AddressPrefix>> parse_prefixes(std::string_view list);

/// At most so many prefixes (or two) that hold all addresses of these, in ascending order. They hold nothing else as
/// long as that suffices; then those are joined first that have the most bits in common.
std::vector<AddressPrefix> merged(std::vector<AddressPrefix> prefixes, size_t most);

}  // namespace nvx
