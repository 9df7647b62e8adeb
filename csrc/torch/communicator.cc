#include "torch/communicator.h"

#include <algorithm>

#include "base/contain.h"
#include "base/interrupt.h"
#include "base/per_process.h"
#include "torch/core/argument_error.h"
#include "torch/core/interrupt.h"
#include "torch/core/store.h"
#include "torch/device/kernel_path.h"
#include "torch/device/pool.h"

namespace nvx {

Communicator::Communicator(c10d::Backend& backend, Listeners& listeners, c10::intrusive_ptr<c10d::Store> store,
                           std::shared_ptr<Group> group, const NvxOptions& options)
    : context(backend, listeners, std::move(store), std::move(group), options) {
  LiveObjects<Communicator>::instance().add(*this);
}

/// Two things would keep the group alive: postponed operations hold the kernels' path, which holds them; and if peers
/// may write to this rank's memory, a thread of the group waits for that.
Communicator::~Communicator() {
  const Uninterrupted here;
  LiveObjects<Communicator>::instance().remove(*this);
  if (!context.origin.elsewhere())
    contain("the end of a group", [&] { without_python_lock([&] { issuer.kernels().flush_if_postponed(); }); });
  if (has_memory_for_peers) group().leave();
}

c10d::ErrorType Communicator::error() {
  const auto all = context.groups.all();
  for (const auto& group : all) (void)group->device().check_kernels();
  const auto failed = std::ranges::find_if(all, [](const auto& group) { return group->failed(); });
  if (failed == all.end()) return c10d::ErrorType::SUCCESS;
  switch ((*failed)->failure().code()) {
    case Code::kTimeout: return c10d::ErrorType::TIMEOUT;
    case Code::kPeerDied:
    case Code::kPeerLeft:
    case Code::kPeerFailed: return c10d::ErrorType::REMOTE_ERROR;
    default: return c10d::ErrorType::COMM_ERROR;
  }
}

/// This rank does not know whether the other ranks got a device_id. So ranks with a device_id first wait for all
/// ranks, and open the device only if all have arrived: otherwise they would wait until the others make their first
/// call.
void Communicator::connect(at::Device device) {
  if (device.is_cpu() || !supports(device)) return;
  const int there = c10::impl::VirtualGuardImpl(device.type()).deviceCount();
  std::string why_not;
  if (device.index() >= there) {
    why_not = "nvx: device_id is " + device.str() + ", and this process sees " + std::to_string(there) +
              " of them. Next: give the number of one that it sees (torch.accelerator.device_count())";
  }
  try {
    TorchStore store = store_beside(group(), context.groups.store());
    if (!group().device().agree_to_connect(store, why_not)) return;
  } catch (const Error& error) {
    raise_interrupt();
    if (!why_not.empty()) throw_argument_error(error.what());
    C10_THROW_ERROR(DistBackendError, error.what());
  }
  issuer.connect(device);
}

std::shared_ptr<Group> Communicator::child(const c10::intrusive_ptr<c10d::Store>& store, const NvxOptions& options,
                                           int rank, int size) {
  c10::intrusive_ptr<c10d::Store> its_store;  // destroyed after the lock's release: not under the lock
  std::shared_ptr<Group> group;
  MutexLock lock(mutex_);
  if (const auto known = children_.find(options.group_name); known != children_.end()) {
    its_store = known->second.store.lock();
    if (its_store && its_store == store) group = known->second.group.lock();
  }
  lock.unlock();
  if (group && group->rank() == rank && group->size() == size && !group->closed()) return group;
  group = make_group(store, rank, size, options);
  lock.lock();
  std::erase_if(children_, [](const auto& known) { return known.second.group.expired(); });
  children_.insert_or_assign(options.group_name, Child{c10::weak_intrusive_ptr<c10d::Store>(store), group});
  return group;
}

bool Communicator::has_memory_of(c10::DeviceIndex device) {
  if (device < 0) return group().core().members.local_ranks() > 1 && group().core().shm().tensors().available();
  return issuer.kernels().may_serve(device) && has_pool(device);
}

void Communicator::wait_for_pending_works() {
  constexpr std::chrono::milliseconds kCheckInterval{50};
  issuer.kernels().flush_postponed();
  const auto all_ended = [&] {
    if (context.counts->pending.load(std::memory_order_acquire) == NvxWork::reporting_here(context.counts)) return true;
    if (group().lane().held_here()) raise(group().reentrant());
    group().mailbox().begin_timeout();
    group().lane().settle(kCheckInterval);
    group().mailbox().settle(kCheckInterval);  // returns at once if the group has failed
    group().check_interrupt();
    raise_interrupt();
    return false;
  };
  (void)poll_until(all_ended, Deadline());
}

void Communicator::abort() {
  if (context.origin.elsewhere()) return;
  context.listeners.report_abort(*context.muted);
  cancel("");
}

void Communicator::cancel(const std::string& why) {
  if (context.origin.elsewhere()) return;
  *context.muted = true;
  context.groups.abort(why);
  issuer.abort();                      // before flush_postponed(), whose lock a call of the delegate may hold
  issuer.kernels().flush_postponed();  // refuses the postponed operations, and fails their works
}

void Communicator::shut_down() {
  constexpr std::chrono::milliseconds kGrace{300};
  if (context.origin.elsewhere()) return;
  issuer.kernels().flush_postponed();
  issuer.drain(Deadline::after(group().timeout()), kGraceForProxies);
  // An operation that fails because this rank leaves, or a peer does, has not failed for the hooks.
  *context.muted = true;
  const Deadline moment = Deadline::after(kGrace);
  for (const auto& group : context.groups.all()) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(moment.end - Clock::now());
    group->lane().settle(std::max(std::chrono::milliseconds(0), left));
  }
  messages.settle(moment);
  issuer.finalize();
  context.groups.leave();
  raise_interrupt();
}

}  // namespace nvx
