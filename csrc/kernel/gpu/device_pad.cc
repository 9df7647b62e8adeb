#include "kernel/gpu/device_pad.h"

#include <cstring>

namespace nvx::kernel {

void format_pad(const DeviceShape& shape, uint32_t first_epoch, Stamp first_chunk, std::byte* pad) {
  const DevicePad layout{shape};
  std::memset(pad, 0, layout.offset(Part::kStaging));
  // A buffer must not begin with a stamp that a rank ever waits for. The first buffer serves even epochs, whose stamps
  // are even, and begins with odd stamps (all bits set). The second serves odd epochs and begins with 0.
  std::memset(pad, 0xff, layout.offset(Part::kGreetingsOdd));
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
      pipe.heard = first_epoch;
      std::memcpy(state + layout.pipe(block, peer), &pipe, sizeof pipe);
    }
  }
}

}  // namespace nvx::kernel
