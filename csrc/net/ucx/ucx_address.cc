#include "net/ucx/ucx_address.h"

#include <algorithm>
#include <cstring>
#include <string_view>

#include "base/hash.h"

namespace nvx::net {
namespace {

/// Precedes UCX's own address. Little endian, like all of nvx's platforms.
struct AddressHead {
  static constexpr uint32_t kMagic = 0x5543584e;  // "NXCU"
  /// Increases with changes of this layout, of ControlMessage, and of the segment size.
  static constexpr uint32_t kWire = 2;

  uint32_t magic;
  uint32_t wire_version;
  uint32_t version[3];
  uint32_t worker_bytes;
  LinkNonce nonce;
  uint64_t addresses;
  uint64_t checksum;  // of the host's addresses, which come first, and of the worker's address
};
static_assert(sizeof(AddressHead) == 56);

constexpr size_t kMostWorkerBytes = 64 << 10;

static_assert(std::has_unique_object_representations_v<HostAddress>);

uint64_t checksum(std::span<const std::byte> bytes) {
  return Hash().add(std::string_view(reinterpret_cast<const char*>(bytes.data()), bytes.size())).value();
}

}  // namespace

std::string UcxVersion::text() const {
  return std::to_string(major) + "." + std::to_string(minor) + "." + std::to_string(patch);
}

std::vector<std::byte> encode_address(const UcxAddress& address) {
  const std::span<const std::byte> hosts = std::as_bytes(std::span(address.reached_at));
  std::vector<std::byte> behind(hosts.begin(), hosts.end());
  behind.insert(behind.end(), address.worker.begin(), address.worker.end());
  const UcxVersion& version = address.version;
  const AddressHead head{.magic = AddressHead::kMagic,
                         .wire_version = AddressHead::kWire,
                         .version = {version.major, version.minor, version.patch},
                         .worker_bytes = uint32_t(address.worker.size()),
                         .nonce = address.nonce,
                         .addresses = address.reached_at.size(),
                         .checksum = checksum(behind)};
  std::vector<std::byte> bytes(sizeof head + behind.size());
  std::memcpy(bytes.data(), &head, sizeof head);
  std::ranges::copy(behind, bytes.begin() + sizeof head);
  return bytes;
}

std::optional<UcxAddress> decode_address(std::span<const std::byte> bytes) {
  AddressHead head{};
  if (bytes.size() < sizeof head) return std::nullopt;
  std::memcpy(&head, bytes.data(), sizeof head);
  const std::span<const std::byte> behind = bytes.subspan(sizeof head);
  if (head.magic != AddressHead::kMagic || head.wire_version != AddressHead::kWire) return std::nullopt;
  if (head.addresses > kMostAddresses || behind.size() < head.addresses * sizeof(HostAddress)) return std::nullopt;
  const std::span<const std::byte> worker = behind.subspan(head.addresses * sizeof(HostAddress));
  if (worker.empty() || worker.size() > kMostWorkerBytes || worker.size() != head.worker_bytes) return std::nullopt;
  if (checksum(behind) != head.checksum) return std::nullopt;
  UcxAddress address{{head.version[0], head.version[1], head.version[2]}, head.nonce, worker};
  address.reached_at.resize(head.addresses);
  if (head.addresses != 0) std::memcpy(address.reached_at.data(), behind.data(), head.addresses * sizeof(HostAddress));
  return address;
}

std::string why_not_together(const UcxVersion& mine, const UcxVersion& theirs) {
  constexpr UcxVersion kIncompatibleFrom{1, 16, 0};
  if ((mine < kIncompatibleFrom) == (theirs < kIncompatibleFrom)) return "";
  return "this process runs UCX " + mine.text() + " and the peer UCX " + theirs.text() +
         ", which cannot read each other's addresses: have all ranks use one version, or set NVX_LIBUCP on each host "
         "to the libucp.so.0 that it should load";
}

}  // namespace nvx::net
