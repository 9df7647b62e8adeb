#include "net/tcp/tcp_wire.h"

#include <cstring>

namespace nvx::net {
namespace {

/// Precedes the addresses of the listeners. The code of both comes last.
struct Head {
  static constexpr uint64_t kMagic = 0x31'72'64'61'78'76'6e'00;  // "\0nvxadr1"
  uint64_t magic = kMagic;
  LinkNonce nonce{};
  uint64_t listeners = 0;
};
static_assert(sizeof(Head) == 32);

Mac mac_of_address(std::span<const std::byte> bytes, const JobKey& key) { return key.sign("nvx tcp address", {bytes}); }

}  // namespace

std::vector<std::byte> encode_address(const TcpAddress& address, const JobKey& key) {
  const Head head{.nonce = address.nonce, .listeners = address.listeners.size()};
  const std::span<const std::byte> listeners = std::as_bytes(std::span(address.listeners));
  const size_t signed_bytes = sizeof head + listeners.size();
  std::vector<std::byte> bytes(signed_bytes + sizeof(Mac));
  std::memcpy(bytes.data(), &head, sizeof head);
  if (!listeners.empty()) std::memcpy(bytes.data() + sizeof head, listeners.data(), listeners.size());
  const Mac mac = mac_of_address(std::span(bytes).first(signed_bytes), key);
  std::memcpy(bytes.data() + signed_bytes, mac.data(), mac.size());
  return bytes;
}

std::optional<TcpAddress> decode_address(std::span<const std::byte> bytes, const JobKey& key) {
  Head head;
  Mac mac;
  if (bytes.size() < sizeof head + sizeof mac) return std::nullopt;
  std::memcpy(&head, bytes.data(), sizeof head);
  if (head.magic != Head::kMagic || head.listeners == 0 || head.listeners > kMostAddresses) return std::nullopt;
  if (bytes.size() != sizeof head + head.listeners * sizeof(HostAddress) + sizeof mac) return std::nullopt;
  std::memcpy(mac.data(), bytes.last(sizeof mac).data(), sizeof mac);
  const std::span<const std::byte> signed_part = bytes.first(bytes.size() - sizeof mac);
  if (!JobKey::same(mac, mac_of_address(signed_part, key))) return std::nullopt;
  TcpAddress address{head.nonce, std::vector<HostAddress>(head.listeners)};
  std::memcpy(address.listeners.data(), signed_part.data() + sizeof head, signed_part.size() - sizeof head);
  return address;
}

Mac mac_of(Role signer, const ClientHello& hello, const Challenge& answer, const JobKey& key) {
  return key.sign(signer == Role::kConnects ? "nvx tcp: I connect" : "nvx tcp: I accept",
                  {std::as_bytes(std::span(&hello, 1)), answer});
}

}  // namespace nvx::net
