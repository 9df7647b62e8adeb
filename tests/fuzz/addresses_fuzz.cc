// The addresses of all ranks, as stored: any input is refused with an Error, or is one address per rank, which encode
// to the same value.

#include <cstdint>
#include <cstdlib>

#include "base/error.h"
#include "group/setup/topology.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const size_t count = data[0] % 5;
  std::vector<uint8_t> value(data + 1, data + size);
  if (data[0] & 0x80) {  // valid addresses, overlaid with the input
    std::vector<std::vector<std::byte>> honest;
    for (size_t i = 0; i < count; ++i) honest.emplace_back(8 * i, std::byte(i));
    std::vector<uint8_t> laid = nvx::encode_addresses(honest);
    for (size_t i = 0; i < value.size(); ++i) laid[i * 5 % laid.size()] ^= value[i];
    value = laid;
  }
  try {
    const auto addresses = nvx::decode_addresses(value, count);
    if (addresses.size() != count || nvx::encode_addresses(addresses) != value) std::abort();
  } catch (const nvx::Error&) {
  }
  return 0;
}
