#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "group/plan/plan.h"
#include "kernel/gpu/job.h"

namespace nvx {

/// What a plan for GPUs may depend on: the same on every rank.
struct DevicePlanFacts {
  kernel::DeviceShape shape;
  PlanFacts::Force force = PlanFacts::Force::kNothing;  ///< kOneShot: in one trip wherever packets hold it
  size_t one_shot_bytes = 0;                            ///< the user's limit of one trip; 0: the table's
};

struct DeviceChoice {
  kernel::DeviceAlgorithm algorithm;
  const char* why;
};

/// Pure: the same question gets the same answer on every rank. bytes: of the whole for what is reduced or broadcast; of
/// the longest piece for what is reduced and scattered, or gathered by all. Of what is exchanged, gathered or scattered
/// a rank knows its own pieces alone, so bytes decide nothing.
DeviceChoice plan(kernel::Collective collective, size_t bytes, const DevicePlanFacts& facts);

/// Those that a collective may go by, the one for the shortest messages first.
std::vector<kernel::DeviceAlgorithm> algorithms_of(kernel::Collective collective);

/// The most bytes, counted as for plan(), that the packets of one operation hold: what kernel::can_do says too.
/// SIZE_MAX for what has chunks.
size_t most_bytes(kernel::DeviceAlgorithm algorithm, const kernel::DeviceShape& shape);

/// The measures of a channel whose pad takes about pad_bytes: half of it for packets, half for chunks. Pure.
kernel::DeviceShape device_shape(uint32_t ranks, uint32_t blocks, size_t pad_bytes);

/// What a pad may take of the arena of which so many bytes are free where most of it is taken.
size_t pad_budget(size_t free_bytes);

}  // namespace nvx
