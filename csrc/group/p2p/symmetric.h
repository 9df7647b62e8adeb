#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "base/flag.h"
#include "group/p2p/gather.h"
#include "memory/gpu/peer_pool.h"

namespace nvx {

/// A block of memory of one rank: data, and behind it a pad of signals.
struct SymmetricBlock {
  uint64_t offset = 0;     ///< in the `TensorMemory` of its process, or in the pool of its GPU
  uint64_t bytes = 0;      ///< of the data
  uint64_t pad = 0;        ///< where the pad begins, from the block's start
  uint64_t pad_bytes = 0;  ///< of the pad

  bool is_like(const SymmetricBlock& other) const {
    return bytes == other.bytes && pad == other.pad && pad_bytes == other.pad_bytes;
  }
};

/// The blocks of all ranks of a group, which is on one host, as this rank maps them.
///
/// A signal is a word of a receiver's pad, one for each channel and sender: 0, or 1 from the sender's put to the
/// receiver's wait. torch's kernels have the same layout. A rank may wait for its own signals too.
///
/// It may outlive its group. A rank announces at the end of this object that it accesses no memory of the others, in
/// the release flags of each. The memory of a block is not reused before; see `released()`.
class Symmetric {
 public:
  /// How a rank finds its peers' blocks. `pool_of`: for memory of GPUs, the pool of a local rank, null for this rank's.
  struct Parts {
    Core& core;
    Execute execute;
    std::function<std::shared_ptr<PeerPool>(int local_rank)> pool_of;
  };

  /// All ranks of the group call it. `base`: of this rank's block. Throws Error: kInvalid, on all ranks, if a block
  /// differs or a rank cannot map one; then the group stays usable.
  static std::shared_ptr<Symmetric> rendezvous(const Parts& group, const SymmetricBlock& mine, std::byte* base);
  ~Symmetric();
  Symmetric(const Symmetric&) = delete;

  const SymmetricBlock& block() const { return mine_; }
  std::byte* data(int rank) const { return base_[size_t(rank)]; }
  std::byte* pad(int rank) const { return base_[size_t(rank)] + mine_.pad; }
  int size() const { return int(base_.size()); }
  int rank() const { return rank_; }
  /// The channels that the pads have words for.
  uint64_t channels() const { return mine_.pad_bytes / sizeof(uint32_t) / base_.size(); }

  /// Of blocks in host memory. `core`: of the group, which is alive. A put waits until the receiver has taken this
  /// rank's last signal of the channel. Release: all earlier writes of this thread are visible to the thread that takes
  /// the signal. `timeout`: 0 is the group's. A wait that fails fails the group.
  Status put(Core& core, int to, uint64_t channel, std::chrono::milliseconds timeout);
  Status wait(Core& core, int from, uint64_t channel, std::chrono::milliseconds timeout);
  Status barrier(Core& core, uint64_t channel, std::chrono::milliseconds timeout);

  /// True once no peer accesses this rank's block through this object any more: each has destroyed its own, or its
  /// process has ended. The function may outlive this object.
  std::function<bool()> released() const;

 private:
  /// In memory of each rank; the others write it.
  struct ReleaseFlags {
    Flag flag;  // only its bell and sleepers are used
    using Left = std::atomic<uint32_t>;
    Left& left(int rank) { return reinterpret_cast<Left*>(this + 1)[rank]; }
    static size_t bytes(size_t ranks) { return sizeof(ReleaseFlags) + ranks * sizeof(Left); }
  };
  struct Info {
    SymmetricBlock block;
    uint64_t flags_at;  // its offset in the `TensorMemory` of its process
    uint64_t has_flags;
  };
  /// This rank's access to another one's memory.
  struct Peer {
    std::shared_ptr<PeerProcess> process;  // null for ranks of this process
    std::shared_ptr<const Mapping> tensors;
    std::shared_ptr<PeerPool> pool;  // null for host memory
  };
  /// Shared with the functions of `released()`. `done` stays once it is set: the flags may be used again then.
  struct Leaving {
    std::vector<std::pair<std::shared_ptr<PeerProcess>, const std::atomic<uint32_t>*>> peers;
    bool on_gpu = false;
    std::atomic<bool> done{false};
    bool all_left();
  };

  Symmetric(const Core& core, const SymmetricBlock& mine);
  void map(const Parts& group, const std::vector<Info>& infos, std::byte* base);
  void map_peer(const Parts& group, int rank, const Info& info);
  void begin_use(const Parts& group);
  Status swap(Core& core, const char* what, int peer, std::atomic<uint32_t>& word, uint32_t from, uint32_t to,
              const WaitRules& rules);
  Status raise_signal(Core& core, const char* what, int to, uint64_t channel, const WaitRules& rules);
  Status clear_signal(Core& core, const char* what, int from, uint64_t channel, const WaitRules& rules);
  std::atomic<uint32_t>& word(int receiver, int sender, uint64_t channel) const;

  const SymmetricBlock mine_;
  const int rank_;
  const uint32_t fork_generation_;
  const std::shared_ptr<ShmRegistry> shm_;
  const Span flags_span_;
  std::vector<Peer> peers_;                   // by rank
  std::vector<std::byte*> base_;              // by rank
  std::vector<ReleaseFlags*> release_flags_;  // by rank
  bool shares_flags_ = false;                 // the others may set this rank's release flags
  std::shared_ptr<Leaving> leaving_;          // null until all ranks have mapped each other
};

}  // namespace nvx
