#include "group/setup/nvlink_domain.h"

#include <exception>
#include <utility>

#include "base/error.h"
#include "group/setup/gpu_topology.h"
#include "memory/driver/gpu_info.h"
#include "memory/driver/thread_call.h"
#include "memory/gpu/device_memory.h"

namespace nvx {

NvlinkDomain domain_of(DeviceDriver& driver, int device, Nvml& nvml) {
  DeviceProperties properties;
  check_driver(driver, driver.describe(device, &properties), "cuDeviceGetAttribute", device);
  for (const GpuProperties& gpu : nvml.gpus()) {
    if (bus_key(gpu.bus) != bus_key(properties.bus)) continue;
    if (gpu.domain) return *gpu.domain;
    throw Error(Code::kInvalid, "nvx: GPU " + properties.bus + " has joined no NVLink fabric beyond its host");
  }
  throw Error(Code::kInvalid, "nvx: NVML does not list GPU " + properties.bus);
}

DomainInfo domain_info(int rank, std::function<NvlinkDomain()> query, std::chrono::milliseconds timeout) {
  DomainInfo info;
  info.rank = rank;
  try {
    const auto domain =
        call_or_throw<NvlinkDomain>("querying NVML for the NVLink fabric", Deadline::after(timeout), std::move(query));
    info.cluster = domain.cluster;
    info.clique = domain.clique;
  } catch (const std::exception& error) {
    put(info.why_none, without_name(error.what()));
  }
  return info;
}

std::string why_no_domain(const std::vector<std::vector<std::byte>>& infos, const RankNames& name_of) {
  const auto all = read_infos<DomainInfo>(infos, name_of);
  std::string why;
  for (size_t r = 0; r < all.size(); ++r) {
    const DomainInfo& info = all[r];
    if (!why.empty()) continue;
    if (info.cluster == decltype(info.cluster){}) {
      why = name_of(int(r)) + ": " + text_of(info.why_none);
    } else if (info.cluster != all[0].cluster) {
      why = name_of(int(r)) + " and " + name_of(0) + " are in different NVLink clusters";
    } else if (info.clique != all[0].clique) {
      why = name_of(int(r)) + " and " + name_of(0) + " are in different cliques of their NVLink cluster";
    }
  }
  return why;
}

}  // namespace nvx
