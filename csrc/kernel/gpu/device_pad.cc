#include "kernel/gpu/device_pad.h"

#include <atomic>
#include <cstring>

namespace nvx::kernel {

void format_pad(const DeviceShape& shape, uint32_t first_epoch, Stamp first_chunk, std::byte* pad) {
  const DevicePad layout{shape};
  std::memset(pad, 0, layout.offset(Part::kStaging));
  // A buffer must not begin with a stamp that a rank ever waits for. The first buffer serves even epochs, whose stamps
  // are even, and begins with odd stamps (all bits set). The second serves odd epochs and begins with 0.
  std::memset(pad, 0xff, layout.offset(Part::kArrivalsOdd));
  for (uint32_t block = 0; block < shape.blocks; ++block) {
    for (uint32_t sender = 0; sender < shape.ranks; ++sender) {
      const Stamp posted_credit_done[] = {first_chunk, first_chunk, stamp(first_epoch, 0)};
      static_assert(offsetof(PeerCounters, done) == 2 * sizeof(Stamp) && sizeof(Stamp) == 8);
      // Not the whole struct: its padding would copy uninitialised stack memory.
      std::memcpy(pad + layout.offset(Part::kCounters, block, sender), posted_credit_done, sizeof posted_credit_done);
    }
  }
}

void format_state(const DeviceShape& shape, uint32_t first_epoch, Stamp first_chunk, const PeerPads* pads,
                  std::byte* state) {
  const DeviceState layout{shape};
  std::memset(state, 0, layout.bytes());
  std::memcpy(state + DeviceState::pads(), pads, shape.ranks * sizeof(PeerPads));
  for (uint32_t block = 0; block < shape.blocks; ++block) {
    const BlockState first{first_epoch, 0, 0, {}};
    std::memcpy(state + layout.blocks() + block * sizeof first, &first, sizeof first);
    for (uint32_t peer = 0; peer < shape.ranks; ++peer) {
      PipeState pipe{};
      pipe.sent = pipe.taken = first_chunk;
      pipe.last_met = first_epoch;
      std::memcpy(state + layout.pipe(block, peer), &pipe, sizeof pipe);
    }
  }
}

DeviceChannel DeviceChannel::prepared() const {
  DeviceChannel ready = *this;
  ready.by_ranks = shape.ranks, ready.by_blocks = shape.blocks;
  const DevicePad pad{shape};
  for (uint32_t part = 0; part < uint32_t(Part::kEnd); ++part) {
    ready.parts[part] = pad.offset(Part(part));
    ready.cells[part] = uint32_t(pad.cell(Part(part)));
  }
  return ready;
}

BlockEnd least_ended(const Control& control, uint32_t blocks) {
  const auto end_of = [&](uint32_t block) {
    auto& word = const_cast<uint64_t&>(control.ended[block]);
    return BlockEnd::of(std::atomic_ref(word).load(std::memory_order_acquire));
  };
  BlockEnd least = end_of(0);
  for (uint32_t block = 1; block < blocks; ++block) {
    const BlockEnd end = end_of(block);
    if (int32_t(end.epoch - least.epoch) < 0) least = end;
  }
  return least;
}

}  // namespace nvx::kernel
