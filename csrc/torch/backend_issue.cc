// How collectives are begun: by which route, on which thread and stream, and what the caller gets for it.

#include <c10/util/ScopeExit.h>

#include <algorithm>

#include "base/contain.h"
#include "base/hash.h"
#include "base/log.h"
#include "torch/backend.h"
#include "torch/interrupt.h"
#include "torch/recorded.h"

namespace nvx {
namespace {

void trace_staged(const Group& group, const TensorOperation& c) {
  NVX_LOG(kTrace, "group %s rank %d #%llu %s on %s: through host memory", group.name().c_str(), group.rank(),
          static_cast<unsigned long long>(c.operation.number), name(c.operation.collective), c.device.str().c_str());
}

}  // namespace

NvxWork::Facts ProcessGroupNVX::facts(const Kind& kind, const std::shared_ptr<Group>& group) {
  std::function<void(NvxWork&)> on_end;
  if (somebody_listens()) {
    on_end = [self = c10::intrusive_ptr<ProcessGroupNVX>::reclaim_copy(this)](NvxWork& work) { self->tell(work); };
  }
  return {rank_, kind.type, kind.title, group_->sequence(), timed_, std::move(on_end), kind.lists, group};
}

void ProcessGroupNVX::enqueue(const c10::intrusive_ptr<LaneWork>& work, Lane& lane) {
  work->count_in(pending_);
  lane.submit(std::shared_ptr<Task>(work.get(), [work](Task*) {}));
  into_coalescing_scope(work);
}

Status ProcessGroupNVX::execute(TensorOperations& collectives) {
  for (TensorOperation& c : collectives) NVX_TRY(group_->execute(c.operation));
  copy_back(collectives);
  return {};
}

/// On the caller's own stream: what that stream is given later comes behind anyway, and need not wait for another one.
Status ProcessGroupNVX::execute_staged(TensorOperations& collectives, StagingCopies& staging) {
  Group& group = *group_of(collectives);
  staging.bring(loads_of(collectives, &TensorOperation::bring));
  Status arrived;
  contain_and(
      [&] { arrived = staging.arrive(group, Deadline::after(group.span_of(collectives.front().operation.timeout))); },
      [&](const std::exception* error) {
        arrived =
            fail_silent(group, staging.stream().device(), nvx::name(collectives.front().operation.collective), error);
      });
  NVX_TRY(arrived);
  for (TensorOperation& c : collectives) {
    c.operation.number = group_->next_number();
    trace_staged(group, c);
    NVX_TRY(group.execute(c.operation));
  }
  staging.take_back(loads_of(collectives, &TensorOperation::take_back));
  return {};
}

/// What is not proxied goes in chunks, whose number may be one: they use the same memory.
bool ProcessGroupNVX::are_proxied(TensorOperations& collectives) {
  const auto is_proxied = [](const TensorOperation& c) { return c.route() == Route::kHostProxy; };
  if (std::all_of(collectives.begin(), collectives.end(), is_proxied)) return true;
  for (TensorOperation& c : collectives) {
    if (is_proxied(c)) c.facts.proxies_serve = false, c.facts.is_large = true;
  }
  return false;
}

c10::intrusive_ptr<c10d::Work> ProcessGroupNVX::issue(const Kind& kind, TensorOperations&& collectives,
                                                      const Tensors& outputs, const Tensors& inputs, Mode mode) {
  if (collects()) mode = Mode::kAsync;  // in a coalescing scope nobody waits for a single call
  switch (route_of(collectives)) {
    case Route::kMemory: return issue_in_memory(kind, std::move(collectives), outputs, inputs, mode);
    case Route::kStaged: return issue_staged(kind, std::move(collectives), outputs, inputs, mode);
    case Route::kChunks:
    case Route::kHostProxy: return issue_in_parts(kind, std::move(collectives), outputs, inputs, mode);
    case Route::kKernels: return issue_by_kernels(kind, std::move(collectives), outputs, inputs, mode);
    case Route::kDelegate: break;
  }
  return issue_delegated(kind, std::move(collectives), outputs, inputs, mode);
}

c10::intrusive_ptr<c10d::Work> ProcessGroupNVX::issue_in_memory(const Kind& kind, TensorOperations&& collectives,
                                                                const Tensors& outputs, const Tensors& inputs,
                                                                Mode mode) {
  kernels_->catch_up_if_behind();
  if (mode == Mode::kAsync) {
    number(collectives);
    auto work = c10::make_intrusive<CollectiveWork>(group_, facts(kind), std::move(collectives), outputs, inputs);
    enqueue(work, group_->lane());
    return work;
  }
  const bool heard = needs_work();
  const Clock::time_point began = heard ? Clock::now() : Clock::time_point();
  raise_if_ended_badly(execute(collectives));
  if (!heard) return nullptr;
  NvxWork::Facts known = facts(kind);
  known.began = began;
  return done(std::move(known), outputs, nullptr);
}

/// A synchronous one uses the caller's own stream, unless it must come behind results that are on their way.
c10::intrusive_ptr<c10d::Work> ProcessGroupNVX::issue_staged(const Kind& kind, TensorOperations&& collectives,
                                                             const Tensors& outputs, const Tensors& inputs, Mode mode) {
  kernels_->catch_up_if_behind();
  if (mode == Mode::kAsync) return enqueue_staged(kind, std::move(collectives), outputs, inputs);
  if (comes_behind(outputs, inputs)) return enqueue_and_wait(kind, std::move(collectives), outputs, inputs);
  const bool heard = needs_work();
  const Clock::time_point began = heard ? Clock::now() : Clock::time_point();
  auto staging = std::make_unique<StagingCopies>(CommStreams::of_caller(device_of(collectives)));
  raise_if_ended_badly(execute_staged(collectives, *staging));
  if (!heard) return nullptr;
  NvxWork::Facts known = facts(kind, group_of(collectives));
  known.began = began;
  return done(std::move(known), outputs, std::move(staging));
}

/// On the group's own streams whether synchronous or not, as several of them are in use at once.
c10::intrusive_ptr<c10d::Work> ProcessGroupNVX::issue_in_parts(const Kind& kind, TensorOperations&& collectives,
                                                               const Tensors& outputs, const Tensors& inputs,
                                                               Mode mode) {
  kernels_->catch_up_if_behind();
  if (are_proxied(collectives)) return issue_proxied(kind, std::move(collectives), outputs, inputs, mode);
  if (mode == Mode::kAsync) return enqueue_staged(kind, std::move(collectives), outputs, inputs);
  return enqueue_and_wait(kind, std::move(collectives), outputs, inputs);
}

/// The caller waits for nothing but for a stream to bring what the operation is to use. A failure that comes later is
/// raised by what is called later.
c10::intrusive_ptr<c10d::Work> ProcessGroupNVX::issue_proxied(const Kind& kind, TensorOperations&& collectives,
                                                              const Tensors& outputs, const Tensors& inputs,
                                                              Mode mode) {
  const std::shared_ptr<Group>& group = group_of(collectives);
  const at::Device device = device_of(collectives);
  const Tensors used = all_tensors(collectives, outputs, inputs);
  const uint64_t capture = capture_of(current_stream(device));
  auto staging = std::make_unique<StagingCopies>(comm_streams_.of_proxies(device, capture), timed_ && capture == 0);
  if (capture == 0) {
    follow_hazards(inputs, staging->stream());
    follow_hazards(outputs, staging->stream());
  }
  Status status;
  uint64_t ended_at = 0;
  if (proxies_holder_ == std::this_thread::get_id()) raise(group->inside_itself());
  {
    MutexLock lock(proxies_mutex_);
    proxies_holder_ = std::this_thread::get_id();
    const auto let_go = c10::make_scope_exit([&] { proxies_holder_ = std::thread::id(); });
    const std::shared_ptr<ProxyOp> call = prepare_proxies(std::move(collectives), group, *staging);
    contain_and(
        [&] {
          status = launch_proxies(call, *group, *staging);
          staging->close(used);
          if (capture == 0) hazards_.expect(used, device.type())->set_out(staging->stream());
          if (status.ok()) call->queue_once();
        },
        [&](const std::exception* error) {  // part of it may have been begun
          contain("the end of a call", [&] { staging->close(used); });
          status = fail_silent(*group, device, kind.title + 4, error);
        });
    if (!status.ok()) group->note_heard();
    if (capture == 0) ended_at = group->device().launched();
  }
  if (!status.ok()) {
    tell_failure(status.code());
    raise(status);
  }
  auto work = c10::make_intrusive<LaunchedWork>(kernels_, group, facts(kind, group), outputs, recorded(inputs, mode),
                                                std::move(staging));
  work->begin(ended_at);
  into_coalescing_scope(work);
  if (mode == Mode::kSync) work->wait(std::chrono::milliseconds(0));
  return work;
}

/// What throws here has no effect on the other ranks: an operation without a number they do not wait for.
std::shared_ptr<ProxyOp> ProcessGroupNVX::prepare_proxies(TensorOperations&& collectives,
                                                          const std::shared_ptr<Group>& group, StagingCopies& staging) {
  auto call = std::make_shared<ProxyOp>(group, std::move(collectives));
  if (staging.capture() == 0) {
    std::function<void(Code)> told;
    if (somebody_listens()) {
      told = [self = c10::intrusive_ptr<ProcessGroupNVX>::reclaim_copy(this)](Code code) { self->tell_failure(code); };
    }
    call->expect(pending_, std::move(told));
  }
  for (TensorOperation& c : call->collectives) {
    c.operation.shape = Hash().add(c.operation.shape).add("proxied").value();  // all ranks proxy it, or hear of it
    c.operation.timeout = group->span_of(c.operation.timeout);
    c.proxy = proxies_.make(*group, c.operation.collective, staging, [&call = *call] { return call.queue_early(); });
    c.operation.proxy = c.proxy.get();
    if (const Status status = group->make_room(c.operation); !status.ok()) {
      group->note_heard();
      raise(status);
    }
  }
  staging.bring(loads_of(call->collectives, &TensorOperation::bring));
  number(call->collectives);
  return call;
}

Status ProcessGroupNVX::launch_proxies(const std::shared_ptr<ProxyOp>& call, Group& group, StagingCopies& staging) {
  const bool captured = staging.capture() != 0;
  const auto forget = c10::make_scope_exit([&] {  // graphs keep the call, and their tensors by themselves
    for (TensorOperation& c : call->collectives) {
      if (captured) c.bring.clear(), c.take_back.clear(), c.stand_ins.clear(), c.claim.reset();
    }
  });
  staging.start_clock();
  if (captured || proxies_.has_graphs()) {
    const Status left = leave_to_stream(call, staging);
    if (!left.ok()) return captured ? left : group.fail_begun(left);
  }
  for (TensorOperation& c : call->collectives)
    NVX_TRY(group.launch(c.operation, captured ? Begins::kInReplays : Begins::kNow));
  staging.take_back(loads_of(call->collectives, &TensorOperation::take_back));
  return {};
}

/// The host's part is queued when the device comes to the call, and so in the device's order, which replays have a
/// place in. What a graph may ask for once more is kept for ever: nobody says when the graph is gone.
Status ProcessGroupNVX::leave_to_stream(const std::shared_ptr<ProxyOp>& call, const StagingCopies& staging) {
  using Kept = std::shared_ptr<ProxyOp>;
  call->leave_to_stream();
  const auto once = [](void* kept) {
    const std::unique_ptr<Kept> call(static_cast<Kept*>(kept));
    contain("the host's part of an operation", [&] { ProxyOp::queue_from_stream(std::move(*call)); });
  };
  const auto again = [](void* kept) {
    const Kept& call = *static_cast<Kept*>(kept);
    for (TensorOperation& c : call->collectives) HostProxyPath::begin_anew(*c.proxy);
    contain("the host's part of a replay", [&] { ProxyOp::queue_from_stream(call); });
  };
  auto kept = std::make_unique<Kept>(call);
  NVX_TRY(proxies_.call_host(staging, staging.capture() != 0 ? +again : +once, kept.get()));
  (void)kept.release();
  return {};
}

c10::intrusive_ptr<c10d::Work> ProcessGroupNVX::issue_by_kernels(const Kind& kind, TensorOperations&& collectives,
                                                                 const Tensors& outputs, const Tensors& inputs,
                                                                 Mode mode) {
  auto staging = on_device(collectives, mode);
  const auto copies = [](const TensorOperation& c) { return !c.bring.empty() || !c.take_back.empty(); };
  if (collects() && std::none_of(collectives.begin(), collectives.end(), copies))
    return put_off_kernels(kind, std::move(collectives), outputs, inputs, std::move(staging));
  return launch_on_device(kind, collectives, outputs, inputs, mode, std::move(staging));
}

c10::intrusive_ptr<c10d::Work> ProcessGroupNVX::issue_delegated(const Kind& kind, TensorOperations&& collectives,
                                                                const Tensors& outputs, const Tensors& inputs,
                                                                Mode mode) {
  auto staging = on_device(collectives, mode);
  follow_hazards(inputs, staging->streams().down);
  follow_hazards(outputs, staging->streams().down);
  return launch_on_device(kind, collectives, outputs, inputs, mode, std::move(staging));
}

/// Operations of a device's tensors that pass through host memory, on the group's own streams.
c10::intrusive_ptr<c10d::Work> ProcessGroupNVX::enqueue_staged(const Kind& kind, TensorOperations&& collectives,
                                                               const Tensors& outputs, const Tensors& inputs) {
  const at::Device device = device_of(collectives);
  const std::shared_ptr<Group>& group = group_of(collectives);
  const CommStreams streams = comm_streams_.of(device);
  auto staging = std::make_unique<StagingCopies>(streams);
  const Loads loads = loads_of(collectives, &TensorOperation::bring);
  // What throws before number() has no effect on the other ranks: an operation without a number they do not wait for.
  if (comes_behind(outputs, inputs)) {
    // These two are for results of a delegate or a proxy, which have a stream of their own; bring_behind() waits for
    // the others.
    (void)hazards_.follow(inputs, streams.down);
    (void)hazards_.follow(outputs, streams.up);
    staging->bring_behind(loads);
  } else {
    staging->bring(loads);
    for (TensorOperation& c : collectives) {  // in the other case they set out when the operation's turn has come
      if (c.route() == Route::kChunks)
        c.chunks = std::make_unique<ChunkPipeline>(c.operation, rank_, group->plan_facts(), streams);
    }
  }
  number(collectives);
  auto expected = hazards_.expect(outputs, device.type());
  auto work = c10::make_intrusive<CollectiveWork>(group, facts(kind, group), std::move(collectives), outputs, inputs,
                                                  std::move(staging), std::move(expected));
  enqueue(work, group->lane());
  return work;
}

c10::intrusive_ptr<c10d::Work> ProcessGroupNVX::enqueue_and_wait(const Kind& kind, TensorOperations&& collectives,
                                                                 const Tensors& outputs, const Tensors& inputs) {
  if (group_of(collectives)->lane().held_here()) raise(group_->inside_itself());
  auto work = enqueue_staged(kind, std::move(collectives), outputs, inputs);
  work->wait(std::chrono::milliseconds(0));
  return work;
}

void ProcessGroupNVX::number(TensorOperations& collectives) {
  for (TensorOperation& c : collectives) c.operation.number = group_->next_number();
}

/// Of an operation that has ended on this thread.
void ProcessGroupNVX::raise_if_ended_badly(const Status& status) {
  if (!status.ok()) {
    tell_failure(status.code());
    raise(status);
  }
  raise_interrupt();  // that was noticed while the operation still ended well
}

c10::intrusive_ptr<c10d::Work> ProcessGroupNVX::done(NvxWork::Facts facts, const Tensors& outputs,
                                                     std::unique_ptr<StagingCopies> staging) {
  const auto stream = staging ? std::optional(staging->stream()) : std::nullopt;
  const auto work = c10::make_intrusive<DoneWork>(std::move(facts), outputs, stream, std::move(staging));
  work->begin();
  return work;
}

/// What a work that begins on a device is recorded with, where anybody records. A synchronous call is a record itself.
std::optional<ProcessGroupNVX::Tensors> ProcessGroupNVX::recorded(const Tensors& inputs, Mode mode) {
  return mode == Mode::kAsync && at::hasCallbacks() ? std::optional(inputs) : std::nullopt;
}

/// The host waits until a stream can wait for the results: those that the lane has yet to bring have no stream yet.
void ProcessGroupNVX::follow_hazards(const Tensors& tensors, const c10::Stream& stream) {
  constexpr std::chrono::milliseconds kGlance{20};
  while (!hazards_.follow(tensors, stream)) {
    Lane& lane = device_group()->lane();
    if (lane.held_here()) raise(group_->inside_itself());
    kernels_->catch_up();
    lane.settle(kGlance);
    group_->look_for_interrupt();
    raise_interrupt();
    if (const Status alive = device_group()->check_alive(); !alive.ok()) raise(alive);
  }
}

/// A synchronous one runs on the caller's stream, so that nothing that this stream is given later need wait for it.
std::unique_ptr<StagingCopies> ProcessGroupNVX::on_device(const TensorOperations& collectives, Mode mode) {
  const at::Device device = device_of(collectives);
  CommStreams streams = CommStreams::of_caller(device);
  streams.capture = capture_of(streams.up);
  if (mode == Mode::kAsync) streams = comm_streams_.of_kernels(device, streams.capture);
  return std::make_unique<StagingCopies>(streams, /*timed=*/timed_ && streams.capture == 0);
}

Status ProcessGroupNVX::begin_on_device(TensorOperations& collectives, StagingCopies& staging, uint64_t* ended_at) {
  if (route_of(collectives) != Route::kDelegate) return kernels_->launch(collectives, staging, ended_at);
  return kernels_->launch(collectives, staging, [this](TensorOperations& all, const KernelPath::Target& target) {
    return delegate_->begin(all.front(), target.stream);
  });
}

c10::intrusive_ptr<c10d::Work> ProcessGroupNVX::launch_on_device(const Kind& kind, TensorOperations& collectives,
                                                                 const Tensors& outputs, const Tensors& inputs,
                                                                 Mode mode, std::unique_ptr<StagingCopies> staging) {
  const bool async = mode == Mode::kAsync, heard = needs_work();
  const Tensors used = async ? all_tensors(collectives, outputs, inputs) : Tensors();
  Status status;
  uint64_t ended_at = 0;
  try {
    status = begin_on_device(collectives, *staging, &ended_at);
  } catch (...) {  // part of it may have been begun
    contain("the end of a call", [&] { staging->close(used); });
    throw;
  }
  const at::Device device = device_of(collectives);
  contain_and(
      [&] {
        if (async || heard) staging->close(used);
        if (async && route_of(collectives) == Route::kDelegate)
          hazards_.expect(used, device.type())->set_out(staging->stream());
      },
      [&](const std::exception* error) {
        const char* const what = nvx::name(collectives.front().operation.collective);
        const Status lost = fail_silent(*group_, device, what, error);
        if (status.ok()) status = lost;
      });
  if (!status.ok()) {
    tell_failure(status.code());
    raise(status);
  }
  if (!async && !heard) return nullptr;
  if (!async) return done(facts(kind), outputs, std::move(staging));
  auto work = c10::make_intrusive<LaunchedWork>(kernels_, group_, facts(kind), outputs, recorded(inputs, mode),
                                                std::move(staging));
  work->begin(ended_at);
  into_coalescing_scope(work);
  return work;
}

/// Calls of a coalescing scope share launches, as far as none depends on another. They are put off for that. A call
/// that needs copies of tensors that are not contiguous is not: no kernel does these copies, so they are done at the
/// call's own place.
c10::intrusive_ptr<c10d::Work> ProcessGroupNVX::put_off_kernels(const Kind& kind, TensorOperations&& collectives,
                                                                const Tensors& outputs, const Tensors& inputs,
                                                                std::unique_ptr<StagingCopies> staging) {
  SharedStreams::Claim claim = kernels_->claim_stream(*staging);
  staging->bring({});  // may throw, and then nothing has been numbered
  claim.keep();
  for (TensorOperation& c : collectives) {
    c.operation.number = group_->next_number();
    c.operation.timeout = group_->span_of(c.operation.timeout);
  }
  std::vector<at::Tensor> used = all_tensors(collectives, outputs, inputs);
  auto work = c10::make_intrusive<LaunchedWork>(kernels_, group_, facts(kind), outputs, recorded(inputs, Mode::kAsync),
                                                std::move(staging));
  into_coalescing_scope(work);
  work->put_off(std::move(collectives), std::move(used));
  return work;
}

ProcessGroupNVX::Term ProcessGroupNVX::term_of(std::chrono::milliseconds given) {
  const auto own = std::max(given, std::chrono::milliseconds(0));  // c10d::kUnsetTimeout is negative
  Extensions::Share share = extensions_->begin();
  if (share.extra.count() == 0) [[likely]]
    return {own, nullptr};
  const auto plain = own.count() != 0 ? own : group_->timeout();
  if (plain.count() <= 0) return {own, std::move(share.until_it_ends)};  // it has no timeout: nothing is longer
  return {std::min(plain, Extensions::kMost) + share.extra, std::move(share.until_it_ends)};
}

c10::intrusive_ptr<c10d::Work> ProcessGroupNVX::launch(const Kind& kind, TensorOperations&& collectives,
                                                       Tensors& outputs, Tensors& inputs,
                                                       std::chrono::milliseconds timeout, Mode mode) {
  origin_.check(rank_);
  const Term term = term_of(timeout);
  for (TensorOperation& c : collectives) {
    if (c.device != device_of(collectives)) arguments(kind.title).invalid("tensors must be on the same device");
    c.operation.timeout = term.timeout;
    c.claim = term.claim;
  }
  if (C10_UNLIKELY(at::hasCallbacks())) return launch_recorded(kind, std::move(collectives), outputs, inputs, mode);
  return issue(kind, std::move(collectives), outputs, inputs, mode);
}

/// Who carries operations of a device's tensors out, and how, for profiles.
std::string ProcessGroupNVX::profiled_as(TensorOperation& c) {
  switch (c.route()) {
    case Route::kDelegate: return "nvx:handed_over";
    case Route::kKernels: return std::string("nvx:by_kernels:") + group_->device().kernel_for(c.operation);
    case Route::kHostProxy: return "nvx:by_kernels_and_host_memory";
    default: return "nvx:through_host_memory";
  }
}

/// As launch, when a profiler or an observer is on.
c10::intrusive_ptr<c10d::Work> ProcessGroupNVX::launch_recorded(const Kind& kind, TensorOperations&& collectives,
                                                                Tensors& outputs, Tensors& inputs, Mode mode) {
  const auto count = [](const Tensors& tensors) {
    int64_t n = 0;
    for (const at::Tensor& tensor : tensors) n += tensor.numel();
    return n;
  };
  const auto [first, stride] = global_ranks();
  const at::Tensor* any = !inputs.empty() ? &inputs[0] : !outputs.empty() ? &outputs[0] : nullptr;
  NVX_RECORD_COMMS(mode == Mode::kAsync, std::make_tuple(static_cast<int64_t>(group_->sequence() + 1), false),
                   std::make_tuple(group_->name(), pg_desc_), inputs, outputs, rank_, kind.title + 4, count(inputs),
                   count(outputs), any ? any->scalar_type() : at::kByte, kind.give.vec(), kind.take.vec(), first,
                   stride, size_);
  at::RecordFunction way(at::RecordScope::FUNCTION);
  if (way.isActive() && !device_of(collectives).is_cpu()) way.before(profiled_as(collectives.front()));
  if (mode == Mode::kAsync || collects() ||
      route_of(collectives) == Route::kChunks)  // then the work itself is a record
    return issue(kind, std::move(collectives), outputs, inputs, mode);
  {
    at::RecordFunction record(at::RecordScope::FUNCTION);
    if (record.isActive()) {
      record._setAsync();  // as torch has it of every collective
      const std::vector<c10::IValue> shown(inputs.begin(), inputs.end());
      record.before(kind.title, c10::ArrayRef<const c10::IValue>(shown.data(), shown.size()));
    }
    return issue(kind, std::move(collectives), outputs, inputs, mode);
  }
}

std::pair<int64_t, int64_t> ProcessGroupNVX::global_ranks() {
  MutexLock lock(mutex_);
  const auto& ranks = options_.global_ranks_in_group;
  if (ranks.empty()) return {0, 1};
  const auto first = int64_t(ranks[0]), stride = ranks.size() > 1 ? int64_t(ranks[1]) - first : 1;
  for (size_t r = 0; r < ranks.size(); ++r)
    if (int64_t(ranks[r]) != first + int64_t(r) * stride) return {first, -1};
  return {first, stride};
}

}  // namespace nvx
