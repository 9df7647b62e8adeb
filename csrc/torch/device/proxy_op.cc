#include "torch/device/proxy_op.h"

#include "base/contain.h"

namespace nvx {

/// One turn of the group's lane: a call, or one replay of it.
class ProxyOp::Turn final : public Task {
 public:
  Turn(std::shared_ptr<ProxyOp> call, std::shared_ptr<Group> group)
      : call_(std::move(call)), group_(std::move(group)) {}

  void perform(Runner runner) override {
    Status status;
    contain_and([&] { status = run_in_order(*group_, call_->collectives, runner); },
                [&](const std::exception* error) {
                  status = {Code::kSystem, "nvx: carrying an operation out failed: " + text_of(error)};
                });
    if (status.ok()) return;
    cancelled_ = group_->closed() && !group_->failed();  // this rank has left: a replay does nothing
    outcome_ = group_->fail_begun(status);               // the launched kernels wait for this
  }
  bool conclusion_may_block() override { return call_->expected_ && call_->expected_->on_failure; }
  void conclude() override {
    if (outcome_.ok() || cancelled_) return;
    end_process_if_unseen(outcome_);
    if (conclusion_may_block()) call_->expected_->on_failure(outcome_.code());
  }

 private:
  const std::shared_ptr<ProxyOp> call_;
  const std::shared_ptr<Group> group_;
  Status outcome_;
  bool cancelled_ = false;
};

bool ProxyOp::queue_early() {
  if (queued_) return true;
  const auto group = group_.lock();
  if (!group) return false;
  std::shared_ptr<Task> turn = std::make_shared<Turn>(shared_from_this(), group);
  return queued_ = group->lane().submit_to_others(turn);
}

void ProxyOp::queue_from_stream(std::shared_ptr<ProxyOp> call) {
  const std::shared_ptr<Group> group = call->group_.lock();
  if (!group) return;  // the group aborted the operations of graphs when it was destroyed
  std::shared_ptr<Task> turn = std::make_shared<Turn>(std::move(call), group);
  if (group->lane().submit_to_others(turn)) return;
  (void)group->fail({Code::kSystem, "this process can have no thread for the host's part of an operation of group " +
                                        group->name() + " on devices"});
}

void ProxyOp::queue_once() {
  if (std::exchange(queued_, true)) return;
  if (auto group = group_.lock()) {
    Lane& lane = group->lane();
    lane.submit(std::make_shared<Turn>(shared_from_this(), std::move(group)));
  }
}

}  // namespace nvx
