#pragma once

#include <algorithm>
#include <array>
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "kernel/cpu/pad.h"
#include "kernel/cpu/run_on_cpu.h"
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
  kernel::Piece* begin() { return data(); }
  kernel::Piece* end() { return data() + size_; }
  const kernel::Piece* begin() const { return data(); }
  const kernel::Piece* end() const { return data() + size_; }
  size_t size() const { return size_; }
  size_t longest() const {
    size_t bytes = 0;
    for (const kernel::Piece& p : *this) bytes = p.bytes > bytes ? p.bytes : bytes;
    return bytes;
  }
  size_t total() const {
    size_t bytes = 0;
    for (const kernel::Piece& p : *this) bytes += p.bytes;
    return bytes;
  }
  bool of_one_length() const {
    return std::ranges::all_of(*this, [this](const kernel::Piece& p) { return p.bytes == data()->bytes; });
  }
  /// All pieces as one, if each begins where the one before it ends.
  std::optional<kernel::Piece> whole() const {
    kernel::Piece all = *data();
    for (size_t p = 1; p < size_; ++p) {
      const kernel::Piece& piece = data()[p];
      if (piece.bytes != 0 && piece.data != all.data + all.bytes) return std::nullopt;
      all.bytes += piece.bytes;
    }
    return all;
  }

 private:
  size_t size_ = 0;
  std::array<kernel::Piece, 8> few_{};
  std::unique_ptr<kernel::Piece[]> many_;
};

/// A piece that is only read.
inline kernel::Piece piece_of(const std::byte* data, size_t bytes) { return {const_cast<std::byte*>(data), bytes}; }

inline bool apart(const kernel::Piece& a, const kernel::Piece& b) {
  return a.bytes == 0 || b.bytes == 0 || a.data + a.bytes <= b.data || b.data + b.bytes <= a.data;
}

/// The operation of which another one is a chunk (`group/plan/chunks.h`) or a step. It provides the fingerprint that
/// ranks compare and errors name, the deadline, and the size for the plan between hosts.
struct Whole {
  kernel::Fingerprint fingerprint;
  Deadline deadline;
  size_t bytes = 0;
};

class HostProxy;

/// One collective of one rank, in terms of memory. The collective uses these fields:
///   all_reduce, reduce     in, out, count (elements)
///   reduce_scatter         send (a piece for each rank), out
///   all_gather, broadcast  in, recv (all_gather: a piece of each rank; broadcast: the same piece for each)
///   all_to_all             send, recv;   gather: send at the root's place, recv at the root;   scatter: the reverse
///   none                   send, recv: copies on a device that concern this rank alone; awaited, awaits
struct Operation {
  kernel::Collective collective = kernel::Collective::kNone;
  /// For a barrier before another collective: that one, whose fingerprint it has, so ranks that differ find out here.
  kernel::Collective precedes = kernel::Collective::kNone;
  DType dtype = DType::kBytes;
  ReduceOp op = ReduceOp::kSum;
  int root = -1;
  const std::byte* in = nullptr;
  std::byte* out = nullptr;
  size_t count = 0;    ///< elements; part of the fingerprint
  uint64_t shape = 0;  ///< hash of everything else that must be equal on all ranks
  double factor = 1;   ///< premul_sum
  Pieces send;
  Pieces recv;
  std::chrono::milliseconds timeout{0};  ///< 0: the group's
  uint64_t number = 0;                   ///< of the operation in its group; 0: the group numbers it when it runs
  const Whole* whole = nullptr;          ///< for a chunk or a step
  HostProxy* proxy = nullptr;            ///< for an operation over several hosts on memory of a device
  const Stamp* awaited = nullptr;        ///< a counter that device and host can access; null: none
  Stamp awaits = 0;                      ///< the value that it must reach before the copies begin

  /// Its memory, for an algorithm of `kernel`, which runs it as this call. The pieces must outlive the result.
  kernel::CollectiveArgs args_of(const kernel::Call& call) const {
    return {.call = call, .in = in, .out = out, .count = count, .send = send.data(), .recv = recv.data()};
  }
  /// The form in which ranks compare calls.
  kernel::Fingerprint fingerprint() const;
  /// The size for the plan between hosts, for an operation that itself has this many bytes.
  size_t planned(size_t bytes) const { return whole ? whole->bytes : bytes; }
};

/// If pieces that the operation sends overlap pieces that it receives, makes it send a copy.
void send_copy_if_overlapping(Operation& operation, std::vector<std::byte>& copy);

/// A launch writes `what` to `at`, in host memory, when it has ended well; null: nowhere.
struct CompletionFlag {
  Stamp* at = nullptr;
  Stamp what = 0;
};

/// When an operation on a device begins: now, or at each replay of the graph that its stream is being captured into.
enum class Begins { kNow, kInReplays };

/// "all_reduce(sum, f32, 1024 elements)"
std::string describe(const kernel::Fingerprint& fingerprint);

}  // namespace nvx
