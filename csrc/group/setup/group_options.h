#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/config.h"
#include "memory/shm/shm_registry.h"
#include "net/link.h"

namespace nvx {

namespace net {
class Messenger;
}

/// The process of a rank, as an earlier group of this process knows it.
struct EarlierProcess {
  ArenaId id;
  std::string place{};                   ///< "pid 4711, host a01"
  std::shared_ptr<PeerProcess> local{};  ///< on this host
  std::optional<net::PeerId> remote{};   ///< on another host
};

struct GroupOptions {
  std::string name;
  int rank = 0;
  int size = 1;
  std::chrono::milliseconds timeout{0};        ///< for operations and set-up; 0: none
  std::vector<uint64_t> global_ranks;          ///< of the ranks, if known; set-up watches their processes
  std::vector<EarlierProcess> processes;       ///< of the ranks, if known; the same
  std::optional<Kernels> kernels;              ///< instead of `NVX_KERNELS`; the same on all ranks
  std::string tune;                            ///< as `NVX_TUNE`, and instead of it key by key
  uint32_t first_epoch = 0;                    ///< first value of the counters; tests start near the wrap
  std::string host;                            ///< overrides the host that this rank detects; for tests
  bool whole_job = false;                      ///< all other groups consist of ranks of this one
  std::chrono::milliseconds reminder{10'000};  ///< between log lines that name the ranks that set-up waits for
  std::function<bool()> aborted;               ///< called during set-up; gives up if it is true or throws Error
  std::function<std::shared_ptr<net::Messenger>()> messenger;  ///< overrides the messenger of the process; for tests
};

}  // namespace nvx
