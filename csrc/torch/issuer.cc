#include "torch/issuer.h"

#include <algorithm>
#include <utility>

#include "base/config.h"
#include "torch/core/interrupt.h"
#include "torch/core/recorded.h"
#include "torch/core/tool_range.h"
#include "torch/device/kernel_path.h"

namespace nvx {
namespace {

/// Whether a call is proxied: all of its operations, or none. If none, proxied ones go in chunks, which use the same
/// memory.
bool are_proxied(std::span<TensorOperation> collectives) {
  const auto is_proxied = [](const TensorOperation& c) { return c.route() == Route::kHostProxy; };
  if (std::ranges::all_of(collectives, is_proxied)) return true;
  for (TensorOperation& c : collectives) {
    if (is_proxied(c)) c.facts.proxies_serve = false, c.facts.is_large = true;
  }
  return false;
}

int64_t elements_of(const Tensors& tensors) {
  int64_t n = 0;
  for (const at::Tensor& tensor : tensors) n += tensor.numel();
  return n;
}

uint64_t bytes_of(const Tensors& tensors) {
  uint64_t n = 0;
  for (const at::Tensor& tensor : tensors) n += tensor.nbytes();
  return n;
}

/// Waits for the operations that were issued before, whose results a synchronous call may copy to its stand-ins.
void await_earlier(Group& group) {
  struct Turn final : Task {
    void perform(Runner /*runner*/) override {}
  };
  Lane& lane = group.lane();
  if (lane.begin_inline()) return lane.end_inline();
  if (lane.held_here()) return;  // the call will be refused
  const auto turn = std::make_shared<Turn>();
  lane.submit(turn);
  lane.wait(*turn, Lane::MayRun::kYes, [&group] { return group.check_interrupt(), false; });
}

/// Counts a version of the outputs that gloo copies to, so that autograd notices that a tensor which it has saved is
/// overwritten. gloo works in place in the others, but for averages, and programs rely on that.
void count_versions(c10d::OpType op, const Tensors& outputs) {
  using enum c10d::OpType;
  switch (op) {
    case ALLGATHER:
    case _ALLGATHER_BASE:
    case ALLGATHER_COALESCED:
    case REDUCE_SCATTER:
    case _REDUCE_SCATTER_BASE:
    case GATHER:
    case ALLTOALL:
    case ALLREDUCE_COALESCED: break;
    default: return;
  }
  for (const at::Tensor& output : outputs) {
    if (output.is_cpu() && !output.is_inference()) output.unsafeGetTensorImpl()->bump_version();
  }
}

}  // namespace

Issuer::Issuer(CallContext& context)
    : context_(context), kernels_(std::make_shared<KernelPath>(context.groups.of_cpu(), context.groups.store())) {
  attach_tool();
  if (config().delegate.empty() || context.size == 1) return;
  delegate_ = std::make_shared<Delegate>(context.groups.of_cpu(), context.groups.store(), [&context, this] {
    kernels_->flush_postponed();  // other ranks may wait for postponed operations, and this host for these ranks
    return context.groups.of_devices();
  });
}

Arguments Issuer::arguments(const char* name, Operations operations) {
  Delegate* const delegate = operations == Operations::kOne ? delegate_.get() : nullptr;
  return {name, context_.group(), kernels_.get(), delegate, proxies()};
}

IntrusiveWork Issuer::dispatch(const Kind& kind, std::span<TensorOperation> collectives, Tensors& outputs,
                               Tensors& inputs, const CallOptions& options) {
  const ToolRange range(kind.title + 4, [&] { return bytes_of(inputs.empty() ? outputs : inputs); });
  const CallContext::Timeout timeout = context_.timeout_of(options.timeout);
  for (TensorOperation& c : collectives) {
    if (c.device != device_of(collectives)) arguments(kind.title + 4).invalid("tensors must be on the same device");
    c.operation.timeout = timeout.value;
    c.claim = timeout.claim;
  }
  count_versions(kind.type, outputs);
  Call call{kind, collectives, outputs, inputs, options.mode};
  return C10_UNLIKELY(at::hasCallbacks()) ? issue_recorded(std::move(call)) : issue(std::move(call));
}

/// torch routes a barrier without a device to the CPU. But users of a device expect that the device has completed all
/// earlier work. In a group that is bound to a device, the barrier is for that device. See
/// CallContext::barriers_on_host() for gloo's.
IntrusiveWork Issuer::barrier(const c10d::BarrierOptions& opts, Mode mode) {
  TensorOperation c;
  c.operation.collective = kernel::Collective::kBarrier;
  if (!context_.barriers_on_host() || !opts.device_ids.empty())
    c.device = device_in_use(context_.backend.getBoundDeviceId()).value_or(at::kCPU);
  c.facts.on_device = !c.device.is_cpu();
  if (c.facts.on_device && !opts.device_ids.empty()) {
    const int64_t id = opts.device_ids.front();
    if (id < 0 || !std::in_range<c10::DeviceIndex>(id))
      arguments("barrier").invalid("device_ids must begin with the index of a device, and this is " +
                                   std::to_string(id));
    c.device.set_index(c10::DeviceIndex(id));
  }
  if (c.facts.on_device) proxies_.await_end(mode, opts.timeout);
  Tensors none;
  return dispatch({c10d::OpType::BARRIER, "nvx:barrier"}, {&c, 1}, none, none, {opts.timeout, mode});
}

IntrusiveWork Issuer::issue(Call&& call) {
  if (context_.scopes.is_open()) call.mode = Mode::kAsync;  // a coalescing scope waits for all of its calls together
  const Route route = route_of(call.collectives);
  if (route != Route::kKernels && route != Route::kDelegate) kernels_->flush_if_postponed();
  switch (route) {
    case Route::kMemory: context_.count_call(call.kind); return issue_in_memory(std::move(call));
    case Route::kStaged: return staged_.issue(std::move(call));
    case Route::kChunks:
    case Route::kHostProxy:
      return are_proxied(call.collectives) ? proxies_.issue(std::move(call)) : staged_.issue_in_chunks(std::move(call));
    case Route::kKernels: return kernels_->issue(context_, std::move(call), /*delegate=*/nullptr);
    case Route::kDelegate: break;
  }
  return kernels_->issue(context_, std::move(call), delegate_.get());
}

IntrusiveWork Issuer::issue_in_memory(Call&& call) {
  Group& group = context_.group();
  if (call.mode == Mode::kAsync) {
    context_.number(call.collectives);
    auto work = c10::make_intrusive<CollectiveWork>(context_.facts(call.kind), call.take_collectives(), call.outputs,
                                                    call.inputs);
    context_.enqueue(work, group.lane());
    return work;
  }
  const bool needs_work = context_.needs_work();
  const Clock::time_point began = needs_work ? Clock::now() : Clock::time_point();
  const auto copies = [](const TensorOperation& c) { return !c.copies_in.empty(); };
  if (std::ranges::any_of(call.collectives, copies)) [[unlikely]] {
    await_earlier(group);
    copy_in(call.collectives);
  }
  for (TensorOperation& c : call.collectives) context_.raise_if_failed(group.execute(c.operation));
  copy_back(call.collectives);
  raise_interrupt();  // a handler may have raised while the operation still succeeded
  if (!needs_work) return nullptr;
  NvxWork::Facts facts = context_.facts(call.kind);
  facts.began = began;
  return CallContext::done(std::move(facts), call.outputs, nullptr);
}

std::string Issuer::profiled_as(TensorOperation& c) {
  switch (c.route()) {
    case Route::kDelegate: return "nvx:delegated";
    case Route::kKernels: return std::string("nvx:by_kernels:") + context_.group().device().kernel_for(c.operation);
    case Route::kHostProxy: return "nvx:host_proxy";
    default: return "nvx:through_host_memory";
  }
}

/// Like issue(), with a profiler or an observer on.
IntrusiveWork Issuer::issue_recorded(Call&& call) {
  const Tensors &inputs = call.inputs, &outputs = call.outputs;
  const Kind& kind = call.kind;
  const auto [first, stride] = context_.groups.global_ranks();
  const at::Tensor* any = !inputs.empty() ? &inputs[0] : !outputs.empty() ? &outputs[0] : nullptr;
  NVX_RECORD_COMMS(
      call.mode == Mode::kAsync, std::make_tuple(static_cast<int64_t>(context_.group().sequence() + 1), false),
      std::make_tuple(context_.group().name(), context_.backend.getGroupDesc()), inputs, outputs, context_.rank,
      kind.title + 4, elements_of(inputs), elements_of(outputs), any ? any->scalar_type() : at::kByte,
      kind.in_splits.vec(), kind.out_splits.vec(), first, stride, context_.size);
  at::RecordFunction way(at::RecordScope::FUNCTION);
  if (way.isActive() && !call.device().is_cpu()) way.before(profiled_as(call.collectives.front()));
  const CallRecord record(kind.title, inputs);
  return issue(std::move(call));
}

void Issuer::connect(at::Device device) {
  const c10::OptionalDeviceGuard on(device);
  if (kernels_->agree_to_serve(device)) {
    (void)context_.streams.of_kernels(device, 0);
  } else {
    (void)context_.groups.of_devices();
    (void)context_.streams.of(device);
    if (!delegate_ && proxies_.agree_to_serve(device)) (void)context_.streams.of_proxies(device, 0);
  }
  if (delegate_) delegate_->connect(device);
}

}  // namespace nvx
