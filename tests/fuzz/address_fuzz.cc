// The address by which ranks of other hosts are reached, as stored: any input is refused, or is an address that decodes
// and encodes to the same value.

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <span>

#include "net/ucx/ucx_address.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace nvx::net;
  const std::span<const std::byte> input = std::as_bytes(std::span(data, size));
  if (const auto address = decode_address(input)) {
    for (const HostAddress& host : address->reached_at) (void)host.text();
    const std::vector<std::byte> again = encode_address(*address);
    if (!std::equal(again.begin(), again.end(), input.begin(), input.end())) std::abort();
    why_not_together({1, 16, 0}, address->version);
  }
  // A valid address of these bytes with one of them changed; the checksum would keep the fuzzer from finding one.
  if (size < 3) return 0;
  const std::vector<std::byte> honest =
      encode_address({{data[0], data[1], 0}, {1, 2}, input.subspan(2), std::vector<HostAddress>(data[0] % 17)});
  const auto back = decode_address(honest);
  if (!back || back->version != UcxVersion{data[0], data[1], 0} || back->worker.size() != size - 2) std::abort();
  if (back->reached_at.size() != data[0] % 17) std::abort();
  std::vector<std::byte> damaged = honest;
  const size_t at = (data[0] * size_t(256) + data[1]) % damaged.size();
  damaged[at] ^= std::byte(data[2] | 1);
  if (const auto other = decode_address(damaged);
      other && other->worker.data() + other->worker.size() > damaged.data() + damaged.size()) {
    std::abort();
  }
  return 0;
}
