#pragma once

#include <atomic>
#include <functional>
#include <span>
#include <vector>

#include "kernel/cpu/pad.h"
#include "kernel/exec.h"

namespace nvx::kernel {

/// The memory of one peer as this process maps it, with the bounds that its leases must keep.
struct PeerMemory {
  std::byte* arena = nullptr;
  size_t arena_bytes = 0;
  std::byte* pad = nullptr;
  /// The memory of its process's tensors that peers read in place. May throw Error.
  std::function<std::span<std::byte>()> tensors{};
};

/// An operation as ranks compare it, and this rank's parameters of it.
struct Call {
  Fingerprint fingerprint;
  double factor = 1;  ///< this rank's multiplier for premul_sum
  int root = -1;      ///< of the algorithm, in the channel's numbering of ranks
};

enum class Staging { kSlot, kLeased };

/// One rank's end of a group's collectives inside a host: the pads of all ranks, the epoch, and which epochs each rank
/// is known to have completed. Used by one thread at a time.
///
/// Protocol:
///
///  1. Every collective is one epoch on every rank. A rank announces it in arrival(e), which it may overwrite at e +
///  kEpochs.
///
///  2. A rank enters epoch e only when all others are done with e - kEpochs. The slots of kEpochs consecutive
///  operations lie apart, so no rank still reads the memory that it overwrites. If every rank meets every rank,
///  this follows from the arrivals at no cost. Otherwise the rank waits until the others signal it: their credit.
///
///  3. Staging is leased memory, and the arrival states where it is. A rank writes to it again only when all ranks are
///  done with the last epoch that used it.
///
///  4. A rank may lend its data instead of staging it: the arrival states where the data is in the memory of its
///  process's tensors. It ends the epoch when all others are done, so none reads data that the caller changes. If it
///  fails before, the others may read changed data. They find out before they are done.
///
///  5. Ranks that meet compare their calls. Ranks that do not meet, such as the non-root ranks of a broadcast, compare
///  when they take the credit: each compares the other one's call at e - kEpochs with its own.
class Channel {
 public:
  /// `rotates`: slots go through all of the memory for slots, see rotation() in group/plan/plan.h.
  Channel(int rank, std::span<const PeerMemory> peers, uint32_t first_epoch, bool rotates);

  int rank() const { return rank_; }
  int size() const { return int(pads_.size()); }
  /// The other ranks. Each rank begins after itself, so that not all ranks access the same pad at once.
  const std::vector<int>& others() const { return others_; }
  uint32_t epoch() const { return epoch_; }

  Pad& pad(int rank) { return pads_[size_t(rank)]; }
  Pad& mine() { return pads_[size_t(rank_)]; }

  /// Begins the next epoch. On true, all memory that this rank writes in it is free.
  bool enter(CpuExec& ex);
  /// Release: announces this rank's arrival, its call and its staging. Everything it wrote to its slot is visible to
  /// ranks that meet it. Until leave() it may write more to its slot; readers of that wait for another flag of its pad,
  /// such as Pad::staged(), which it signals afterwards.
  void arrive(CpuExec& ex, const Call& call, Staging staging);
  /// Adds a call of the group to the history that later arrivals compare. It may have no step in this channel.
  void remember(const Fingerprint& call);
  /// Acquire: waits for one rank's arrival and compares its call. On true, the rank's slot is visible.
  bool meet(CpuExec& ex, int peer);
  bool meet_all(CpuExec& ex);
  /// Ends the epoch: this rank reads none of its data any more.
  void leave(CpuExec& ex) { ex.signal(mine().done(), stamp(epoch_, 0)); }
  /// The same for an epoch in which ranks may lend.
  bool leave_lenders(CpuExec& ex);

  /// The place of a small message of this epoch: inside the arrival, or in the slot. For the own rank: after enter(),
  /// with the bytes that this rank stages.
  std::byte* slot(int rank, size_t bytes) {
    Pad& p = pad(rank);
    if (bytes <= kInlineBytes) return p.arrival(epoch_).payload;
    if (rank != rank_) return p.slot(p.arrival(epoch_).lease_offset);
    slot_bytes_ = bytes;
    return p.slot(slot_at_);
  }

  /// Sets the staging that this rank may use; an empty range removes it.
  void lease(size_t offset, size_t bytes) { lease_offset_ = offset, lease_bytes_ = bytes, in_place_ = false; }
  /// Instead of staging: this rank's data is at this offset of its tensors. `bytes`: the staging that sizes the chunks.
  void lend(size_t offset, size_t bytes) { lease_offset_ = offset, lease_bytes_ = bytes, in_place_ = true; }
  bool lends() const { return in_place_; }
  /// This rank's staging. Waits until no rank reads data of an earlier epoch in it. Without memory if the rank lends.
  bool own_staging(CpuExec& ex, std::span<std::byte>* out);
  /// The staging of a rank that has been met; without memory if the rank lends `data` bytes, see lent(). Fails if the
  /// announced range is not inside that rank's memory.
  bool staging(CpuExec& ex, int rank, size_t data, std::span<std::byte>* out);
  /// After staging() in this epoch: the data that the rank lends, or null.
  const std::byte* lent(int rank) const { return lent_[size_t(rank)]; }
  /// The last epoch that used this rank's lease. Any thread may call it.
  uint32_t leased_epoch() const { return leased_epoch_.load(std::memory_order_acquire); }

  /// The start of a rank's staging, after staging() or own_staging() in this epoch.
  std::byte* staging_base(int rank) { return staging_[size_t(rank)]; }

  bool wait_done(CpuExec& ex, uint32_t epoch);

  /// Whether this rank decides for all ranks how they write to staging: see kernel/reduce/cache_policy.h.
  bool leads() const { return rank_ == 0; }
  /// Announces the next policy with the next arrival. Called by the leading rank.
  void announce(CachePolicy next) { next_policy_ = next; }
  /// The policy that the leading rank announced in this epoch, after it has been met.
  CachePolicy next_policy() const { return next_policy_; }
  CachePolicies& cache_policies() { return cache_policies_; }

  /// Scratch: one pointer and one factor per rank.
  std::vector<const void*>& sources() { return sources_; }
  std::vector<double>& factors() { return factors_; }

 private:
  void refresh(CpuExec& ex);
  void next_slot();
  bool compare(CpuExec& ex, int peer, uint32_t epoch);

  int rank_;
  uint32_t epoch_;
  std::vector<PeerMemory> memory_;
  std::vector<Pad> pads_;
  std::vector<int> others_;
  std::vector<uint32_t> done_;  // the last epoch that each rank is known to have completed
  std::vector<std::byte*> staging_;
  std::vector<const std::byte*> lent_;
  bool reads_lent_ = false;  // in this epoch
  std::vector<const void*> sources_;
  std::vector<double> factors_;
  uint64_t history_ = 0;
  CachePolicies cache_policies_;
  CachePolicy next_policy_ = CachePolicy::kCached;
  uint64_t lease_offset_ = 0;
  uint64_t lease_bytes_ = 0;
  bool in_place_ = false;
  const bool rotates_;
  uint64_t slot_at_ = 0;                // of this epoch's slot
  size_t slot_bytes_ = 0;               // written to it
  std::atomic<uint32_t> leased_epoch_;  // read by threads that want the lease
};

}  // namespace nvx::kernel
