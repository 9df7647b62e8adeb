#pragma once

#include <chrono>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/failure.h"
#include "base/words.h"
#include "memory/gpu/device_arena.h"
#include "memory/gpu/device_check.h"

namespace nvx {

/// How the ranks that want to share device memory tell each other things.
class Exchange {
 public:
  virtual ~Exchange() = default;
  /// Each rank says one thing, and hears what all have said, by rank. Throws Error when not all do.
  virtual std::vector<std::vector<std::byte>> all_gather(std::span<const std::byte> mine) = 0;
  /// Called when this rank has failed, for this reason, and will say nothing any more. Whoever waits for it may be
  /// told.
  virtual void give_up(const Failure& /*why*/) {}
};

struct ShareOptions {
  int rank = 0;
  int ranks = 1;
  int device = 0;
  uint64_t host = 0;                         ///< ranks with the same one can pass each other descriptors
  std::chrono::milliseconds patience{2000};  ///< with each kind and each pair that is tried; DeviceHome has its own
  RankNames name = of_rank;                  ///< what messages call a rank
};

/// What a rank says of itself. Fixed layout; comes from peers.
struct DeviceCard {
  static constexpr uint32_t kMagic = 0x6478766e;  // "nvxd"
  uint32_t magic = kMagic;
  uint32_t bytes = sizeof(DeviceCard);
  int32_t rank = -1;
  int32_t device = -1;
  uint32_t kinds = 0;  ///< that it can export, a bit each
  uint32_t reserved = 0;
  uint64_t host = 0;
  ArenaId home;  ///< of its process
  std::array<uint8_t, 16> uuid{};
  char why_not[kShareKinds][96] = {};
  char door[48] = {};
};
static_assert(sizeof(DeviceCard) == 592);

/// What all ranks make their arenas with.
struct ShareAgreement {
  ShareKind kind = ShareKind::kHost;
  std::string why_not_better;  ///< who lacks what; empty where nothing is lacked
};
/// The best kind that every rank has; kPointer where there is one process only. Pure: the same on every rank. Throws
/// Error where the ranks have none in common.
ShareAgreement agree_on_kind(std::span<const DeviceCard> cards, const RankNames& name_of = of_rank);

/// How this rank and another one reach each other's memory.
struct DevicePeer {
  ShareKind kind = ShareKind::kPointer;
  DevicePtr theirs = 0;        ///< the other's memory, as this rank's device sees it
  DevicePtr mine = 0;          ///< this rank's own, the part of it that the other one sees as its `theirs`
  size_t bytes = 0;            ///< of theirs; offsets are the other arena's
  ArenaId arena;               ///< theirs
  bool same_gpu = false;       ///< whose kernels must be on it at once with this rank's
  std::string why_not_better;  ///< empty for the kind that was agreed on
};

/// The memory of the ranks' devices, mapped by all of them: made, handed over, tried with a pattern, and where two
/// devices cannot reach each other replaced by pinned host memory.
class DeviceShare {
 public:
  /// A step of all ranks together. Throws Error, and then on all ranks unless one has ended.
  DeviceShare(DeviceHome& home, Exchange& exchange, const ShareOptions& options);

  const ShareAgreement& agreement() const { return agreement_; }
  DeviceArena& arena() const { return *arena_; }
  /// This rank itself included.
  const DevicePeer& peer(int rank) const { return peers_[size_t(rank)]; }
  /// A line for each pair that has less than what was agreed on, with the reason. Empty where all is well.
  std::string complaints() const;

 private:
  friend class Meeting;
  ShareAgreement agreement_;
  DeviceArena* arena_ = nullptr;
  std::vector<DevicePeer> peers_;
  MappedRegions kept_;  // of others
  RankNames name_of_;
};

}  // namespace nvx
