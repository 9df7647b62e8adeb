#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "base/text.h"
#include "group/setup/nvml.h"
#include "memory/driver/device_driver.h"

/// Whether ranks on several hosts share an NVLink domain.
namespace nvx {

/// A rank's report of its GPU's domain. The layout is fixed. It comes from peers.
struct DomainInfo {
  static constexpr uint32_t kMagic = 0x6b78766e;  // "nvxk"
  uint32_t magic = kMagic;
  int32_t rank = -1;
  std::array<uint8_t, 16> cluster{};  ///< zero: none
  uint32_t clique = 0;
  char why_none[92] = {};
};
static_assert(sizeof(DomainInfo) == 120);

/// The domain of the driver's GPU `device`: that of NVML's GPU on the same bus. Throws Error if it is in none.
NvlinkDomain domain_of(DeviceDriver& driver, int device, Nvml& nvml);

/// The rank's DomainInfo, with the domain that `query` returns. If `query` throws Error, or does not return within
/// `timeout`, it has the reason instead.
DomainInfo domain_info(int rank, std::function<NvlinkDomain()> query, std::chrono::milliseconds timeout);

/// The reason why the ranks are not in one domain, from the DomainInfo of each; empty if they are. A pure function: the
/// same on all ranks. Throws Error if an info does not have this layout.
std::string why_no_domain(const std::vector<std::vector<std::byte>>& infos, const RankNames& name_of);

}  // namespace nvx
