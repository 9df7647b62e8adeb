#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "net/host_address.h"
#include "net/link.h"
#include "net/tcp/job_key.h"

/// The bytes that TCP links exchange: little endian, fixed layouts.
namespace nvx::net {

struct TcpAddress {
  LinkNonce nonce{};
  std::vector<HostAddress> listeners;  ///< 1 to kMostAddresses
};

std::vector<std::byte> encode_address(const TcpAddress& address, const JobKey& key);
/// Returns nothing if the bytes are no address of this version, or if they are unsigned or signed with another key.
std::optional<TcpAddress> decode_address(std::span<const std::byte> bytes, const JobKey& key);

using Challenge = std::array<std::byte, 32>;

/// The handshake of a connection has four messages: ClientHello, Answer, Proof and Accepted. The codes in Answer and
/// Proof cover the role of the signer, the identities of both links and the challenges of both, so no code is valid for
/// another role, pair of links or connection. The accepting side sends its code first.
struct ClientHello {
  static constexpr uint64_t kMagic = 0x31'70'63'74'78'76'6e'00;  // "\0nvxtcp1"; changes with any layout in this file
  uint64_t magic = kMagic;
  LinkNonce from{}, to{};
  Challenge challenge{};
};
static_assert(sizeof(ClientHello) == 72);

struct Answer {
  Challenge challenge{};
  Mac mac{};
};
static_assert(sizeof(Answer) == 64);

struct Proof {
  Mac mac{};
};

/// Sent to the connecting side when its proof has been accepted: messages may follow.
struct Accepted {
  std::byte any{};
};
static_assert(sizeof(Accepted) == 1);

enum class Role { kConnects, kAccepts };
Mac mac_of(Role signer, const ClientHello& hello, const Challenge& answer, const JobKey& key);

/// Precedes every message of an open connection. The header follows it, then the body.
struct Frame {
  enum Kind : uint8_t {
    kMessage,
    kLeave,  ///< the sender no longer needs the connection
    kClose,  ///< the sender closes its link
  };
  uint64_t bytes = 0;  ///< of the body
  uint8_t header_bytes = 0;
  Kind kind = kMessage;
  uint8_t reserved[6] = {};

  bool valid() const { return kind <= kClose && header_bytes <= kMostHeader; }
};
static_assert(sizeof(Frame) == 16);

}  // namespace nvx::net
