#pragma once

#include <array>
#include <chrono>
#include <memory>
#include <string>

#include "base/deadline.h"
#include "kernel/cpu/pad.h"
#include "kernel/piece.h"

namespace nvx {

/// A piece for each rank; without allocation up to eight ranks.
class Pieces {
 public:
  Pieces() = default;
  explicit Pieces(size_t n) : size_(n) {
    if (n > few_.size()) many_ = std::make_unique<kernel::Piece[]>(n);
  }
  kernel::Piece* data() { return many_ ? many_.get() : few_.data(); }
  const kernel::Piece* data() const { return many_ ? many_.get() : few_.data(); }
  kernel::Piece& operator[](size_t i) { return data()[i]; }
  const kernel::Piece& operator[](size_t i) const { return data()[i]; }
  size_t size() const { return size_; }
  /// Bytes of the longest one.
  size_t longest() const {
    size_t bytes = 0;
    for (size_t i = 0; i < size_; ++i) bytes = data()[i].bytes > bytes ? data()[i].bytes : bytes;
    return bytes;
  }

 private:
  size_t size_ = 0;
  std::array<kernel::Piece, 8> few_{};
  std::unique_ptr<kernel::Piece[]> many_;
};

/// What an operation is a chunk of (group/plan/chunks.h), or a step of: what ranks compare and errors speak of, whose
/// time it shares, and the bytes as which it is planned between hosts.
struct Whole {
  kernel::Fingerprint fingerprint;
  Deadline deadline;
  size_t bytes = 0;
};

class HostProxy;

/// One collective of one rank, in terms of memory. Which fields count depends on the collective:
///   all_reduce, reduce     in, out, count (elements)
///   reduce_scatter         send (a piece for each rank), out
///   all_gather, broadcast  in, recv (all_gather: a piece of each rank; broadcast: the same piece for each)
///   all_to_all             send, recv;   gather: send at the root's place, recv at the root;   scatter: the reverse
///   none                   send, recv: moves on a device, of what is this rank's alone; awaited, awaits
struct Operation {
  kernel::Collective collective = kernel::Collective::kNone;
  /// Of a barrier: what its ranks meet for. It has that one's fingerprint, so they are told where they call another
  /// one.
  kernel::Collective meets_for = kernel::Collective::kNone;
  DType dtype = DType::kBytes;
  ReduceOp op = ReduceOp::kSum;
  int root = -1;
  const std::byte* in = nullptr;
  std::byte* out = nullptr;
  size_t count = 0;    ///< elements; for the fingerprint too
  uint64_t shape = 0;  ///< hash of what else must be alike on all ranks
  double factor = 1;   ///< premul_sum
  Pieces send;
  Pieces recv;
  std::chrono::milliseconds timeout{0};  ///< 0: the group's
  uint64_t number = 0;                   ///< of the operation in its group; 0: given when it runs
  const Whole* whole = nullptr;          ///< of a chunk, or a step
  HostProxy* proxy = nullptr;            ///< of an operation over several hosts whose memory is a device's
  const Stamp* awaited = nullptr;        ///< a counter of the host's, which device and host reach; null: none
  Stamp awaits = 0;                      ///< how far it must have come before the moves

  /// In the form in which ranks compare it.
  kernel::Fingerprint fingerprint() const;
  /// What a plan between hosts is asked about, where the operation itself has this many bytes.
  size_t planned(size_t bytes) const { return whole ? whole->bytes : bytes; }
};

/// Where a launch tells the host that it has ended well, and what; null: nowhere.
struct Tells {
  Stamp* at = nullptr;
  Stamp what = 0;
};

/// When an operation of a device begins: now, or whenever a graph is replayed that its stream is being captured into.
enum class Begins { kNow, kInReplays };

/// "all_reduce(sum, f32, 1024 elements)"
std::string describe(const kernel::Fingerprint& fingerprint);

}  // namespace nvx
