#pragma once

#include <atomic>
#include <span>
#include <vector>

#include "kernel/cpu/pad.h"
#include "kernel/exec.h"

namespace nvx::kernel {

/// The memory of one peer as it is mapped here, with the bounds that its leases must keep.
struct PeerMemory {
  std::byte* arena = nullptr;
  size_t arena_bytes = 0;
  std::byte* pad = nullptr;
};

/// What a rank calls, in the form in which ranks compare it, and what the algorithm is to do about it.
struct Call {
  Fingerprint fingerprint;
  double factor = 1;  ///< premul_sum's multiplier of this rank
  int root = -1;      ///< of the algorithm, as the channel numbers ranks
};

enum class Staging { kSlot, kLeased };

/// One rank's end of a group's collectives inside a host: the pads of all ranks, the epoch, and who is known to have
/// finished what. Used by one thread at a time.
///
/// The rules that all ranks keep:
///
///  1. Every collective is one epoch on every rank. A rank announces it in arrival(e), which it may overwrite at
///     e + kEpochs.
///
///  2. A rank enters epoch e only when all others are done with e - kEpochs, so nobody still reads what it overwrites.
///     Where every rank hears from every rank, this follows from the arrivals and costs nothing. Elsewhere the rank
///     waits until the others have said so: that is their credit.
///
///  3. Staging is leased memory, and the arrival says where it is. It is written again only when all ranks are done
///     with the epoch that used it last.
///
///  4. Ranks that meet compare what they call. Ranks that do not meet, as around a root, compare when they take the
///     credit: then each looks at what the other one called at e - kEpochs.
class Channel {
 public:
  Channel(int rank, std::span<const PeerMemory> peers, uint32_t first_epoch);

  int rank() const { return rank_; }
  int size() const { return int(pads_.size()); }
  /// The i-th of the others, i from 0: each rank begins after itself, so that not all knock at the same door.
  int other(int i) const { return (rank_ + 1 + i) % size(); }
  int others() const { return size() - 1; }
  uint32_t epoch() const { return epoch_; }

  Pad& pad(int rank) { return pads_[size_t(rank)]; }
  Pad& mine() { return pads_[size_t(rank_)]; }

  /// Opens the next epoch: what this rank will write to is free when it returns true.
  bool enter(CpuExec& ex);
  /// Says that this rank is there, what it calls, where its data will be, and that what its slot holds is written.
  void arrive(CpuExec& ex, const Call& call, Staging staging);
  /// Waits for one rank to have arrived and compares what it calls.
  bool meet(CpuExec& ex, int peer);
  bool meet_all(CpuExec& ex);
  /// Closes the epoch: this rank reads nothing of it any more.
  void leave(CpuExec& ex);

  /// Where a small message of this epoch lies: inside the arrival, or in the slot.
  std::byte* slot(int rank, size_t bytes) {
    Pad& p = pad(rank);
    return bytes <= kInlineBytes ? p.arrival(epoch_).payload : p.slot(epoch_);
  }

  /// The staging that this rank may use from now on; empty takes it away.
  void lease(size_t offset, size_t bytes);
  /// The staging of this rank. Waits until nobody reads what an earlier epoch left there.
  bool own_staging(CpuExec& ex, std::span<std::byte>* out);
  /// The staging of a rank that has been met. False if what that rank claims is not in its arena.
  bool staging(CpuExec& ex, int rank, std::span<std::byte>* out);
  /// The last epoch that used this rank's lease. From any thread.
  uint32_t leased_epoch() const { return leased_epoch_.load(std::memory_order_acquire); }

  /// Where that staging begins, once staging() or own_staging() has found it in this epoch.
  std::byte* staging_base(int rank) { return staging_[size_t(rank)]; }

  /// Waits for every other rank to be done with the epoch.
  bool wait_done(CpuExec& ex, uint32_t epoch);

  /// Whether this rank decides for all how they write to staging: see kernel/reduce/cache_policy.h.
  bool leads() const { return rank_ == 0; }
  /// For the rank that leads: tells the others, with its next arrival.
  void tell(CachePolicy next) { next_policy_ = next; }
  /// What the leading rank has told in this epoch, once it has been met.
  CachePolicy next_policy() const { return next_policy_; }
  CachePolicies& cache_policies() { return cache_policies_; }

  /// Scratch for one pointer and one factor a rank.
  std::vector<const void*>& sources() { return sources_; }
  std::vector<double>& factors() { return factors_; }

 private:
  void refresh(CpuExec& ex);
  bool compare(CpuExec& ex, int peer, uint32_t epoch);

  int rank_;
  uint32_t epoch_;
  std::vector<PeerMemory> memory_;
  std::vector<Pad> pads_;
  std::vector<uint32_t> done_;  // the epoch that each rank is known to be done with
  std::vector<std::byte*> staging_;
  std::vector<const void*> sources_;
  std::vector<double> factors_;
  uint64_t history_ = 0;
  CachePolicies cache_policies_;
  CachePolicy next_policy_ = CachePolicy::kCached;
  uint64_t lease_offset_ = 0;
  uint64_t lease_bytes_ = 0;
  std::atomic<uint32_t> leased_epoch_;  // read by those who would like to have the lease
};

}  // namespace nvx::kernel
