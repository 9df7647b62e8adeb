#include "net/ucx_address.h"

#include <algorithm>
#include <cstring>
#include <string_view>

#include "base/hash.h"

namespace nvx::net {
namespace {

/// Before UCX's own address. Little endian, as all of nvx's platforms are.
struct Head {
  static constexpr uint32_t kMagic = 0x5543584e;  // "NXCU"
  static constexpr uint32_t kWire = 1;            // moves with this layout, with Sign, and with the size of segments

  uint32_t magic;
  uint32_t wire;
  uint32_t version[3];
  uint32_t worker_bytes;
  LinkNonce nonce;
  uint64_t checksum;  // of the worker's address
};
static_assert(sizeof(Head) == 48);

constexpr size_t kMostWorkerBytes = 64 << 10;

uint64_t checksum(std::span<const std::byte> bytes) {
  return Hash().add(std::string_view(reinterpret_cast<const char*>(bytes.data()), bytes.size())).value();
}

}  // namespace

std::string UcxVersion::text() const {
  return std::to_string(major) + "." + std::to_string(minor) + "." + std::to_string(patch);
}

std::vector<std::byte> encode_address(const UcxAddress& address) {
  const UcxVersion& version = address.version;
  const Head head{.magic = Head::kMagic,
                  .wire = Head::kWire,
                  .version = {version.major, version.minor, version.patch},
                  .worker_bytes = uint32_t(address.worker.size()),
                  .nonce = address.nonce,
                  .checksum = checksum(address.worker)};
  std::vector<std::byte> bytes(sizeof head + address.worker.size());
  std::memcpy(bytes.data(), &head, sizeof head);
  std::copy(address.worker.begin(), address.worker.end(), bytes.begin() + sizeof head);
  return bytes;
}

std::optional<UcxAddress> decode_address(std::span<const std::byte> bytes) {
  Head head{};
  if (bytes.size() < sizeof head) return std::nullopt;
  std::memcpy(&head, bytes.data(), sizeof head);
  const std::span<const std::byte> worker = bytes.subspan(sizeof head);
  if (head.magic != Head::kMagic || head.wire != Head::kWire) return std::nullopt;
  if (worker.empty() || worker.size() > kMostWorkerBytes || worker.size() != head.worker_bytes) return std::nullopt;
  if (checksum(worker) != head.checksum) return std::nullopt;
  return UcxAddress{{head.version[0], head.version[1], head.version[2]}, head.nonce, worker};
}

std::string why_not_together(const UcxVersion& mine, const UcxVersion& theirs) {
  constexpr UcxVersion kWatershed{1, 16, 0};
  if ((mine < kWatershed) == (theirs < kWatershed)) return "";
  return "this process runs UCX " + mine.text() + " and the peer UCX " + theirs.text() +
         ", which cannot read each other's addresses: have all ranks use one version, or set NVX_LIBUCP on each host "
         "to "
         "the libucp.so.0 that it should load";
}

}  // namespace nvx::net
