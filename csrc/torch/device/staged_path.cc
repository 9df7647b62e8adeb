#include "torch/device/staged_path.h"

#include "base/contain.h"
#include "base/log.h"
#include "torch/core/interrupt.h"

namespace nvx {

IntrusiveWork StagedPath::issue(Call&& call) {
  if (call.mode == Mode::kAsync) return enqueue(std::move(call));
  if (context_.has_hazard(call)) return enqueue_and_wait(std::move(call));
  const bool needs_work = context_.needs_work();
  const Clock::time_point began = needs_work ? Clock::now() : Clock::time_point();
  auto staging = std::make_unique<StagingCopies>(CommStreams::of_caller(call.device()));
  context_.raise_if_failed(execute(call.collectives, *staging));
  raise_interrupt();  // a handler may have raised while the operation still succeeded
  if (!needs_work) return nullptr;
  NvxWork::Facts facts = context_.facts(call.kind, context_.groups.of(call.collectives));
  facts.began = began;
  return CallContext::done(std::move(facts), call.outputs, std::move(staging));
}

IntrusiveWork StagedPath::issue_in_chunks(Call&& call) {
  return call.mode == Mode::kAsync ? enqueue(std::move(call)) : enqueue_and_wait(std::move(call));
}

/// Uses the caller's own stream, so its later work is ordered without an event.
Status StagedPath::execute(std::span<TensorOperation> collectives, StagingCopies& staging) {
  Group& group = *context_.groups.of(collectives);
  staging.copy_in(loads_of(collectives, &TensorOperation::copies_in));
  Status arrived;
  contain_and(
      [&] { arrived = staging.arrive(group, Deadline::after(group.span_of(collectives.front().operation.timeout))); },
      [&](const std::exception* error) {
        arrived = fail_on_device(group, staging.stream().device(), nvx::name(collectives.front().operation.collective),
                                 error);
      });
  NVX_TRY(arrived);
  for (TensorOperation& c : collectives) {
    c.operation.number = context_.group().next_number();
    NVX_LOG(kTrace, "group %s rank %d #%llu %s on %s: through host memory", group.name().c_str(), group.rank(),
            static_cast<unsigned long long>(c.operation.number), name(c.operation.collective), c.device.str().c_str());
    NVX_TRY(group.execute(c.operation));
  }
  staging.copy_out(loads_of(collectives, &TensorOperation::copies_out));
  return {};
}

IntrusiveWork StagedPath::enqueue(Call&& call) {
  const std::shared_ptr<Group>& group = context_.groups.of(call.collectives);
  const CommStreams streams = context_.streams.of(call.device());
  auto staging = std::make_unique<StagingCopies>(streams);
  const Loads loads = loads_of(call.collectives, &TensorOperation::copies_in);
  // An exception before number() does not affect the other ranks: they do not wait for an operation without a number.
  if (context_.has_hazard(call)) {
    // These two order the call after results of a delegate or a proxy, which have their own stream.
    // copy_in_when_reached() orders it after all other results.
    (void)context_.hazards.follow(call.inputs, streams.d2h);
    (void)context_.hazards.follow(call.outputs, streams.h2d);
    staging->copy_in_when_reached(loads, /*behind=*/true);
  } else {
    staging->copy_in(loads);
    for (TensorOperation& c : call.collectives) {  // otherwise carry_out() makes the pipeline, at its turn
      if (c.route() == Route::kChunks)
        c.chunks = std::make_unique<ChunkPipeline>(c.operation, group->rank(), group->plan_facts(), streams);
    }
  }
  context_.number(call.collectives);
  auto expected = context_.hazards.expect(call.outputs);
  auto work = c10::make_intrusive<CollectiveWork>(context_.facts(call.kind, group), call.take_collectives(),
                                                  call.outputs, call.inputs, std::move(staging), std::move(expected));
  context_.enqueue(work, group->lane());
  return work;
}

IntrusiveWork StagedPath::enqueue_and_wait(Call&& call) {
  if (context_.groups.of(call.collectives)->lane().held_here()) raise(context_.group().reentrant());
  auto work = enqueue(std::move(call));
  work->wait(std::chrono::milliseconds(0));
  return work;
}

}  // namespace nvx
