#pragma once

#include <cstddef>
#include <cstdint>

#include "kernel/gpu/launch_cuda.h"
#include "kernel/gpu/push_channel.h"

/// Sums by an NVSwitch (NVLS): an all_reduce whose data the switch adds and multicasts. The switch decides in which
/// order and with what accuracy it adds, so the bits are not those of the other algorithms; they are the same on all
/// ranks, because one rank reads each sum and stores it to all.
namespace nvx::kernel {

/// In a kernel of its own for each type. A launch of it may have a completion counter.
template <class T>
struct MulticastOperation {
  static constexpr bool kHot = true;
  static constexpr bool kCompletes = true;
  NVX_HD static constexpr bool has_chunks(const Job&) { return true; }
  NVX_HD static constexpr bool has_pieces(const Job&) { return false; }
  NVX_HD static constexpr bool reduces(const Job&) { return true; }
  NVX_HD static constexpr int32_t root(const Job&) { return -1; }
};

/// Moves packs, several at once in each lane.
template <class Exec, class Load, class Store>
NVX_HD void move_packs(const Exec& ex, uint32_t count, Load load, Store store) {
  constexpr uint32_t kAtOnce = 8;
  const auto lanes = uint32_t(ex.lanes());
  NVX_NO_UNROLL
  for (uint32_t first = uint32_t(ex.lane()); first < count; first += kAtOnce * lanes) {
    Pack packs[kAtOnce] = {};
    NVX_UNROLL
    for (uint32_t j = 0; j < kAtOnce; ++j) {
      if (first + j * lanes < count) packs[j] = load(first + j * lanes);
    }
    NVX_UNROLL
    for (uint32_t j = 0; j < kAtOnce; ++j) {
      if (first + j * lanes < count) store(first + j * lanes, packs[j]);
    }
  }
}
template <class Exec>
NVX_HD void move_bytes(const Exec& ex, const Copy& c) {
  const auto* const from = reinterpret_cast<const Pack*>(c.from);
  auto* const to = reinterpret_cast<Pack*>(c.to);
  move_packs(
      ex, c.packs, [&](uint32_t i) { return from[i]; }, [&](uint32_t i, const Pack& pack) { to[i] = pack; });
  copy_unaligned<void>(ex, c);
}

/// A block's share goes in pieces of one slot: stage this rank's input; add this rank's slice of all inputs, and store
/// the sums to all parts; copy the sums to the output. The three stages run one slot behind each other, in rounds that
/// wait for all peers' last round, as in reduce_chunks(). So peers have read a slot before a round writes it again.
///
/// Each part has two addresses, its own and that of all parts. So each lane fences (proxy alias) before flags
/// are published and after they were awaited.
template <class T, class Exec, class Channel>
NVX_HD bool reduce_multicast(Exec& ex, Channel& ch, const Job& job, const MulticastView& view) {
  const size_t slot = view.slot(ch.shape().blocks);
  const size_t first = size_t(ex.tile()) * 2 * MulticastView::kSlots * slot;
  const Piece in = ch.me().send, out = ch.me().recv;
  const auto bytes_of = [&](size_t k) { return in.bytes - k * slot < slot ? in.bytes - k * slot : slot; };
  const auto input_at = [&](size_t k) { return first + k % MulticastView::kSlots * slot; };
  const auto sums_at = [&](size_t k) { return input_at(k) + MulticastView::kSlots * slot; };
  if (!ch.meet(job)) return false;
  NVX_NO_UNROLL
  for (size_t k = 0; in.bytes != 0 && (k < 2 || (k - 2) * slot < in.bytes); ++k) {
    const bool stages = k * slot < in.bytes, sums = k >= 1 && (k - 1) * slot < in.bytes, stores = k >= 2;
    const auto plan = [&](uint32_t p, Peer& peer) {
      if (p != ch.rank()) peer.posts = uint32_t(stages) + sums, peer.takes = uint32_t(sums) + stores;
    };
    if (!ch.await(plan)) return false;
    ex.fence_parts();
    if (stages) move_bytes(ex, Copy::of(in.data + k * slot, view.mine + input_at(k), bytes_of(k)));
    if (sums) {
      const size_t packs = ceil_div(bytes_of(k - 1), sizeof(Pack));
      const Piece inputs = {view.all + input_at(k - 1), packs * sizeof(Pack)};
      const Piece from = Pieces::slice(inputs, ch.rank(), ch.by_ranks());
      std::byte* const to = from.data + (sums_at(k - 1) - input_at(k - 1));
      move_packs(
          ex, uint32_t(from.bytes / sizeof(Pack)),
          [&](uint32_t i) { return ex.template sum_of_parts<T>(from.data + i * sizeof(Pack)); },
          [&](uint32_t i, const Pack& pack) { ex.store_to_parts(to + i * sizeof(Pack), pack); });
    }
    if (stores) move_bytes(ex, Copy::of(view.mine + sums_at(k - 2), out.data + (k - 2) * slot, bytes_of(k - 2)));
    ex.fence_parts();
    if (!ch.publish(true)) return false;
  }
  return true;
}

/// Calls what(T()) with the type of a job that check_multicast() accepts.
template <class What>
void with_multicast_type(const Job& job, What what) {
  switch (job.fingerprint.dtype) {
    case DType::kF32: return what(float());
    case DType::kBF16: return what(BF16());
    default: return what(F16());
  }
}

/// The kernels, by type in this order, for load_cuda(). A build without CUDA has none.
inline constexpr int kMulticastKernels = 3;
const void* multicast_kernel(int i);

}  // namespace nvx::kernel
