#include "torch/streams/chunk_pipeline.h"

#include <ATen/ops/from_blob.h>

#include "memory/driver/beside_captures.h"

namespace nvx {
namespace {

/// A chunk's copies, between the device and a slot of host memory.
class Loader {
 public:
  Loader(at::Device device, const at::Tensor& room) : device_(device), room_(room) {}

  Loads loads(const std::vector<CopyPair>& copies) const {
    Loads loads;
    for (const CopyPair& copy : copies) loads.emplace_back(there(copy.device), here(copy.host));
    return loads;
  }

 private:
  at::Tensor there(const kernel::Piece& piece) const {
    return at::for_blob(piece.data, {int64_t(piece.bytes)})
        .options(at::TensorOptions().dtype(at::kByte).device(device_))
        .target_device(device_)
        .make_tensor();
  }
  at::Tensor here(const kernel::Piece& piece) const {
    return room_.narrow(0, piece.data - static_cast<std::byte*>(room_.data_ptr()), int64_t(piece.bytes));
  }

  const at::Device device_;
  const at::Tensor room_;
};

}  // namespace

ChunkPipeline::ChunkPipeline(const Operation& operation, int rank, const PlanFacts& facts, const CommStreams& streams)
    : device_(streams.down.device()), rank_(rank), cut_(cut(operation, facts)) {
  const BesideCaptures beside;
  const size_t slots = std::min(kSlots, cut_.chunks);
  memory_ = at::empty({int64_t(slots), int64_t(room_for(operation, cut_, rank))},
                      at::TensorOptions().dtype(at::kByte).device(at::kCPU).pinned_memory(true));
  for (size_t s = 0; s < slots; ++s) {
    slots_[s] = std::make_unique<Slot>(streams);
    bring_next(operation);
  }
}

void ChunkPipeline::bring_next(const Operation& operation) {
  const size_t k = brought_++, s = k % kSlots;
  Slot& slot = *slots_[s];
  const at::Tensor room = memory_[int64_t(s)];
  StagedChunk staged = land(operation, cut_, k, rank_, static_cast<std::byte*>(room.data_ptr()));
  const Loader loader(device_, room);
  slot.down = loader.loads(staged.down), slot.up = loader.loads(staged.up);
  slot.part = std::move(staged.part);
  k < kSlots ? slot.staging.bring_along(slot.down) : slot.staging.bring_more(slot.down);
}

Status ChunkPipeline::run(Group& group, const Operation& operation, Carrier carrier) {
  whole_ = {operation.fingerprint(), Deadline::after(group.span_of(operation.timeout)), cut_.bytes};
  for (size_t k = 0; k < cut_.chunks; ++k) {
    while (brought_ < std::min(cut_.chunks, k + kSlots)) bring_next(operation);
    Slot& slot = *slots_[k % kSlots];
    slot.part.number = operation.number;
    slot.part.whole = &whole_;
    NVX_TRY(slot.staging.arrive(group, whole_.deadline));
    NVX_TRY(group.run(slot.part, carrier));
    NVX_TRY(take_back(slot.staging, slot.up));
  }
  return {};
}

}  // namespace nvx
