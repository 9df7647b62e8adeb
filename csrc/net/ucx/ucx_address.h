#pragma once

#include <compare>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "net/host_address.h"
#include "net/link.h"

namespace nvx::net {

struct UcxVersion {
  uint32_t major = 0, minor = 0, patch = 0;
  auto operator<=>(const UcxVersion&) const = default;
  std::string text() const;
};

/// The oldest version that supports all features that a link uses.
inline constexpr UcxVersion kOldestUcx{1, 13, 0};

struct UcxAddress {
  UcxVersion version;
  LinkNonce nonce;
  std::span<const std::byte> worker;      ///< for ucp_ep_create
  std::vector<HostAddress> reached_at{};  ///< at most kMostAddresses: for TCP, if no other transport reaches it
};

/// Control messages between links.
struct ControlMessage {
  enum Kind : uint32_t {
    kHello,  ///< the first: identifies this side. The other side connects too, to notice its death.
    kLeave,  ///< this side no longer needs the connection
    kClose,  ///< this side closes the link
    kFlush,  ///< the last message of a connection: without effect, behind kLeave or kClose
  };
  Kind kind;
  uint32_t turn;  ///< the number of the connection to this peer
  LinkNonce from;
};

std::vector<std::byte> encode_address(const UcxAddress& address);

/// Decodes an address, as a view of these bytes. Returns nothing if they are incomplete or have another wire version. A
/// checksum covers the part that UCX parses, because UCX's parser trusts its input.
std::optional<UcxAddress> decode_address(std::span<const std::byte> bytes);

/// Why links of these versions cannot communicate, or empty: UCX 1.16 on writes addresses that older ones misread.
std::string why_not_together(const UcxVersion& mine, const UcxVersion& theirs);

}  // namespace nvx::net
