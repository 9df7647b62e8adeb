#include "torch/convoy.h"

#include <ATen/ops/from_blob.h>

#include "memory/beside_captures.h"
#include "torch/work.h"

namespace nvx {
namespace {

using kernel::Piece;

constexpr size_t kAlign = 64;

enum class Haul { kDown, kUp, kBoth };

/// Finds room for a chunk's pieces in a slot, and notes what is copied between them and the device.
class Loader {
 public:
  Loader(at::Device device, const at::Tensor& room, Loads& down, Loads& up)
      : device_(device), room_(room), down_(down), up_(up) {}

  Piece place(Piece there, Haul haul) {
    if (there.bytes == 0) return {nullptr, 0};
    const at::Tensor host = room_.narrow(0, int64_t(used_), int64_t(there.bytes));
    const at::Tensor device = at::for_blob(there.data, {int64_t(there.bytes)})
                                  .options(at::TensorOptions().dtype(at::kByte).device(device_))
                                  .target_device(device_)
                                  .make_tensor();
    if (haul != Haul::kUp) down_.emplace_back(device, host);
    if (haul != Haul::kDown) up_.emplace_back(device, host);
    used_ += kernel::ceil_div(there.bytes, kAlign) * kAlign;
    return {static_cast<std::byte*>(host.data_ptr()), there.bytes};
  }

 private:
  const at::Device device_;
  const at::Tensor room_;
  Loads &down_, &up_;
  size_t used_ = 0;
};

/// Chunk k, placed.
Operation chunk_of(const Operation& o, const Cut& cut, size_t k, int rank, Loader& loader) {
  const bool is_root = o.root == rank;
  const size_t width = size_of(o.dtype);
  Operation part;
  part.collective = o.collective, part.dtype = o.dtype, part.op = o.op, part.root = o.root, part.factor = o.factor;
  part.send = Pieces(o.send.size()), part.recv = Pieces(o.recv.size());
  const auto whole = [&](const std::byte* data, size_t bytes) {
    return cut.of({const_cast<std::byte*>(data), bytes}, k);
  };
  switch (o.collective) {
    case kernel::Collective::kAllReduce:
    case kernel::Collective::kReduce: {
      const bool gets = o.collective == kernel::Collective::kAllReduce || is_root;
      const Piece here = loader.place(whole(o.in, o.count * width), gets ? Haul::kBoth : Haul::kDown);
      part.in = part.out = here.data;
      part.count = here.bytes / width;
      break;
    }
    case kernel::Collective::kBroadcast: {
      const Piece here = loader.place(whole(o.in, o.recv[0].bytes), is_root ? Haul::kDown : Haul::kUp);
      part.in = part.out = here.data;
      for (size_t p = 0; p < o.recv.size(); ++p) part.recv[p] = here;
      break;
    }
    case kernel::Collective::kAllGather:
      part.in = loader.place(whole(o.in, o.recv[size_t(rank)].bytes), Haul::kDown).data;
      for (size_t p = 0; p < o.recv.size(); ++p) part.recv[p] = loader.place(cut.of(o.recv[p], k), Haul::kUp);
      break;
    default:
      part.out = loader.place(whole(o.out, o.send[size_t(rank)].bytes), Haul::kUp).data;
      for (size_t p = 0; p < o.send.size(); ++p) part.send[p] = loader.place(cut.of(o.send[p], k), Haul::kDown);
  }
  return part;
}

/// What the pieces of one chunk take at most.
size_t room_for(const Operation& o, const Cut& cut) {
  const size_t own = o.send.size() || o.collective == kernel::Collective::kAllGather ? 1 : 0;
  const size_t listed = o.collective == kernel::Collective::kBroadcast ? 0 : std::max(o.send.size(), o.recv.size());
  return std::max<size_t>(own + listed, 1) * kernel::ceil_div(cut.slice, kAlign) * kAlign;
}

}  // namespace

Convoy::Convoy(const Operation& operation, int rank, const PlanFacts& facts, const Tracks& tracks)
    : device_(tracks.down.device()), rank_(rank), cut_(cut(operation, facts)) {
  const BesideCaptures beside;
  const size_t slots = std::min(kSlots, cut_.chunks);
  memory_ = at::empty({int64_t(slots), int64_t(room_for(operation, cut_))},
                      at::TensorOptions().dtype(at::kByte).device(at::kCPU).pinned_memory(true));
  for (size_t s = 0; s < slots; ++s) {
    slots_[s] = std::make_unique<Slot>(tracks);
    bring_next(operation);
  }
}

void Convoy::bring_next(const Operation& operation) {
  const size_t k = brought_++, s = k % kSlots;
  Slot& slot = *slots_[s];
  slot.down.clear(), slot.up.clear();
  Loader loader(device_, memory_[int64_t(s)], slot.down, slot.up);
  slot.part = chunk_of(operation, cut_, k, rank_, loader);
  k < kSlots ? slot.transit.bring_along(slot.down) : slot.transit.bring_more(slot.down);
}

Status Convoy::run(Group& group, const Operation& operation, Carrier carrier) {
  whole_ = {operation.fingerprint(), Deadline::after(group.span_of(operation.timeout)), cut_.bytes};
  for (size_t k = 0; k < cut_.chunks; ++k) {
    while (brought_ < std::min(cut_.chunks, k + kSlots)) bring_next(operation);
    Slot& slot = *slots_[k % kSlots];
    slot.part.number = operation.number;
    slot.part.whole = &whole_;
    NVX_TRY(slot.transit.arrive(group, whole_.deadline));
    NVX_TRY(group.run(slot.part, carrier));
    NVX_TRY(take_back(slot.transit, slot.up));
  }
  return {};
}

}  // namespace nvx
