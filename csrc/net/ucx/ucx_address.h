#pragma once

#include <array>
#include <compare>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "net/host_address.h"

namespace nvx::net {

struct UcxVersion {
  uint32_t major = 0, minor = 0, patch = 0;
  auto operator<=>(const UcxVersion&) const = default;
  std::string text() const;
};

/// The oldest that has what a link uses.
inline constexpr UcxVersion kOldestUcx{1, 13, 0};

/// Tells links apart, also those of one process and of processes with recycled ids.
using LinkNonce = std::array<uint64_t, 2>;
LinkNonce fresh_nonce();

/// What a UCX link tells the other side about itself.
struct UcxAddress {
  UcxVersion version;
  LinkNonce nonce;
  std::span<const std::byte> worker;      ///< for ucp_ep_create
  std::vector<HostAddress> reached_at{};  ///< at most kMostAddresses: where TCP reaches it, if nothing else does
};

/// What links say to each other, beside messages.
struct Sign {
  enum Kind : uint32_t {
    kHello,  ///< the first word on a connection: who this is. The other side connects too, and so notices a death.
    kLeave,  ///< the last one: this side needs the connection no more
    kClose,  ///< the last one of all
  };
  Kind kind;
  uint32_t turn;  ///< which connection to this peer it is
  LinkNonce from;
};

std::vector<std::byte> encode_address(const UcxAddress& address);

/// The address in these bytes, of which it keeps a view; nothing if they are not whole, or of another wire version.
/// What UCX parses is covered by a checksum: its parser trusts its input.
std::optional<UcxAddress> decode_address(std::span<const std::byte> bytes);

/// Why these two could not talk, or empty: from 1.16 on UCX writes addresses that older ones misread.
std::string why_not_together(const UcxVersion& mine, const UcxVersion& theirs);

}  // namespace nvx::net
