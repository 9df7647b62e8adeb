// The constructor of a backend, sends and receives, and coalescing.

#include "torch/backend.h"

#include "base/log.h"
#include "torch/device/kernel_path.h"

namespace nvx {

ProcessGroupNVX::ProcessGroupNVX(int rank, int size) : Backend(rank, size), told_rank_(rank) { init(); }

ProcessGroupNVX::ProcessGroupNVX(c10::intrusive_ptr<c10d::Store> store, int rank, int size,
                                 c10::intrusive_ptr<Options> options)
    : ProcessGroupNVX(store, make_group(store, rank, size, options ? *options : Options()),
                      options ? *options : Options()) {}

ProcessGroupNVX::ProcessGroupNVX(c10::intrusive_ptr<c10d::Store> store, std::shared_ptr<Group> group,
                                 const Options& options)
    : Backend(group->rank(), group->size()),
      told_rank_(group->rank()),
      only_(std::make_shared<Communicator>(*this, listeners_, std::move(store), std::move(group), options)) {
  init();
}

/// Counts no reference, which would cost two atomic operations a call: this object outlives the call.
ProcessGroupNVX::Current ProcessGroupNVX::standing() const {
  check_process();
  return {Current(), only_.get()};
}

c10::intrusive_ptr<c10d::Backend::Options> ProcessGroupNVX::getBackendOptions() {
  return c10::make_intrusive<Options>(now()->context.groups.options());  // a copy, because torch changes its options
}

IntrusiveWork ProcessGroupNVX::send(Tensors& tensors, int peer, int tag) {
  return now()->messages.send("ProcessGroupNVX::send", tensors, peer, tag);
}

IntrusiveWork ProcessGroupNVX::recv(Tensors& tensors, int peer, int tag) {
  return now()->messages.receive("ProcessGroupNVX::recv", tensors, peer, tag);
}

IntrusiveWork ProcessGroupNVX::recvAnysource(Tensors& tensors, int tag) {
  return now()->messages.receive_any("ProcessGroupNVX::recvAnysource", tensors, tag);
}

void ProcessGroupNVX::startCoalescing() {
  const auto current = now();
  if (const std::optional<CoalescingScope> left = current->context.scopes.open()) {
    NVX_LOG(kWarn,
            "group %s: a coalescing scope is begun, and the one before it was never ended, as when an exception comes "
            "out of it: nobody waits for the %zu operations issued since as for one",
            current->group().name().c_str(), left->issued);
  }
}

IntrusiveWork ProcessGroupNVX::endCoalescing() {
  const auto current = now();
  std::optional<CoalescingScope> scope = current->context.scopes.close();
  if (!scope) return nullptr;
  current->issuer.kernels().catch_up_if_behind();
  if (scope->works.empty()) return nullptr;
  if (scope->works.size() == 1) return scope->works.front();
  Tensors outputs;
  for (const auto& work : scope->works) {
    if (work->type() == c10d::OpType::SEND) continue;
    const Tensors own = work->result();
    outputs.insert(outputs.end(), own.begin(), own.end());
  }
  auto all = c10::make_intrusive<CoalescedWork>(current->context.facts({c10d::OpType::COALESCED, nullptr}),
                                                std::move(scope->works), std::move(outputs));
  all->begin();
  return all;
}

}  // namespace nvx
