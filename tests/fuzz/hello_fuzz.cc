// The hello values of ranks, as stored: any input is refused with an Error, or is a consistent topology.

#include <cstdint>
#include <cstdlib>
#include <cstring>

#include "base/error.h"
#include "base/text.h"
#include "group/setup/topology.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  if (size == 0) return 0;
  const size_t count = 1 + data[0] % 4;
  std::vector<uint8_t> value(data + 1, data + size);
  if (data[0] & 0x80) {
    // Valid hellos, overlaid with the input, so that the checks behind the magic number are reached.
    std::vector<nvx::Hello> honest(count);
    for (size_t r = 0; r < count; ++r) {
      honest[r].rank = int32_t(r);
      honest[r].bytes = sizeof(nvx::Hello);
    }
    if (data[0] & 0x40) honest.pop_back();  // of a job of another size
    std::vector<uint8_t> laid = nvx::encode(honest);
    if (laid.empty()) return 0;
    for (size_t i = 0; i < value.size(); ++i) laid[i * 7 % laid.size()] ^= value[i];
    value = laid;
  }
  try {
    const std::vector<nvx::Hello> hellos = nvx::decode(value, count);
    if (hellos.size() != count) std::abort();
    const nvx::Topology topology = nvx::Topology::from(hellos);
    for (const std::string& text : {topology.describe(), topology.host_warning()}) {
      if (nvx::printable(text) != text) std::abort();
    }
    for (size_t r = 0; r < count; ++r) {
      (void)nvx::sources_of(topology.ranks[r], topology.ranks[0]);
      if (topology.ranks[r].rank != int32_t(r) || topology.describe(int(r)).size() > 200) std::abort();
      if (std::strlen(topology.ranks[r].socket) >= sizeof(nvx::Hello::socket)) std::abort();
    }
  } catch (const nvx::Error&) {
  }
  return 0;
}
