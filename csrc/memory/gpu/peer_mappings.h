#pragma once

#include <array>
#include <chrono>
#include <span>
#include <string>
#include <vector>

#include "base/failure.h"
#include "base/text.h"
#include "memory/gpu/device_arena.h"
#include "memory/gpu/device_multicast.h"
#include "memory/gpu/device_work.h"

namespace nvx {

/// The communication of ranks that set up shared device memory.
class Bootstrap {
 public:
  virtual ~Bootstrap() = default;
  /// Gathers one value from each rank, by rank. Throws Error unless all ranks contribute.
  virtual std::vector<std::vector<std::byte>> all_gather(std::span<const std::byte> mine) = 0;
  /// This rank has failed and contributes nothing more. The implementation may notify the ranks that wait for it.
  virtual void give_up(const Failure& /*why*/) {}
};

struct MappingOptions {
  int rank = 0;
  int ranks = 1;
  int device = 0;
  uint64_t host = 0;  ///< ranks with the same value can pass each other descriptors
  /// For each kind, and each pair that is checked. Mapping a peer's memory takes as long as DeviceRegistry allows: many
  /// processes may pin memory at once.
  std::chrono::milliseconds timeout{2000};
  size_t multicast_bytes = 0;  ///< of each rank, behind one address; 0: none. The same on every rank
  RankNames name = of_rank;    ///< the name of a rank in messages
};

/// A rank's description of its device. The layout is fixed. It comes from peers.
struct DeviceInfo {
  static constexpr uint32_t kMagic = 0x6478766e;  // "nvxd"
  uint32_t magic = kMagic;
  int32_t rank = -1;
  int32_t device = -1;
  uint32_t kinds = 0;  ///< the kinds that it can export, a bit each
  uint64_t host = 0;
  ArenaId process;  ///< identifies its process
  std::array<uint8_t, 16> uuid{};
  char why_not[kShareKinds][96] = {};
  char socket[48] = {};
};
static_assert(sizeof(DeviceInfo) == 584);

/// The kind with which all ranks create their arenas.
struct ShareAgreement {
  ShareKind kind = ShareKind::kHost;
  std::string why_not_better;  ///< which ranks lack a better kind, and why; empty if none does
};
/// The best kind that every rank has; kPointer in one process. Pure. Throws Error if they have none in common.
ShareAgreement agree_on_kind(std::span<const DeviceInfo> infos, const RankNames& name_of = of_rank);

/// How this rank and another one access each other's memory.
struct DevicePeer {
  ShareKind kind = ShareKind::kPointer;
  DevicePtr theirs = 0;            ///< the other rank's memory at an address of this rank's device
  DevicePtr mine = 0;              ///< this rank's own memory: the part that the other rank has as `theirs`
  size_t bytes = 0;                ///< of theirs; offsets are those of the other rank's arena
  ArenaId arena;                   ///< of the other rank
  bool same_gpu = false;           ///< both ranks' kernels must be resident on it at once
  std::string why_not_better;      ///< empty for the agreed kind
  std::array<uint8_t, 16> uuid{};  ///< of the other rank's GPU; zero if the driver does not identify its GPUs
};

/// The memory of the ranks' devices, mapped by all of them. It is created, exchanged and tried with a pattern. Pairs
/// that cannot access each other's devices use pinned host memory instead.
class PeerMappings {
 public:
  /// Collective over all ranks. Throws Error, on all ranks unless one has ended.
  PeerMappings(DeviceRegistry& registry, Bootstrap& bootstrap, const MappingOptions& options);

  const ShareAgreement& agreement() const { return agreement_; }
  DeviceArena& arena() const { return *arena_; }
  /// Valid for this rank too.
  const DevicePeer& peer(int rank) const { return peers_[size_t(rank)]; }
  /// One line, with the reason, for each pair that has less than the agreed kind. Empty if there is none.
  std::string fallbacks() const;
  /// This rank's part of the ranks' multicast object, or null. All ranks have one or none. The caller releases it.
  std::unique_ptr<MulticastSpan> take_multicast() { return std::move(multicast_); }
  /// The reason why there is no object though the options requested it, the same on all ranks.
  const std::string& why_no_multicast() const { return why_no_multicast_; }

 private:
  friend class MappingSetup;
  ShareAgreement agreement_;
  DeviceArena* arena_ = nullptr;
  std::vector<DevicePeer> peers_;
  MappedRegions kept_;  // of other processes
  RankNames name_of_;
  std::unique_ptr<MulticastSpan> multicast_;
  std::string why_no_multicast_;
};

}  // namespace nvx
