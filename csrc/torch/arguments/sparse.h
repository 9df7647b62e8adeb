#pragma once

#include "torch/arguments/arguments.h"
#include "torch/call/work.h"

namespace nvx {

/// Whether torch can sum entries of this type that share an index. That depends on torch's version, so this tries it
/// until it has worked once for the type.
bool can_coalesce(at::ScalarType type);

/// The all-reduce of sparse tensors. Several tensors are summed first, and each gets the result. Ranks may hold
/// different numbers of entries. So these numbers are gathered first, then the indices and values of all ranks, which
/// every rank sums in rank order.
class SparseWork final : public LaneWork {
 public:
  struct Call {
    std::chrono::milliseconds timeout;
    uint64_t number;
    Extensions::Claim claim;
  };

  SparseWork(std::shared_ptr<Group> group, Facts facts, const Arguments& arguments, std::vector<at::Tensor> tensors,
             Call call);

 private:
  Status carry_out(Group& group, Carrier carrier) override;
  void let_go() override;
  Status gather(Group& group, Carrier carrier, const at::Tensor& in, at::Tensor& out);
  Status gather_sizes(Group& group, Carrier carrier, const at::Tensor& mine, std::vector<int64_t>& entries);

  const Arguments arguments_;
  Call call_;
  Whole whole_;  // the ranks compare it in each step
  std::vector<at::Tensor> tensors_;
};

}  // namespace nvx
