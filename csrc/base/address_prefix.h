#pragma once

#include <array>
#include <compare>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace nvx {

/// An IPv6 address, or an IPv4 address mapped into one (::ffff:10.0.0.7).
using AddressBytes = std::array<uint8_t, 16>;

/// The addresses of one IP version that share their first bits: 10.0.0.0/24, or a single address.
struct AddressPrefix {
  AddressBytes address{};  ///< the bits behind the prefix are 0
  uint8_t family = 0;      ///< 4 or 6
  uint8_t bits = 0;        ///< of 32 or 128
  auto operator<=>(const AddressPrefix&) const = default;

  static AddressPrefix of(const AddressBytes& address);
  /// "10.0.0.7", "10.0.0.0/24", "fd00::/8".
  static std::optional<AddressPrefix> parse(const std::string& text);
  std::string text() const;
  /// The first bit of the prefix in `address`: IPv4 follows the 96 bits of its mapping.
  unsigned begin() const { return family == 4 ? 96 : 0; }
  bool holds(const AddressPrefix& other) const;
};

/// The prefixes of a list with commas, such as NVX_ALLOW_FROM. Returns nothing if any item is not a prefix.
std::optional<std::vector<AddressPrefix>> parse_prefixes(const std::string& list);

/// At most `most` prefixes (at least 2) that together hold all addresses of these, in ascending order. If that takes
/// further addresses, the prefixes with the most bits in common are joined first.
std::vector<AddressPrefix> merged(std::vector<AddressPrefix> prefixes, size_t most);

}  // namespace nvx
