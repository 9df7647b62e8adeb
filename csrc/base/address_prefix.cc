#include "base/address_prefix.h"

#include <arpa/inet.h>

#include <algorithm>
#include <bit>
#include <charconv>
#include <functional>
#include <tuple>

#include "base/text.h"

namespace nvx {
namespace {

constexpr AddressBytes kMapped{0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};
constexpr size_t kMappedBytes = 12;

unsigned bits_in_common(const AddressBytes& a, const AddressBytes& b) {
  for (size_t i = 0; i < a.size(); ++i) {
    if (a[i] != b[i]) return unsigned(8 * i) + unsigned(std::countl_zero(uint8_t(a[i] ^ b[i])));
  }
  return 128;
}

AddressPrefix cut(AddressPrefix prefix, unsigned bits) {
  prefix.bits = uint8_t(bits);
  for (unsigned bit = prefix.begin() + bits; bit < 128; ++bit) prefix.address[bit / 8] &= uint8_t(~(0x80u >> bit % 8));
  return prefix;
}

/// The longest prefix that holds two prefixes of the same IP version.
AddressPrefix joined(const AddressPrefix& a, const AddressPrefix& b) {
  const unsigned common = bits_in_common(a.address, b.address) - a.begin();
  return cut(a, std::min({common, unsigned(a.bits), unsigned(b.bits)}));
}

/// The number of bits that two prefixes have in common, of 128; -1 if their IP versions differ.
int closeness(const AddressPrefix& a, const AddressPrefix& b) {
  if (a.family != b.family) return -1;
  return int(a.begin()) + joined(a, b).bits;
}

/// Whether the prefix that holds both holds nothing else.
bool are_whole(const AddressPrefix& a, const AddressPrefix& b) {
  return a.holds(b) || (a.family == b.family && a.bits == b.bits && joined(a, b).bits + 1 == a.bits);
}

/// Joins neighbours in a sorted list, also those that become neighbours by that.
template <class Together>
void join(std::vector<AddressPrefix>& prefixes, Together together) {
  std::vector<AddressPrefix> kept;
  for (AddressPrefix next : prefixes) {
    while (!kept.empty() && together(kept.back(), next)) {
      next = joined(kept.back(), next);
      kept.pop_back();
    }
    kept.push_back(next);
  }
  prefixes = std::move(kept);
}

}  // namespace

AddressPrefix AddressPrefix::of(const AddressBytes& address) {
  const bool mapped = std::equal(kMapped.begin(), kMapped.begin() + kMappedBytes, address.begin());
  return {address, uint8_t(mapped ? 4 : 6), uint8_t(mapped ? 32 : 128)};
}

std::optional<AddressPrefix> AddressPrefix::parse(const std::string& text) {
  const size_t slash = text.find('/');
  const std::string address = text.substr(0, slash);
  AddressPrefix prefix;
  if (AddressBytes bytes = kMapped; inet_pton(AF_INET, address.c_str(), bytes.data() + kMappedBytes) == 1) {
    prefix = of(bytes);
  } else if (inet_pton(AF_INET6, address.c_str(), bytes.data()) == 1) {
    prefix = of(bytes);
  } else {
    return std::nullopt;
  }
  if (slash == std::string::npos) return prefix;
  unsigned bits = 0;
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data() + slash + 1, end, bits);
  if (error != std::errc() || stop != end || bits > prefix.bits) return std::nullopt;
  return cut(prefix, bits);
}

std::string AddressPrefix::text() const {
  char written[INET6_ADDRSTRLEN] = "?";
  inet_ntop(family == 4 ? AF_INET : AF_INET6, address.data() + begin() / 8, written, sizeof written);
  const bool whole = bits == (family == 4 ? 32 : 128);
  return whole ? written : std::string(written) + "/" + std::to_string(bits);
}

bool AddressPrefix::holds(const AddressPrefix& other) const {
  return family == other.family && bits <= other.bits &&
         bits_in_common(address, other.address) >= begin() + unsigned(bits);
}

std::optional<std::vector<AddressPrefix>> parse_prefixes(const std::string& list) {
  std::vector<AddressPrefix> prefixes;
  for (const std::string& one : items(list)) {
    if (one.empty()) continue;
    const std::optional<AddressPrefix> prefix = AddressPrefix::parse(one);
    if (!prefix) return std::nullopt;
    prefixes.push_back(*prefix);
  }
  return prefixes;
}

std::vector<AddressPrefix> merged(std::vector<AddressPrefix> prefixes, size_t most) {
  std::ranges::sort(prefixes, [](const AddressPrefix& a, const AddressPrefix& b) {
    return std::tie(a.family, a.address, a.bits) < std::tie(b.family, b.address, b.bits);
  });
  join(prefixes, are_whole);
  most = std::max<size_t>(most, 2);  // one of each IP version
  if (prefixes.size() <= most) return prefixes;
  std::vector<int> common;
  for (size_t i = 0; i + 1 < prefixes.size(); ++i) common.push_back(closeness(prefixes[i], prefixes[i + 1]));
  std::ranges::sort(common, std::greater<>());
  const int least = std::max(common[prefixes.size() - most - 1], 0);
  join(prefixes, [&](const auto& a, const auto& b) { return closeness(a, b) >= least || are_whole(a, b); });
  return prefixes;
}

}  // namespace nvx
