#include "torch/streams/chunk_pipeline.h"

#include <c10/core/DeviceGuard.h>

namespace nvx {
namespace {

/// A chunk's copies, between the device and a slot of host memory.
Loads loads_of(const std::vector<CopyPair>& copies, at::Device device, const at::Tensor& buffer) {
  const at::TensorOptions options = at::TensorOptions().dtype(at::kByte).device(device);
  Loads loads;
  for (const CopyPair& copy : copies) {
    const int64_t offset = copy.host.data - static_cast<std::byte*>(buffer.data_ptr());
    loads.emplace_back(tensor_over(copy.device.data, int64_t(copy.device.bytes), options),
                       buffer.narrow(0, offset, int64_t(copy.host.bytes)));
  }
  return loads;
}

}  // namespace

ChunkPipeline::ChunkPipeline(const Operation& operation, int rank, const PlanFacts& facts, const CommStreams& streams)
    : device_(streams.d2h.device()), rank_(rank), cut_(cut(operation, facts)) {
  const size_t slots = std::min(kSlots, cut_.chunks);
  const c10::OptionalDeviceGuard on(device_);  // torch's pool of pinned memory queries events: see PooledEvent
  memory_ = pinned_memory({int64_t(slots), int64_t(buffer_bytes(operation, cut_, rank))});
  for (size_t s = 0; s < slots; ++s) {
    slots_[s] = std::make_unique<Slot>(streams);
    copy_in_next(operation);
  }
}

void ChunkPipeline::copy_in_next(const Operation& operation) {
  const size_t k = copied_in_++, s = k % kSlots;
  Slot& slot = *slots_[s];
  const at::Tensor buffer = memory_[int64_t(s)];
  StagedChunk staged = stage_chunk(operation, cut_, k, rank_, static_cast<std::byte*>(buffer.data_ptr()));
  slot.d2h = loads_of(staged.d2h, device_, buffer), slot.h2d = loads_of(staged.h2d, device_, buffer);
  slot.part = std::move(staged.part);
  k < kSlots ? slot.staging.copy_in_first_chunk(slot.d2h) : slot.staging.copy_in_later_chunk(slot.d2h);
}

Status ChunkPipeline::run(Group& group, const Operation& operation, Runner runner) {
  whole_ = {operation.fingerprint(), Deadline::after(group.span_of(operation.timeout)), cut_.bytes};
  for (size_t k = 0; k < cut_.chunks; ++k) {
    while (copied_in_ < std::min(cut_.chunks, k + kSlots)) copy_in_next(operation);
    Slot& slot = *slots_[k % kSlots];
    slot.part.number = operation.number;
    slot.part.whole = &whole_;
    NVX_TRY(slot.staging.arrive(group, whole_.deadline));
    NVX_TRY(group.run(slot.part, runner));
    NVX_TRY(try_copy_out(slot.staging, slot.h2d));
  }
  return {};
}

}  // namespace nvx
