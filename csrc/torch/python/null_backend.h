#pragma once

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include "torch/core/tensors.h"

namespace nvx {

/// A backend that moves no data: the lower bound of every latency measured through torch.
class NullBackend final : public c10d::Backend {
 public:
  NullBackend(int rank, int size) : Backend(rank, size) {}
  const std::string getBackendName() const override { return "nvx_null"; }

  IntrusiveWork broadcast(Tensors&, const c10d::BroadcastOptions&) override { return nullptr; }
  IntrusiveWork allreduce(Tensors&, const c10d::AllreduceOptions&) override { return nullptr; }
  IntrusiveWork reduce(Tensors&, const c10d::ReduceOptions&) override { return nullptr; }
  IntrusiveWork allgather(std::vector<Tensors>&, Tensors&, const c10d::AllgatherOptions&) override { return nullptr; }
  IntrusiveWork _allgather_base(at::Tensor&, at::Tensor&, const c10d::AllgatherOptions&) override { return nullptr; }
  IntrusiveWork gather(std::vector<Tensors>&, Tensors&, const c10d::GatherOptions&) override { return nullptr; }
  IntrusiveWork scatter(Tensors&, std::vector<Tensors>&, const c10d::ScatterOptions&) override { return nullptr; }
  IntrusiveWork _reduce_scatter_base(at::Tensor&, at::Tensor&, const c10d::ReduceScatterOptions&) override {
    return nullptr;
  }
  IntrusiveWork alltoall_base(at::Tensor&, at::Tensor&, std::vector<int64_t>&, std::vector<int64_t>&,
                              const c10d::AllToAllOptions&) override {
    return nullptr;
  }
  IntrusiveWork barrier(const c10d::BarrierOptions&) override { return nullptr; }
};

}  // namespace nvx
