#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "group/plan/plan.h"
#include "kernel/gpu/job.h"

namespace nvx {

/// The facts on which a plan for GPUs depends: the same on every rank.
struct DevicePlanFacts {
  kernel::DeviceShape shape;
  PlanFacts::Force force = PlanFacts::Force::kNothing;  ///< kOneShot: one trip wherever packets can hold the data
  Tuning tuning = {};
  bool has_multicast = false;  ///< the ranks have a multicast object, which NVX_NVLS requested
  GpuLink link = GpuLink::kNvlink;

  size_t tuned(Tune key) const { return size_t(tuning.of(key, shape.ranks, link)); }
};

struct DeviceChoice {
  kernel::DeviceAlgorithm algorithm;
  const char* why;
};

/// Pure, and the same on every rank. `bytes`: the whole message for reduce, all-reduce and broadcast; the longest piece
/// for reduce-scatter and all-gather; ignored for the others, where a rank has only its own pieces.
DeviceChoice plan(kernel::Collective collective, size_t bytes, const DevicePlanFacts& facts);

/// For an all_reduce. With NVX_NVLS the switch adds the sums that it can, unless one trip of packets serves them.
DeviceChoice plan_all_reduce(size_t bytes, DType dtype, ReduceOp op, const DevicePlanFacts& facts);

/// The algorithms for a collective, in the order of message length, the shortest first.
std::vector<kernel::DeviceAlgorithm> algorithms_of(kernel::Collective collective);

/// The most bytes, as for `plan()`, that an operation's packets hold (`kernel::can_do`). SIZE_MAX with chunks.
size_t most_bytes(kernel::DeviceAlgorithm algorithm, const kernel::DeviceShape& shape);

/// The shape for a pad of about `pad_bytes`: half packets, half chunks (more with 2 or 3 ranks), unless tuned. Pure.
kernel::DeviceShape device_shape(uint32_t ranks, uint32_t blocks, size_t pad_bytes, const Tuning& tuning = {});

/// The size of a pad, given the free bytes of the fullest arena.
size_t pad_budget(size_t free_bytes, const Tuning& tuning = {});

}  // namespace nvx
