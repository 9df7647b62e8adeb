// A group of kernels whose ranks are on several hosts, in one NVLink domain. Ranks of other hosts share no pad with
// this one, so the messenger checks whether they are alive. Memory is as on one host, by fabric handles.

#include <numeric>
#include <optional>
#include <utility>

#include "base/log.h"
#include "group/core/core.h"
#include "group/device/device_communicator.h"
#include "group/device/kernel_executor.h"
#include "group/setup/nvlink_domain.h"
#include "group/setup/store_bootstrap.h"
#include "kernel/gpu/launch_cuda.h"
#include "memory/driver/gpu_info.h"

namespace nvx {

bool DeviceCommunicator::reaches_all(Store& store, int device) {
  if (members_.topology.hosts.size() == 1) return true;
  constexpr std::chrono::milliseconds kNvmlTimeout{10'000};
  MutexLock lock(mutex_);
  const auto query = [device] {
    NVX_CHECK(kernel::built_with_cuda(), "this build has no kernels");
    return domain_of(*DeviceRegistry::instance().driver(), device, *nvml_library());
  };
  std::string why;
  try {
    const DomainInfo info = domain_info(members_.rank, query, kNvmlTimeout);
    StoreBootstrap bootstrap = bootstrap_of_all(store, "device/domains");
    why = why_no_domain(bootstrap.all_gather(bytes_of(info)), [this](int r) { return members_.topology.describe(r); });
  } catch (const Error& error) {
    (void)core_.failures.fail(with_context(error.failure(), "while the ranks compared their NVLink domains"));
    return false;
  }
  NVX_LOG(kInfo, "group %s: the ranks are on several hosts, %s%s", members_.name.c_str(),
          why.empty() ? "and their GPUs are in one NVLink domain" : "and their GPUs are not in one NVLink domain: ",
          why.c_str());
  if (!why.empty()) return false;
  ranks_.resize(size_t(members_.size()));
  std::iota(ranks_.begin(), ranks_.end(), 0);
  why_no_rdma_ = "the GPUs are in one NVLink domain";
  return true;
}

bool DeviceCommunicator::spans_hosts() const { return ranks_.size() > size_t(members_.local_ranks()); }

/// An index into `ranks_`, whose rank is on another host.
bool DeviceCommunicator::is_remote(int kernel_rank) const {
  return members_.local_rank_of(ranks_[size_t(kernel_rank)]) < 0;
}

int DeviceCommunicator::kernel_rank_of(int local_rank) const {
  return spans_hosts() ? members_.ranks_of_host()[size_t(local_rank)] : local_rank;
}

/// A rank that left in good order may have ended all operations. If not, the kernels' timeout ends them here.
void DeviceCommunicator::check_remote_ranks() {
  if (core_.failures.check_reports()) return;
  std::optional<net::GroupPort::Departure> lost;
  {
    net::GroupPort& port = *core_.port;
    MutexLock lock(port.mutex());
    for (size_t s = 0; s < ranks_.size() && !lost; ++s) {
      if (!is_remote(int(s))) continue;
      port.ping(ranks_[s]);
      if (auto departure = port.departure(ranks_[s]); departure && !departure->left()) lost = std::move(departure);
    }
  }
  if (lost) (void)core_.failures.fail_by_departure(*lost);
}

void DeviceCommunicator::note_dead_remote_ranks(KernelExecutor& kernels) {
  net::GroupPort& port = *core_.port;
  MutexLock lock(port.mutex());
  for (size_t s = 0; s < ranks_.size(); ++s) {
    if (!is_remote(int(s))) continue;
    if (const auto departure = port.departure(ranks_[s]); departure && !departure->left()) kernels.note_dead(int(s));
  }
}

void DeviceCommunicator::announce_leaving() {
  if (!opened() || !spans_hosts()) return;
  net::GroupPort& port = *core_.port;
  MutexLock lock(port.mutex());
  for (size_t s = 0; s < ranks_.size(); ++s) {
    if (const auto peer = is_remote(int(s)) ? port.process_of(ranks_[s]) : std::nullopt)
      port.messenger().liveness().announce_left(*peer, members_.id, members_.rank, ranks_[s]);
  }
}

}  // namespace nvx
