#include "torch/call/call.h"

#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "base/log.h"

namespace nvx {

CallContext::CallContext(c10d::Backend& backend, Listeners& listeners, c10::intrusive_ptr<c10d::Store> store,
                         std::shared_ptr<Group> group, const NvxOptions& options)
    : backend(backend),
      rank(group->rank()),
      size(group->size()),
      barrier_on_host(options.barrier_on_host),
      groups(std::move(store), std::move(group), options),
      listeners(listeners) {}

NvxWork::Facts CallContext::facts(const Kind& kind, const std::shared_ptr<Group>& group) {
  return {rank,       kind.type, kind.title, groups.of_cpu()->sequence(), listeners.timed, listeners.of_ends(muted),
          kind.lists, group};
}

CallContext::Timeout CallContext::timeout_of(std::chrono::milliseconds given) {
  // c10d::kUnsetTimeout is negative, too
  const auto own = is_no_timeout(given) ? Deadline::kForever : std::max(given, std::chrono::milliseconds(0));
  TimeoutExtensions::Share share = extensions->begin();
  if (share.extra.count() == 0) [[likely]]
    return {own, nullptr};
  const auto plain = own.count() != 0 ? own : group().timeout();
  if (plain.count() <= 0) return {own, std::move(share.until_it_ends)};  // no timeout: no extension
  return {std::min(plain, Deadline::kForever) + share.extra, std::move(share.until_it_ends)};
}

void CallContext::number(std::span<TensorOperation> collectives) {
  for (TensorOperation& c : collectives) c.operation.number = group().next_number();
}

void CallContext::count_call(const Kind& kind) {
  if (NvxWork::count_call(counts) || size == 1) [[likely]]
    return;
  static std::atomic<bool> warned{false};
  if (warned.exchange(true)) return;
  NVX_LOG(
      kWarn,
      "group %s: a callback of a future calls %s, and other collectives were called after the future's. The order of "
      "these calls may depend on when results arrive. Ranks that differ in it combine different tensors. Next: wait "
      "for the future before the next call (docs/torch.md, \"DDP hooks\")",
      group().name().c_str(), kind.title + 4);
}

bool CallContext::needs_work() const {
  return listeners.any() || listeners.timed || c10d::allow_inflight_collective_as_graph_input();
}

std::unique_ptr<StagingCopies> CallContext::on_device(const Call& call) {
  const at::Device device = call.device();
  CommStreams of_call = CommStreams::of_caller(device);
  of_call.capture = capture_of(of_call.h2d);
  if (call.mode == Mode::kAsync) of_call = streams.of_kernels(device, of_call.capture);
  return std::make_unique<StagingCopies>(of_call, /*timed=*/listeners.timed && of_call.capture == 0);
}

void CallContext::enqueue(const c10::intrusive_ptr<LaneWork>& work, Lane& lane) {
  work->count_in(counts);
  lane.submit(std::shared_ptr<Task>(work.get(), [work](Task*) {}));
  scopes.add(work);
}

IntrusiveWork CallContext::done(NvxWork::Facts facts, const Tensors& outputs, std::unique_ptr<StagingCopies> staging) {
  const auto stream = staging ? std::optional(staging->stream()) : std::nullopt;
  const auto work = c10::make_intrusive<DoneWork>(std::move(facts), outputs, stream, std::move(staging));
  work->begin();
  return work;
}

void CallContext::raise_if_failed(const Status& status) {
  if (status.ok()) return;
  listeners.report_failure(status.code(), *muted);
  raise(status);
}

}  // namespace nvx
