#include "torch/backend.h"

#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include "base/config.h"
#include "base/contain.h"
#include "base/hash.h"
#include "torch/interrupt.h"
#include "torch/overlaps.h"
#include "torch/recorded.h"
#include "torch/registry.h"
#include "torch/store.h"

namespace nvx {
namespace {

TensorOperations one(TensorOperation&& c) {
  TensorOperations all;
  all.push_back(std::move(c));
  return all;
}

GroupOptions group_options(int rank, int size, const ProcessGroupNVX::Options& options) {
  GroupOptions facts;
  facts.name = options.group_name.empty() ? "unnamed" : options.group_name;
  facts.rank = rank;
  facts.size = size;
  facts.timeout = options.timeout;
  facts.global_ranks = options.global_ranks_in_group;
  if (facts.global_ranks.empty() && !options.ranks_unknown) {  // the default group
    for (int r = 0; r < size; ++r) facts.global_ranks.push_back(uint64_t(r));
  }
  return facts;
}

void trace_staged(const Group& group, const TensorOperation& c) {
  NVX_LOG(kTrace, "group %s rank %d #%llu %s on %s: through host memory", group.name().c_str(), group.rank(),
          static_cast<unsigned long long>(c.operation.number), name(c.operation.collective), c.device.str().c_str());
}

int checked_rank(int rank, int size) {
  TORCH_CHECK_VALUE(size >= 1 && rank >= 0 && rank < size, "ProcessGroupNVX: rank ", rank, " of ", size,
                    " ranks cannot be");
  return rank;
}

std::shared_ptr<Group> make_group(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                                  const ProcessGroupNVX::Options& options, std::function<bool()> unwanted = {}) {
  TORCH_CHECK_VALUE(store, "ProcessGroupNVX: needs a store");
  TorchStore torch_store(store, size);
  GroupOptions facts = group_options(rank, size, options);
  facts.unwanted = std::move(unwanted);
  try {
    return std::make_shared<Group>(torch_store, facts);
  } catch (const Error& error) {
    raise_interrupt();
    C10_THROW_ERROR(DistBackendError, error.what());
  }
}

}  // namespace

ProcessGroupNVX::ProcessGroupNVX(c10::intrusive_ptr<c10d::Store> store, int rank, int size,
                                 c10::intrusive_ptr<Options> options)
    : ProcessGroupNVX(store, make_group(store, checked_rank(rank, size), size, options ? *options : Options()),
                      options ? *options : Options()) {}

ProcessGroupNVX::ProcessGroupNVX(c10::intrusive_ptr<c10d::Store> store, std::shared_ptr<Group> group,
                                 const Options& options)
    : Backend(group->rank(), group->size()),
      store_(std::move(store)),
      group_(std::move(group)),
      kernels_(std::make_shared<KernelPath>(group_, store_)),
      relays_(device_store()),
      options_(options) {
  init();
  if (!config().delegate.empty() && size_ > 1) {
    delegate_ = std::make_shared<Delegate>(group_, store_, [this] {
      kernels_->catch_up();  // the host waits for the others, who may wait for what this rank has called
      return device_group();
    });
  }
  Registry::here().add(*this);
}

ProcessGroupNVX::~ProcessGroupNVX() { Registry::here().remove(*this); }

c10::intrusive_ptr<c10d::Backend::Options> ProcessGroupNVX::getBackendOptions() {
  origin_.check(rank_);
  MutexLock lock(mutex_);
  return c10::make_intrusive<Options>(options_);  // torch changes what it gets
}

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
  into_window(work);
}

/// Collectives of a device's tensors have an order of their own, as if it were another backend: a checkpoint's of
/// CPU tensors, say, may run beside them on a thread of its own. So they have a group of their own, made when the first
/// of them is called, which is a step of all ranks. A barrier is the CPU's, as torch sees it.
const std::shared_ptr<Group>& ProcessGroupNVX::group_of(const TensorOperations& collectives) {
  if (device_of(collectives).is_cpu() || collectives.front().operation.collective == kernel::Collective::kBarrier)
    return group_;
  return device_group();
}

c10::intrusive_ptr<c10d::Store> ProcessGroupNVX::device_store() const {
  return store_ ? c10::make_intrusive<c10d::PrefixStore>("nvx/device", store_) : nullptr;
}

const std::shared_ptr<Group>& ProcessGroupNVX::device_group() {
  if (has_device_group_.load(std::memory_order_acquire)) return device_group_;
  MutexLock lock(device_group_mutex_);
  if (device_group_) return device_group_;
  const Options options = [this] {
    MutexLock reading(mutex_);
    return options_;
  }();
  if (const Status status = group_->check_alive(); !status.ok()) raise(status);
  device_group_ = make_group(device_store(), rank_, size_, options,
                             [group = group_] { return group->failed() || group->closed(); });
  has_device_group_.store(true, std::memory_order_seq_cst);
  std::atomic_thread_fence(std::memory_order_seq_cst);
  // Whoever has ended the one meanwhile has not seen the other.
  if (group_->failed()) device_group_->abort("");
  if (group_->closed()) device_group_->leave();
  return device_group_;
}

std::vector<std::shared_ptr<Group>> ProcessGroupNVX::groups() const {
  if (!has_device_group_.load(std::memory_order_acquire)) return {group_};
  return {group_, device_group_};
}

Status ProcessGroupNVX::execute(TensorOperations& collectives) {
  for (TensorOperation& c : collectives) NVX_TRY(group_->execute(c.operation));
  copy_back(collectives);
  return {};
}

/// On the caller's own stream, so that nothing that it is given later need wait.
Status ProcessGroupNVX::execute_staged(TensorOperations& collectives, Transit& transit) {
  Group& group = *group_of(collectives);
  transit.bring(loads_of(collectives, &TensorOperation::bring));
  Status arrived;
  contain_and(
      [&] { arrived = transit.arrive(group, Deadline::after(group.span_of(collectives.front().operation.timeout))); },
      [&](const std::exception* error) {
        arrived =
            fail_silent(group, transit.stream().device(), nvx::name(collectives.front().operation.collective), error);
      });
  NVX_TRY(arrived);
  for (TensorOperation& c : collectives) {
    c.operation.number = group_->next_number();
    trace_staged(group, c);
    NVX_TRY(group.execute(c.operation));
  }
  transit.take_back(loads_of(collectives, &TensorOperation::take_back));
  return {};
}

/// Not beside another backend's kernels, which come in the order of the calls, while the lane launches a relay's: they
/// might wait for each other crosswise.
bool ProcessGroupNVX::is_relayed(const TensorOperation& c) {
  return c.in_chunks && !delegate_ && relays_.agree_to_serve(*device_group(), c.operation, c.device);
}

/// A relay's kernels begin in their turn. Chunks begin at once, unless results that are to come are in the way.
void ProcessGroupNVX::set_out(TensorOperations& collectives, const std::shared_ptr<Group>& group, const Tracks& tracks,
                              bool behind) {
  for (TensorOperation& c : collectives) {
    if (is_relayed(c)) {
      c.relay = relays_.make(group, tracks, tracks_.of_relays(c.device));
      c.operation.shape = Hash().add(c.operation.shape).add("relayed").value();  // all do so, or hear of it
    } else if (c.in_chunks && !behind) {
      c.convoy = std::make_unique<Convoy>(c.operation, rank_, group->plan_facts(), tracks);
    }
  }
}

c10::intrusive_ptr<CollectiveWork> ProcessGroupNVX::queue(const Kind& kind, TensorOperations collectives,
                                                          const Tensors& outputs, const Tensors& inputs) {
  const at::Device device = device_of(collectives);
  const std::shared_ptr<Group>& group = group_of(collectives);
  std::unique_ptr<Transit> transit;
  std::shared_ptr<Results::Expected> expected;
  if (!device.is_cpu()) {
    const Tracks tracks = tracks_.of(device);
    transit = std::make_unique<Transit>(tracks);
    const Loads loads = loads_of(collectives, &TensorOperation::bring);
    const bool behind = comes_behind(outputs, inputs);
    if (behind) (void)results_.follow(inputs, tracks.down);  // what was handed over is on another stream
    if (behind) (void)results_.follow(outputs, tracks.up);
    behind ? transit->bring_behind(loads) : transit->bring(loads);  // may throw, and then nothing has been numbered
    set_out(collectives, group, tracks, behind);
  }
  for (TensorOperation& c : collectives) c.operation.number = group_->next_number();
  if (transit) expected = results_.expect(outputs, device.type());
  auto work = c10::make_intrusive<CollectiveWork>(group, facts(kind, group), std::move(collectives), outputs, inputs,
                                                  std::move(transit), std::move(expected));
  enqueue(work, group->lane());
  return work;
}

c10::intrusive_ptr<c10d::Work> ProcessGroupNVX::issue(const Kind& kind, TensorOperations collectives,
                                                      const Tensors& outputs, const Tensors& inputs, Mode mode) {
  const at::Device device = device_of(collectives);
  if (!collectives.empty() && collectives.front().on_device())
    return issue_on_device(kind, std::move(collectives), outputs, inputs, mode);
  if (kernels_->is_behind()) kernels_->catch_up();
  if (mode == Mode::kAsync || collects()) return queue(kind, std::move(collectives), outputs, inputs);
  if (in_chunks(collectives) || (!device.is_cpu() && comes_behind(outputs, inputs))) {
    if (group_of(collectives)->lane().held_here()) raise(group_->inside_itself());
    auto work = queue(kind, std::move(collectives), outputs, inputs);
    work->wait(std::chrono::milliseconds(0));
    return work;
  }
  const bool heard = needs_work();
  const Clock::time_point began = heard ? Clock::now() : Clock::time_point();
  std::unique_ptr<Transit> transit;
  if (!device.is_cpu()) transit = std::make_unique<Transit>(Tracks::of_caller(device));
  const Status status = transit ? execute_staged(collectives, *transit) : execute(collectives);
  if (!status.ok()) {
    tell_failure(status.code());
    raise(status);
  }
  raise_interrupt();  // that was noticed while the operation still ended well
  if (!heard) return nullptr;
  NvxWork::Facts all = facts(kind, transit ? group_of(collectives) : group_);
  all.began = began;
  const auto stream = transit ? std::optional(transit->stream()) : std::nullopt;
  const auto work = c10::make_intrusive<DoneWork>(std::move(all), outputs, stream, std::move(transit));
  work->begin();
  return work;
}

/// What is handed over comes behind results that are on their way through host memory to where it reads or writes. The
/// host waits until a stream can wait for them.
void ProcessGroupNVX::follow_results(const Tensors& tensors, const c10::Stream& stream) {
  constexpr std::chrono::milliseconds kGlance{20};
  while (!results_.follow(tensors, stream)) {
    Lane& lane = device_group()->lane();
    if (lane.held_here()) raise(group_->inside_itself());
    kernels_->catch_up();
    lane.settle(kGlance);
    group_->look_for_interrupt();
    raise_interrupt();
    if (const Status alive = device_group()->check_alive(); !alive.ok()) raise(alive);
  }
}

Status ProcessGroupNVX::launch_on_device(TensorOperations& collectives, Transit& transit, uint64_t* ended_at) {
  if (!collectives.front().delegated) return kernels_->launch(collectives, transit, ended_at);
  return kernels_->launch(collectives, transit, [this](TensorOperations& all, const KernelPath::Target& target) {
    return delegate_->begin(all.front(), target.stream);
  });
}

/// A synchronous one runs on the caller's stream: nothing that this is given later need wait.
c10::intrusive_ptr<c10d::Work> ProcessGroupNVX::issue_on_device(const Kind& kind, TensorOperations collectives,
                                                                const Tensors& outputs, const Tensors& inputs,
                                                                Mode mode) {
  const at::Device device = device_of(collectives);
  const bool async = mode == Mode::kAsync || collects();
  Tracks tracks = Tracks::of_caller(device);
  tracks.capture = capture_of(tracks.up);
  if (async) tracks = tracks_.of_kernels(device, tracks.capture);
  const kernel::Collective first = collectives.front().operation.collective;
  const bool delegated = collectives.front().delegated, heard = needs_work();
  auto transit = std::make_unique<Transit>(tracks, /*timed=*/timed_ && tracks.capture == 0);
  const auto copies = [](const TensorOperation& c) { return !c.bring.empty() || !c.take_back.empty(); };
  if (!delegated && async && collects() && std::none_of(collectives.begin(), collectives.end(), copies))
    return put_off_kernels(kind, std::move(collectives), outputs, inputs, std::move(transit));
  if (delegated) follow_results(inputs, tracks.down);
  if (delegated) follow_results(outputs, tracks.down);
  // Whatever comes of it, part of it may have been begun.
  const std::vector<at::Tensor> used = async ? all_tensors(collectives, outputs, inputs) : Tensors();
  Status status;
  uint64_t ended_at = 0;
  try {
    status = launch_on_device(collectives, *transit, &ended_at);
  } catch (...) {
    contain("the end of a call", [&] { transit->close(used); });
    throw;
  }
  contain_and(
      [&] {
        if (async || heard) transit->close(used);
        if (async && delegated) results_.expect(used, device.type())->set_out(tracks.up);
      },
      [&](const std::exception* error) {
        const Status lost = fail_silent(*group_, device, nvx::name(first), error);
        if (status.ok()) status = lost;
      });
  if (!status.ok()) {
    tell_failure(status.code());
    raise(status);
  }
  if (!async && !heard) return nullptr;
  if (!async) {
    const auto done = c10::make_intrusive<DoneWork>(facts(kind), outputs, tracks.up, std::move(transit));
    done->begin();
    return done;
  }
  auto work = c10::make_intrusive<LaunchedWork>(kernels_, group_, facts(kind), outputs, std::move(transit));
  work->begin(ended_at);
  into_window(work);
  return work;
}

/// What is called in a window shares launches, as far as nothing in one depends on another. Copies of what is not
/// contiguous are not the kernels', so that what needs them keeps its place.
c10::intrusive_ptr<c10d::Work> ProcessGroupNVX::put_off_kernels(const Kind& kind, TensorOperations collectives,
                                                                const Tensors& outputs, const Tensors& inputs,
                                                                std::unique_ptr<Transit> transit) {
  SharedStreams::Claim claim = kernels_->claim_stream(*transit);
  transit->bring({});  // may throw, and then nothing has been numbered
  claim.keep();
  for (TensorOperation& c : collectives) {
    c.operation.number = group_->next_number();
    c.operation.timeout = group_->span_of(c.operation.timeout);
  }
  std::vector<at::Tensor> used = all_tensors(collectives, outputs, inputs);
  auto work = c10::make_intrusive<LaunchedWork>(kernels_, group_, facts(kind), outputs, std::move(transit));
  into_window(work);
  work->put_off(std::move(collectives), std::move(used));
  return work;
}

ProcessGroupNVX::Term ProcessGroupNVX::term_of(std::chrono::milliseconds given) {
  const auto own = std::max(given, std::chrono::milliseconds(0));  // c10d::kUnsetTimeout is negative
  Extensions::Share share = extensions_->begin();
  if (share.extra.count() == 0) [[likely]]
    return {own, nullptr};
  const auto plain = own.count() != 0 ? own : group_->timeout();
  if (plain.count() <= 0) return {own, std::move(share.until_it_ends)};  // no timeout is the longest
  return {std::min(plain, Extensions::kMost) + share.extra, std::move(share.until_it_ends)};
}

c10::intrusive_ptr<c10d::Work> ProcessGroupNVX::launch(const Kind& kind, TensorOperations collectives, Tensors& outputs,
                                                       Tensors& inputs, std::chrono::milliseconds timeout, Mode mode) {
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

/// Who carries collectives of a device's tensors out, and how, for profiles.
std::string ProcessGroupNVX::way_of(const TensorOperations& collectives) {
  const TensorOperation& c = collectives.front();
  if (c.delegated) return "nvx:handed_over";
  if (c.by_kernels) return std::string("nvx:by_kernels:") + group_->kernel_for(c.operation);
  return is_relayed(c) ? "nvx:by_kernels_and_host_memory" : "nvx:through_host_memory";
}

/// As launch, when a profiler or an observer is on.
c10::intrusive_ptr<c10d::Work> ProcessGroupNVX::launch_recorded(const Kind& kind, TensorOperations collectives,
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
  if (way.isActive() && !device_of(collectives).is_cpu()) way.before(way_of(collectives));
  if (mode == Mode::kAsync || in_chunks(collectives))  // whose work says so itself
    return issue(kind, std::move(collectives), outputs, inputs, mode);
  {
    at::RecordFunction record(at::RecordScope::FUNCTION);
    if (record.isActive()) {
      record._setAsync();  // as every collective's event is, whoever carries it
      const std::vector<c10::IValue> shown(inputs.begin(), inputs.end());
      record.before(kind.title, c10::ArrayRef<const c10::IValue>(shown.data(), shown.size()));
    }
    return issue(kind, std::move(collectives), outputs, inputs, mode);
  }
}

c10::intrusive_ptr<c10d::Work> ProcessGroupNVX::broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) {
  const Arguments args = arguments("ProcessGroupNVX::broadcast");
  return launch({c10d::OpType::BROADCAST, "nvx:broadcast"},
                one(args.broadcast(tensors, opts.rootRank, opts.rootTensor)), tensors, tensors, opts.timeout,
                mode(opts.asyncOp));
}

c10::intrusive_ptr<c10d::Work> ProcessGroupNVX::allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  const Arguments args = arguments("ProcessGroupNVX::allreduce");
  if (!tensors.empty() && tensors[0].defined() && tensors[0].layout() == at::kSparse)
    return all_reduce_sparse(tensors, opts);
  return launch({c10d::OpType::ALLREDUCE, "nvx:all_reduce"}, one(args.all_reduce(tensors, opts.reduceOp)), tensors,
                tensors, opts.timeout, mode(opts.asyncOp));
}

c10::intrusive_ptr<c10d::Work> ProcessGroupNVX::allreduce_sparse(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  return allreduce(tensors, opts);
}

c10::intrusive_ptr<c10d::Work> ProcessGroupNVX::allreduce_coalesced(Tensors& tensors,
                                                                    const c10d::AllreduceCoalescedOptions& opts) {
  const Arguments args = arguments_of_several("ProcessGroupNVX::allreduce_coalesced");
  args.check_reduced(tensors);
  const std::vector<bool> again = use_memory_again(tensors);
  TensorOperations all;
  for (size_t i = 0; i < tensors.size(); ++i) all.push_back(args.all_reduce(tensors[i], opts.reduceOp, again[i]));
  return launch({c10d::OpType::ALLREDUCE_COALESCED, "nvx:all_reduce"}, std::move(all), tensors, tensors, opts.timeout,
                mode(opts.asyncOp));
}

c10::intrusive_ptr<c10d::Work> ProcessGroupNVX::reduce(Tensors& tensors, const c10d::ReduceOptions& opts) {
  const Arguments args = arguments("ProcessGroupNVX::reduce");
  if (opts.rootTensor != 0) args.invalid("invalid root tensor: " + std::to_string(opts.rootTensor));
  return launch({c10d::OpType::REDUCE, "nvx:reduce"},
                one(args.reduce(args.single(tensors), opts.reduceOp, opts.rootRank)), tensors, tensors, opts.timeout,
                mode(opts.asyncOp));
}

c10::intrusive_ptr<c10d::Work> ProcessGroupNVX::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                                          const c10d::AllgatherOptions& opts) {
  const Arguments args = arguments("ProcessGroupNVX::allgather");
  TensorOperation c = args.all_gather(outputs, inputs);
  const bool several = outputs.size() > 1;
  Tensors flat;
  if (several) {
    for (const Tensors& list : outputs) flat.insert(flat.end(), list.begin(), list.end());
  }
  return launch({c10d::OpType::ALLGATHER, "nvx:all_gather", several ? outputs.size() : 0}, one(std::move(c)),
                several ? flat : outputs[0], inputs, opts.timeout, mode(opts.asyncOp));
}

c10::intrusive_ptr<c10d::Work> ProcessGroupNVX::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                                const c10d::AllgatherOptions& opts) {
  const Arguments args = arguments("ProcessGroupNVX::_allgather_base");
  Tensors outputs{output}, inputs{input};
  return launch({c10d::OpType::_ALLGATHER_BASE, "nvx:_all_gather_base"}, one(args.all_gather_base(output, input)),
                outputs, inputs, opts.timeout, mode(opts.asyncOp));
}

c10::intrusive_ptr<c10d::Work> ProcessGroupNVX::allgather_coalesced(std::vector<Tensors>& outputs, Tensors& inputs,
                                                                    const c10d::AllgatherOptions& opts) {
  const Arguments args = arguments_of_several("ProcessGroupNVX::allgather_coalesced");
  args.check_coalesced(outputs, inputs);
  TensorOperations all;
  Tensors flat;
  for (size_t i = 0; i < inputs.size(); ++i) {
    Tensors column;
    for (const Tensors& list : outputs) column.push_back(list[i]);
    all.push_back(args.all_gather(column, inputs[i]));
  }
  for (const Tensors& list : outputs) flat.insert(flat.end(), list.begin(), list.end());
  return launch({c10d::OpType::ALLGATHER_COALESCED, "nvx:all_gather", outputs.size()}, std::move(all), flat, inputs,
                opts.timeout, mode(opts.asyncOp));
}

c10::intrusive_ptr<c10d::Work> ProcessGroupNVX::allgather_into_tensor_coalesced(Tensors& outputs, Tensors& inputs,
                                                                                const c10d::AllgatherOptions& opts) {
  const Arguments args = arguments_of_several("ProcessGroupNVX::allgather_into_tensor_coalesced");
  args.check_same_length(outputs.size(), inputs.size());
  TensorOperations all;
  for (size_t i = 0; i < inputs.size(); ++i) all.push_back(args.all_gather_base(outputs[i], inputs[i]));
  return launch({c10d::OpType::ALLGATHER_COALESCED, "nvx:_all_gather_base"}, std::move(all), outputs, inputs,
                opts.timeout, mode(opts.asyncOp));
}

c10::intrusive_ptr<c10d::Work> ProcessGroupNVX::gather(std::vector<Tensors>& outputs, Tensors& inputs,
                                                       const c10d::GatherOptions& opts) {
  const Arguments args = arguments("ProcessGroupNVX::gather");
  args.check_single(inputs, "input ");
  TensorOperation c = args.gather(outputs, inputs[0], opts.rootRank);
  Tensors none;
  Tensors& flat = outputs.empty() ? none : outputs[0];
  return launch({c10d::OpType::GATHER, "nvx:gather"}, one(std::move(c)), flat, inputs, opts.timeout,
                mode(opts.asyncOp));
}

c10::intrusive_ptr<c10d::Work> ProcessGroupNVX::scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                                        const c10d::ScatterOptions& opts) {
  const Arguments args = arguments("ProcessGroupNVX::scatter");
  args.check_single(outputs, "output ");
  TensorOperation c = args.scatter(outputs[0], inputs, opts.rootRank);
  Tensors none;
  Tensors& flat = inputs.empty() ? none : inputs[0];
  return launch({c10d::OpType::SCATTER, "nvx:scatter"}, one(std::move(c)), outputs, flat, opts.timeout,
                mode(opts.asyncOp));
}

c10::intrusive_ptr<c10d::Work> ProcessGroupNVX::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                                               const c10d::ReduceScatterOptions& opts) {
  const Arguments args = arguments("ProcessGroupNVX::reduce_scatter");
  args.check_single(outputs, "output ");
  args.check_same_length(outputs.size(), inputs.size());
  return launch({c10d::OpType::REDUCE_SCATTER, "nvx:reduce_scatter"},
                one(args.reduce_scatter(outputs[0], inputs[0], opts.reduceOp)), outputs, inputs[0], opts.timeout,
                mode(opts.asyncOp));
}

c10::intrusive_ptr<c10d::Work> ProcessGroupNVX::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                                     const c10d::ReduceScatterOptions& opts) {
  const Arguments args = arguments("ProcessGroupNVX::_reduce_scatter_base");
  Tensors outputs{output}, inputs{input};
  return launch({c10d::OpType::_REDUCE_SCATTER_BASE, "nvx:_reduce_scatter_base"},
                one(args.reduce_scatter_base(output, input, opts.reduceOp)), outputs, inputs, opts.timeout,
                mode(opts.asyncOp));
}

c10::intrusive_ptr<c10d::Work> ProcessGroupNVX::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& opts) {
  const Arguments args = arguments_of_several("ProcessGroupNVX::reduce_scatter_tensor_coalesced");
  args.check_same_length(outputs.size(), inputs.size());
  TensorOperations all;
  for (size_t i = 0; i < inputs.size(); ++i)
    all.push_back(args.reduce_scatter_base(outputs[i], inputs[i], opts.reduceOp));
  return launch({c10d::OpType::REDUCE_SCATTER, "nvx:_reduce_scatter_base"}, std::move(all), outputs, inputs,
                opts.timeout, mode(opts.asyncOp));
}

c10::intrusive_ptr<c10d::Work> ProcessGroupNVX::alltoall_base(at::Tensor& output, at::Tensor& input,
                                                              std::vector<int64_t>& output_splits,
                                                              std::vector<int64_t>& input_splits,
                                                              const c10d::AllToAllOptions& opts) {
  const Arguments args = arguments("ProcessGroupNVX::alltoall_base");
  Tensors outputs{output}, inputs{input};
  return launch({c10d::OpType::ALLTOALL_BASE, "nvx:all_to_all", 0, input_splits, output_splits},
                one(args.all_to_all_base(output, input, output_splits, input_splits)), outputs, inputs, opts.timeout,
                mode(opts.asyncOp));
}

c10::intrusive_ptr<c10d::Work> ProcessGroupNVX::alltoall(Tensors& outputs, Tensors& inputs,
                                                         const c10d::AllToAllOptions& opts) {
  const Arguments args = arguments("ProcessGroupNVX::alltoall");
  return launch({c10d::OpType::ALLTOALL, "nvx:all_to_all"}, one(args.all_to_all(outputs, inputs)), outputs, inputs,
                opts.timeout, mode(opts.asyncOp));
}

c10::intrusive_ptr<c10d::Work> ProcessGroupNVX::barrier(const c10d::BarrierOptions& opts) {
  TensorOperation c;
  c.operation.collective = kernel::Collective::kBarrier;
  // torch routes a barrier without a device to the CPU; who uses one expects what it was given to have been done. A
  // group that is bound to a device means that one.
  c.device = device_in_use(getBoundDeviceId()).value_or(at::kCPU);
  if (!c.device.is_cpu() && !opts.device_ids.empty()) c.device.set_index(c10::DeviceIndex(opts.device_ids.front()));
  Tensors none;
  return launch({c10d::OpType::BARRIER, "nvx:barrier"}, one(std::move(c)), none, none, opts.timeout,
                mode(opts.asyncOp));
}

void ProcessGroupNVX::monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) {
  origin_.check(rank_);
  if (const auto device = device_in_use()) refuse_capture(*device);
  const auto timeout = opts.timeout == c10d::kUnsetTimeout ? group_->timeout() : opts.timeout;
  const Status status = group_->monitored_barrier(timeout, wait_all_ranks);
  if (!status.ok()) raise(status);
  raise_interrupt();
}

}  // namespace nvx
