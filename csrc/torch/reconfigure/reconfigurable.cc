#include "torch/reconfigure/reconfigurable.h"

#ifdef C10D_BACKEND_HAS_RECONFIGURE

#include <unistd.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <variant>

#include "base/config.h"
#include "base/contain.h"
#include "base/log.h"
#include "base/text.h"
#include "torch/core/argument_error.h"
#include "torch/core/hook.h"
#include "torch/core/interrupt.h"
#include "torch/core/store.h"

namespace nvx {
namespace {

constexpr const char* kNewUuid =
    ". Next: reconfigure with a uuid that is new, and with the same handles on all ranks, in the same order where they "
    "are a list";

std::string came_key(size_t rank) { return "came/" + std::to_string(rank); }

[[noreturn]] void refuse_to_change(const std::string& group) {
  throw_argument_error("nvx: group " + group +
                       " keeps its ranks, as it was made without enable_reconfigure=True. Next: "
                       "init_process_group(\"nvx\", enable_reconfigure=True), or dist.shrink_group");
}

}  // namespace

std::string ProcessGroupNVX::get_reconfigure_handle() const { refuse_to_change(active()->group().name()); }

IntrusiveWork ProcessGroupNVX::reconfigure(const c10d::ReconfigureOptions& /*opts*/) {
  refuse_to_change(active()->group().name());
}

Reconfigurable::Reconfigurable(c10::intrusive_ptr<c10d::Store> store, int rank, int size,
                               c10::intrusive_ptr<Options> options)
    : ProcessGroupNVX(rank, size),
      store_(std::move(store)),
      options_(options ? *options : Options()),
      handle_rank_(rank) {
  TORCH_CHECK_VALUE(store_, "nvx: a reconfigurable group needs a store");
}

/// In a forked child the memory belongs to the parent and is not mapped, so it is leaked.
Reconfigurable::~Reconfigurable() {
  if (origin_.elsewhere()) new auto(std::move(shm_));
}

std::string Reconfigurable::name() const {
  MutexLock lock(mutex_);
  return options_.group_name.empty() ? "unnamed" : options_.group_name;
}

Reconfigurable::Current Reconfigurable::active_or_null() const {
  check_process();
  MutexLock lock(mutex_);
  return current_;
}

Reconfigurable::Current Reconfigurable::active() const {
  check_process();
  MutexLock lock(mutex_);
  while (!current_ && pending_) {
    const c10::intrusive_ptr<ReconfigureWork> pending = pending_;
    lock.unlock();
    without_python_lock([&] { (void)pending->wait(kNoTimeout); });
    lock.lock();
  }
  if (current_) return current_;
  const std::string failure = failure_;
  lock.unlock();
  const std::string none = "nvx: group " + name() + " has not been initialized: ";
  if (!failure.empty()) C10_THROW_ERROR(DistBackendError, none + "its last reconfigure() failed: " + failure);
  throw_argument_error(none +
                       "it was made with enable_reconfigure=True. Call reconfigure() before issuing collectives");
}

MemberHandle Reconfigurable::own_handle() const {
  return {.rank = handle_rank_,
          .uuid = uuid_,
          .pid = getpid(),
          .process = shm_->arena().id(),
          .group = number_,
          .host = printable(own_host_name())};
}

std::string Reconfigurable::get_reconfigure_handle() const {
  check_process();
  MutexLock lock(mutex_);
  return own_handle().text();
}

Reconfigurable::Plan Reconfigurable::plan_of(const c10d::ReconfigureOptions& opts) const {
  const bool ordered = std::holds_alternative<std::vector<std::string>>(opts.handles);
  std::vector<std::string> handles;
  std::visit([&](const auto& given) { handles.assign(given.begin(), given.end()); }, opts.handles);
  MutexLock lock(mutex_);
  const MemberHandle self = own_handle();
  const auto given = opts.timeout.value_or(std::max(timeout(), kNoTimeout));
  const auto timeout = is_no_timeout(given) ? kNoTimeout : given;
  const auto known = known_;
  lock.unlock();

  Plan plan;
  plan.uuid = opts.uuid;
  plan.name = name() + " of uuid " + std::to_string(opts.uuid);
  plan.timeout = timeout;
  if (timeout.count() < 0) throw_argument_error("nvx: reconfigure: a timeout of ", timeout.count(), " ms is negative");
  plan.members = members_of(handles, ordered ? RankBy::kPosition : RankBy::kHandle);
  std::string own_text;
  for (size_t r = 0; r < plan.members.size(); ++r) {
    const MemberHandle& member = plan.members[r];
    if (member.text() == self.text()) plan.rank = int(r);
    if (member.group == self.group && member.process == self.process) own_text = member.text();
    const auto found = known.find(member.process);
    plan.processes.push_back(found != known.end() ? found->second : EarlierProcess{.id = member.process});
    if (member.process != self.process) plan.processes.back().local = shm_->find(member.process);
  }
  if (own_text != self.text()) {
    const std::string stale = own_text.empty() ? "" : "; there is one that it had before, " + own_text;
    throw_argument_error(
        "nvx: this rank's own handle, ", self.text(), ", is not among the ", handles.size(),
        " that reconfigure was given", stale,
        ". Next: pass on the text that get_reconfigure_handle() returns now, and call reconfigure only on ranks "
        "that are to be in the group");
  }
  for (const auto& [hint, value] : opts.hints)
    NVX_LOG(kWarn, "reconfigure: unknown hint \"%s\" ignored", printable(hint).c_str());
  return plan;
}

void Reconfigurable::enter(int64_t uuid, const c10::intrusive_ptr<ReconfigureWork>& work) {
  const std::string me = "nvx: group " + name();
  MutexLock lock(mutex_);
  if (ended_) throw_argument_error(me, " has been destroyed, and cannot be reconfigured. Next: make another one");
  if (pending_)
    throw_argument_error(me, " is being reconfigured already. Next: wait for the work of that, or abort it");
  if (!used_.insert(uuid).second) throw_argument_error(me, ": uuid ", uuid, " was already used", kNewUuid);
  pending_ = work;
}

c10::intrusive_ptr<c10d::Store> Reconfigurable::store_of(const Plan& plan) const {
  return c10::make_intrusive<c10d::PrefixStore>("nvx/reconfigure/" + std::to_string(plan.uuid), store_);
}

/// The first rank with a uuid writes its members to the store, so that ranks which mean another group never connect to
/// it.
void Reconfigurable::claim(const Plan& plan, const ReconfigureWork& work) const {
  const std::string mine = std::to_string(digest_of(plan.members));
  std::string claimed;
  try {
    TorchStore store(store_of(plan), int(plan.members.size()), plan.timeout,
                     [&] { return work.cancelled() || exiting.load(); });
    const std::vector<uint8_t> first = store.claim("members", {mine.begin(), mine.end()});
    claimed.assign(first.begin(), first.end());
    if (claimed == mine) (void)store.add(came_key(size_t(plan.rank)), 1);
  } catch (const Error& error) {
    raise_interrupt();
    C10_THROW_ERROR(DistBackendError, error.what());
  }
  if (claimed == mine) return;
  throw_argument_error("nvx: uuid ", plan.uuid,
                       " was already used in this store, with other handles or another order of them", kNewUuid);
}

IntrusiveWork Reconfigurable::reconfigure(const c10d::ReconfigureOptions& opts) {
  check_process();
  const auto plan = std::make_shared<Plan>(plan_of(opts));
  const auto work =
      c10::make_intrusive<ReconfigureWork>(plan->rank, "reconfigure, which makes group " + plan->name + ",");
  const auto self = c10::intrusive_ptr<Reconfigurable>::reclaim_copy(this);
  without_python_lock([&] {
    enter(plan->uuid, work);
    try {
      claim(*plan, *work);
    } catch (...) {
      MutexLock lock(mutex_);
      used_.erase(plan->uuid);  // this rank may claim it again: the store keeps the members for which it was claimed
      pending_.reset();
      lock.unlock();
      work->end(std::current_exception());
      throw;
    }
    MutexLock lock(mutex_);
    const Current old = std::exchange(current_, nullptr);
    failure_.clear();
    plan->old_rank = rank_;
    plan->old_size = size_;
    be(plan->rank, int(plan->members.size()));
    lock.unlock();
    if (old) old->cancel("it is being reconfigured");
    const auto job = [self, plan, work] { self->carry_out(plan, work); };
    if (!ThreadPool::instance().start(job)) job();
  });
  return work;
}

/// Runs on a thread of the pool. The work reports a failure, and so does every later use of the group.
void Reconfigurable::carry_out(const std::shared_ptr<Plan>& plan, const c10::intrusive_ptr<ReconfigureWork>& work) {
  Current next;
  std::exception_ptr error;
  std::string why;
  try {
    next = connect(plan, work);
  } catch (const Error& failed) {
    const Status explained = explain(failed, *plan);
    why = explained.what();
    error = exception_of(explained);
  } catch (const std::exception& failed) {
    why = text_of(&failed);
    error = std::current_exception();
  }
  plan->processes.clear();
  std::vector<EarlierProcess> processes;
  if (next) processes = next->group().processes();
  const bool wanted =
      work->release_communicator();  // also if connect() has failed: its group is destroyed here, without the lock
  MutexLock lock(mutex_);
  // A cancel() after release_communicator() did not reach the communicator.
  if (!error && (!wanted || work->cancelled())) {
    why = "nvx: group " + plan->name + " was aborted while it was being made";
    error = exception_of({Code::kAborted, why});
  }
  failure_ = without_name(why);
  if (error) {
    be(plan->old_rank, plan->old_size);
  } else {
    if (timeout_was_set_)
      next->context.groups.set_timeout(options_.timeout);  // it may have changed since connect() read it
    for (EarlierProcess& process : processes) {
      if (process.remote) known_.insert_or_assign(process.id, std::move(process));
    }
    current_ = next;
    uuid_ = plan->uuid;
    handle_rank_ = plan->rank;
  }
  pending_.reset();
  lock.unlock();
  if (error && next) next->cancel(without_name(why));
  work->end(error);
}

/// The new ranks are numbered without regard to earlier groups of the job, so they have no global ranks.
Reconfigurable::Current Reconfigurable::connect(const std::shared_ptr<Plan>& plan,
                                                const c10::intrusive_ptr<ReconfigureWork>& work) {
  MutexLock lock(mutex_);
  Options options = options_;
  const auto timeout = this->timeout();
  const std::optional<at::Device> device = device_;
  lock.unlock();
  options.group_name = plan->name;
  options.ranks_unknown = true;
  options.global_ranks_in_group.clear();
  const auto store = store_of(*plan);
  GroupOptions facts = group_options(plan->rank, int(plan->members.size()), options);
  facts.timeout = plan->timeout;
  facts.processes = plan->processes;
  facts.aborted = [work] { return work->cancelled() || exiting.load(); };
  TorchStore torch_store(store, facts.size, facts.timeout, facts.aborted);
  const auto group = std::make_shared<Group>(torch_store, facts);
  group->set_timeout(timeout);
  auto next = std::make_shared<Communicator>(*this, listeners_, store, group, options);
  // Opening a device is a collective call, and ends early only if the group is aborted: by the work, from here on, or
  // because the process began to exit when the group was already registered.
  if (work->hold_communicator(next) && device && !exiting.load()) next->connect(*device);
  return next;
}

/// Describes the failure, and names the members that have not come, as far as this process knows them.
Status Reconfigurable::explain(const Error& error, const Plan& plan) const {
  constexpr size_t kMost = 8;
  constexpr std::chrono::milliseconds kPatience{1000};
  if (Failure failure = error.failure(); failure.code == Code::kPeerDied) {
    failure.advice = "reconfigure without it, with a uuid that is new";
    return failure;
  }
  if (error.code() != Code::kTimeout && error.code() != Code::kPeerFailed) return error.status();
  std::vector<std::string> missing;
  contain("reading from the store which ranks have arrived to reconfigure", [&] {
    TorchStore store(store_of(plan), int(plan.members.size()), kPatience);
    for (size_t r = 0; r < plan.members.size() && missing.size() < kMost; ++r) {
      if (store.add(came_key(r), 0) == 0)
        missing.push_back("rank " + std::to_string(r) + " is " + plan.members[r].description());
    }
  });
  return missing.empty() ? error.status()
                         : with_context(error.status(), "of those that did not arrive, " + joined(missing));
}

c10::intrusive_ptr<c10d::Backend::Options> Reconfigurable::getBackendOptions() {
  check_process();
  MutexLock lock(mutex_);
  return c10::make_intrusive<Options>(options_);  // a copy, because torch changes the options that it gets
}

void Reconfigurable::setTimeout(std::chrono::milliseconds timeout) {
  check_process();
  MutexLock lock(mutex_);
  options_.timeout = timeout;
  timeout_was_set_ = true;
  // Under the lock, so that a communicator that is being installed gets it too.
  if (current_) current_->context.groups.set_timeout(timeout);
}

/// Without a communicator, the device is opened when the next one is set up. One that is being set up may have read the
/// device already, so this waits for it.
void Reconfigurable::eagerConnectSingleDevice(at::Device device) {
  check_process();
  MutexLock lock(mutex_);
  device_ = device;
  const bool none = !current_ && !pending_;
  lock.unlock();
  if (!none) active()->connect(device);
}

c10d::ErrorType Reconfigurable::getError() {
  if (const Current current = active_or_null()) return current->error();
  MutexLock lock(mutex_);
  return failure_.empty() ? c10d::ErrorType::SUCCESS : c10d::ErrorType::COMM_ERROR;
}

/// Aborts a set-up as well. After that the group may be reconfigured.
void Reconfigurable::abort() {
  if (origin_.elsewhere()) return;
  if (const Current current = cancel_setup()) current->abort();
}

void Reconfigurable::shutdown() {
  if (origin_.elsewhere()) return;
  MutexLock lock(mutex_);
  ended_ = true;
  lock.unlock();
  if (const Current current = cancel_setup()) current->shut_down();
}

Reconfigurable::Current Reconfigurable::cancel_setup() const {
  MutexLock lock(mutex_);
  if (const c10::intrusive_ptr<ReconfigureWork> pending = pending_) {
    lock.unlock();
    pending->cancel();
    lock.lock();
  }
  return current_;  // read last: the set-up may have ended before cancel()
}

}  // namespace nvx

#endif
