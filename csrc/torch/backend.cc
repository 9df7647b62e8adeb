// The constructor of a backend, sends and receives, and coalescing.

#include "torch/backend.h"

#include "base/log.h"
#include "torch/device/kernel_path.h"
#include "torch/registry.h"

namespace nvx {

ProcessGroupNVX::ProcessGroupNVX(c10::intrusive_ptr<c10d::Store> store, int rank, int size,
                                 c10::intrusive_ptr<Options> options)
    : ProcessGroupNVX(store, make_group(store, rank, size, options ? *options : Options()),
                      options ? *options : Options()) {}

ProcessGroupNVX::ProcessGroupNVX(c10::intrusive_ptr<c10d::Store> store, std::shared_ptr<Group> group,
                                 const Options& options)
    : Backend(group->rank(), group->size()), context_(*this, std::move(store), std::move(group), options) {
  init();
  Registry::here().add(*this);
}

/// If peers may write to this rank's memory, one of the group's threads waits for those writes. It would keep the group
/// alive.
ProcessGroupNVX::~ProcessGroupNVX() {
  Registry::here().remove(*this);
  if (has_memory_for_peers_) group().leave();
}

c10::intrusive_ptr<c10d::Backend::Options> ProcessGroupNVX::getBackendOptions() {
  (void)checked_group();
  return c10::make_intrusive<Options>(context_.groups.options());  // a copy, because torch changes its options
}

IntrusiveWork ProcessGroupNVX::send(Tensors& tensors, int peer, int tag) {
  return messages_.send("ProcessGroupNVX::send", tensors, peer, tag);
}

IntrusiveWork ProcessGroupNVX::recv(Tensors& tensors, int peer, int tag) {
  return messages_.receive("ProcessGroupNVX::recv", tensors, peer, tag);
}

IntrusiveWork ProcessGroupNVX::recvAnysource(Tensors& tensors, int tag) {
  return messages_.receive_any("ProcessGroupNVX::recvAnysource", tensors, tag);
}

void ProcessGroupNVX::startCoalescing() {
  (void)checked_group();
  if (const std::optional<CoalescingScope> left = context_.scopes.open()) {
    NVX_LOG(kWarn,
            "group %s: a coalescing scope is begun, and the one before it was never ended, as when an exception comes "
            "out of it: nobody waits for the %zu operations issued since as for one",
            group().name().c_str(), left->issued);
  }
}

IntrusiveWork ProcessGroupNVX::endCoalescing() {
  (void)checked_group();
  std::optional<CoalescingScope> scope = context_.scopes.close();
  if (!scope) return nullptr;
  context_.kernels->catch_up_if_behind();
  if (scope->works.empty()) return nullptr;
  if (scope->works.size() == 1) return scope->works.front();
  Tensors outputs;
  for (const auto& work : scope->works) {
    if (work->type() == c10d::OpType::SEND) continue;
    const Tensors own = work->result();
    outputs.insert(outputs.end(), own.begin(), own.end());
  }
  auto all = c10::make_intrusive<CoalescedWork>(context_.facts({c10d::OpType::COALESCED, nullptr}),
                                                std::move(scope->works), std::move(outputs));
  all->begin();
  return all;
}

}  // namespace nvx
