#pragma once

#include <string>
#include <vector>

#include "kernel/cpu/host_collectives.h"
#include "kernel/cpu/pad.h"
#include "kernel/cpu/run_on_cpu.h"
#include "support/inputs.h"

namespace nvx::test {

/// One collective over all ranks, described so that every rank can build its side and the expected result.
struct Spec {
  kernel::Collective collective = kernel::Collective::kBarrier;
  DType dtype = DType::kF32;
  ReduceOp op = ReduceOp::kSum;
  int root = -1;               ///< reduce, broadcast, gather, scatter
  std::vector<size_t> counts;  ///< elements by rank; counts[0] if all ranks have the same tensor
  size_t shift = 0;            ///< distance of the tensors from alignment, in bytes
  bool in_place = false;       ///< input and output are the same memory, if possible
  uint64_t round = 0;          ///< inputs differ by round
  Nature nature = Nature::kNearOne;
};

std::string describe(const Spec& spec);

inline constexpr kernel::Collective kCollectives[] = {
    kernel::Collective::kAllReduce, kernel::Collective::kReduce,    kernel::Collective::kReduceScatter,
    kernel::Collective::kAllGather, kernel::Collective::kBroadcast, kernel::Collective::kAllToAll,
    kernel::Collective::kGather,    kernel::Collective::kScatter,   kernel::Collective::kBarrier};

inline bool is_rooted(kernel::Collective c) {
  using kernel::Collective;
  return c == Collective::kReduce || c == Collective::kBroadcast || c == Collective::kGather ||
         c == Collective::kScatter;
}

/// The memory through which an algorithm signals other ranks.
enum class Through { kFlags, kSlots, kLeases };

/// An algorithm inside a host, for one collective.
struct HostAlgorithm {
  kernel::Collective collective;
  kernel::Algorithm algorithm;
  Through through;
  bool waits_for_all = false;  ///< every rank waits for every other one, even if there is a root
};

/// Every algorithm with each of its collectives. A new algorithm is tested once it has a row here.
inline constexpr HostAlgorithm kHostAlgorithms[] = {
    {kernel::Collective::kAllReduce, kernel::Algorithm::kReduceOneShot, Through::kSlots},
    {kernel::Collective::kAllReduce, kernel::Algorithm::kReducePipelined, Through::kLeases},
    {kernel::Collective::kReduce, kernel::Algorithm::kReduceOneShot, Through::kSlots},
    {kernel::Collective::kReduce, kernel::Algorithm::kReducePipelined, Through::kLeases, /*waits_for_all=*/true},
    {kernel::Collective::kReduceScatter, kernel::Algorithm::kReduceScatterOneShot, Through::kSlots},
    {kernel::Collective::kReduceScatter, kernel::Algorithm::kReduceScatterPipelined, Through::kLeases},
    {kernel::Collective::kAllGather, kernel::Algorithm::kPublishOneShot, Through::kSlots},
    {kernel::Collective::kAllGather, kernel::Algorithm::kPublishPipelined, Through::kLeases},
    {kernel::Collective::kBroadcast, kernel::Algorithm::kPublishOneShot, Through::kSlots},
    {kernel::Collective::kBroadcast, kernel::Algorithm::kPublishPipelined, Through::kLeases},
    {kernel::Collective::kAllToAll, kernel::Algorithm::kExchange, Through::kSlots},
    {kernel::Collective::kAllToAll, kernel::Algorithm::kExchange, Through::kLeases},
    {kernel::Collective::kGather, kernel::Algorithm::kExchange, Through::kSlots},
    {kernel::Collective::kGather, kernel::Algorithm::kExchange, Through::kLeases},
    {kernel::Collective::kScatter, kernel::Algorithm::kExchange, Through::kSlots},
    {kernel::Collective::kScatter, kernel::Algorithm::kExchange, Through::kLeases},
    {kernel::Collective::kBarrier, kernel::Algorithm::kBarrier, Through::kFlags},
};

/// Whether the root is the rank that sends. If it is not, the root receives.
inline bool sends_from_root(kernel::Collective c) {
  return c == kernel::Collective::kBroadcast || c == kernel::Collective::kScatter;
}

/// Counts by rank around n: all equal if the collective requires that, otherwise some of them 0.
std::vector<size_t> counts_around(size_t n, int ranks, kernel::Collective collective);

/// One rank's memory in a spec.
class Side {
 public:
  Side(const Spec& spec, int rank, int ranks, const SlotRequest& in_room = nullptr,
       const SlotRequest& out_room = nullptr);

  kernel::CollectiveArgs args() const;
  kernel::Fingerprint fingerprint() const;
  double factor() const { return factors_[size_t(rank_)]; }
  size_t width() const { return size_of(spec_.dtype); }
  const std::vector<kernel::Piece>& send() const { return send_; }
  const std::vector<kernel::Piece>& recv() const { return recv_; }
  const std::byte* in() const { return in_data_; }
  std::byte* out() const { return out_data_; }
  size_t out_bytes() const { return out_.size(); }
  size_t count() const { return spec_.counts[0]; }

  /// The error in the output, or an empty text.
  std::string verdict();

 private:
  /// The elements from rank `from` to rank `to`, for collectives that move pieces.
  size_t piece(int from, int to) const;
  size_t elements_in(int rank) const;
  Bytes input_of(int rank) const { return input(spec_.dtype, elements_in(rank), rank, spec_.round, spec_.nature); }
  Bytes slice_of(int from, int to) const;
  Bytes want() const;
  bool receives() const;
  bool reduces() const;
  bool is_right(const Bytes& want);
  void lay_out_pieces();
  void place_in_place();

  Spec spec_;
  int rank_;
  int ranks_;
  std::vector<double> factors_;
  Tensor in_;
  Tensor out_;
  const std::byte* in_data_ = nullptr;
  std::byte* out_data_ = nullptr;
  std::vector<kernel::Piece> send_;
  std::vector<kernel::Piece> recv_;
};

}  // namespace nvx::test
