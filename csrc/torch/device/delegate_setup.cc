#include "torch/device/delegate_setup.h"

#include <c10/core/DeviceGuard.h>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>

#include <atomic>
#include <system_error>

#include "base/contain.h"
#include "base/mutex.h"
#include "memory/driver/thread_call.h"
#include "torch/call/work.h"

namespace nvx {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kEndTimeout{2000};    // for a backend's own abort or shutdown
constexpr milliseconds kPollSlice{20};       // between two checks whether the connecting must end
constexpr milliseconds kQueryInterval{200};  // between two queries of the store whether another rank cannot connect
constexpr char kSeparator = '\n';            // separates the two texts of a DelegateInfo
constexpr const char* kCannotKey = "cannot";

std::vector<std::byte> to_bytes(const std::string& text) {
  const auto* begin = reinterpret_cast<const std::byte*>(text.data());
  return {begin, begin + text.size()};
}

/// A peer's text, at most 400 characters of it, made printable for a message.
std::string shortened(std::string_view text) {
  constexpr size_t kMost = 400;
  return printable(std::string(text.substr(0, kMost)));
}

std::string_view view_of(const std::vector<std::byte>& text) {
  return {reinterpret_cast<const char*>(text.data()), text.size()};
}

/// A thread that waits in a store blocks all other users of the same connection, so this one gets its own.
c10::intrusive_ptr<c10d::Store> own(const c10::intrusive_ptr<c10d::Store>& store) {
  c10::intrusive_ptr<c10d::Store> clone;
  contain_and([&] { clone = store->clone(); }, [](const std::exception*) {});  // not every store supports clone()
  return clone ? clone : store;
}

void end_apart(const char* what, const DelegateSetup::Backend& backend, milliseconds span,
               void (c10d::Backend::*end)()) {
  contain(what, [&] {
    (void)call_on_thread<bool>(
        [what, backend, end] {
          contain(what, [&] { ((*backend).*end)(); });
          return true;
        },
        Deadline::after(span));
  });
}

}  // namespace

void abort_delegate(const DelegateSetup::Backend& backend) {
  end_apart("aborting a delegate", backend, kEndTimeout, &c10d::Backend::abort);
}

void shut_delegate_down(const DelegateSetup::Backend& backend, milliseconds span) {
  end_apart("shutting a delegate down", backend, span, &c10d::Backend::shutdown);
}

/// Makes and connects the backend on its own thread. If that call hangs, the owner may abandon the thread.
class DelegateSetup::Attempt {
 public:
  Attempt(c10::intrusive_ptr<c10d::Store> store, int rank, int size, at::Device device)
      : running_([made = made_, store = std::move(store), rank, size, device] {
          const c10::intrusive_ptr<c10d::Store> apart = own(store);
          if (made->aborted) return false;
          const Backend backend = make_delegate(apart, rank, size, device);
          {
            MutexLock lock(made->mutex);
            if (made->aborted) return false;
            made->backend = backend;
          }
          const c10::OptionalDeviceGuard on(device);
          backend->eagerConnectSingleDevice(device);
          return true;
        }) {}

  /// Whether it has succeeded by the deadline. Throws the thread's exception.
  bool done(Clock::time_point until) { return running_.get(until).has_value(); }
  Backend backend() const {
    MutexLock lock(made_->mutex);
    return made_->backend;
  }
  /// Aborts the backend as far as possible. A call that hangs keeps its thread.
  void cancel() const {
    MutexLock lock(made_->mutex);
    made_->aborted = true;
    const Backend made = made_->backend;
    lock.unlock();
    if (made) abort_delegate(made);
  }

 private:
  struct Made {
    Mutex mutex;
    Backend backend GUARDED_BY(mutex);
    std::atomic<bool> aborted{false};  // written under the mutex
  };
  const std::shared_ptr<Made> made_ = std::make_shared<Made>();
  ThreadCall<bool> running_;
};

DelegateSetup::DelegateSetup(Group& group, const Topology& topology, c10::intrusive_ptr<c10d::Store> store,
                             at::Device device)
    : group_(group),
      topology_(topology),
      torch_store_(std::move(store)),
      device_(device),
      span_(group.timeout().count() > 0 ? group.timeout() : std::chrono::hours(24)),
      prefix_("nvx/delegate/" + std::to_string(topology.ranks[0].nonce) + "/"),
      store_(torch_store_, group.size(), span_,
             [this] {
               check_wait();
               return false;
             }),
      bootstrap_(
          store_,
          {.prefix = key("talk"), .rank = group.rank(), .ranks = group.size(), .timeout = span_, .watch = [this](int) {
             check_wait();
           }}) {}

void DelegateSetup::check_wait() const {
  if (group_.check_interrupt()) throw Error(group_.failure());
  if (const Status now = group_.check_peers(); !now.ok()) throw Error(now);
  if (const Status alive = group_.check_alive(); !alive.ok()) throw Error(alive);
}

DelegateSetup::Backend DelegateSetup::agree() {
  const DelegateInfo info = local_info();
  why_not_ = refusal_of(bootstrap_.all_gather(to_bytes(info.gpu + kSeparator + info.why_not)));
  if (!why_not_.empty()) return nullptr;
  try {
    const Outcome mine = connect();
    why_not_ = refusal_of_connecting(bootstrap_.all_gather(to_bytes(std::string(1, char(mine.kind)) + mine.text)));
  } catch (const std::exception& error) {
    contain("reporting why a rank does not connect", [&] { bootstrap_.give_up(failure_of(error)); });
    if (backend_) abort_delegate(backend_);
    throw;
  }
  if (group_.rank() == 0) store_.remove(key(kCannotKey));  // all ranks have read it
  if (why_not_.empty()) return backend_;
  if (backend_) abort_delegate(backend_);
  return nullptr;
}

DelegateInfo DelegateSetup::local_info() const {
  DelegateInfo info;
  contain_and([&] { info = find_delegate(device_); },
              [&](const std::exception* error) { info.why_not = text_of(error); });
  return info;
}

/// Depends only on the data that the ranks sent, so the result is the same on all ranks.
std::string DelegateSetup::refusal_of(const std::vector<std::vector<std::byte>>& infos) const {
  std::vector<std::string> gpus;
  for (size_t r = 0; r < infos.size(); ++r) {
    const std::string_view info = view_of(infos[r]);
    const size_t separator = std::min(info.find(kSeparator), info.size());
    gpus.push_back(shortened(info.substr(0, separator)));
    if (separator + 1 < info.size()) return topology_.describe(int(r)) + ": " + shortened(info.substr(separator + 1));
    for (size_t other = 0; other < r; ++other) {
      if (topology_.host_of[r] != topology_.host_of[other] || gpus[r] != gpus[other]) continue;
      return topology_.describe(int(other)) + " and " + topology_.describe(int(r)) + " share the GPU " + gpus[r] +
             ", and NCCL needs one GPU for each rank";
    }
  }
  return "";
}

/// Depends only on its arguments, too. A rank whose connecting was aborted has no reason of its own to report.
std::string DelegateSetup::refusal_of_connecting(const std::vector<std::vector<std::byte>>& reports) const {
  std::string follower;
  for (size_t r = 0; r < reports.size(); ++r) {
    const std::string_view one = view_of(reports[r]);
    if (one.starts_with(char(Kind::kConnected))) continue;
    const std::string reason =
        topology_.describe(int(r)) + ": " + shortened(one.substr(std::min<size_t>(1, one.size())));
    if (!one.starts_with(char(Kind::kCancelled))) return reason;
    if (follower.empty()) follower = reason;
  }
  return follower;
}

DelegateSetup::Outcome DelegateSetup::connect() {
  std::unique_ptr<Attempt> attempt;
  try {
    attempt = std::make_unique<Attempt>(c10::make_intrusive<c10d::PrefixStore>(key("its"), torch_store_), group_.rank(),
                                        group_.size(), device_);
  } catch (const std::system_error&) {
    return cannot("the system cannot start a thread for it");
  }
  try {
    const Outcome outcome = await(*attempt);
    if (outcome.kind == Kind::kConnected) {
      backend_ = attempt->backend();
    } else {
      attempt->cancel();
    }
    return outcome;
  } catch (...) {
    attempt->cancel();
    throw;
  }
}

DelegateSetup::Outcome DelegateSetup::await(Attempt& attempt) {
  const Deadline deadline = Deadline::after(span_ / 2);
  Clock::time_point next_query = Clock::now() + kQueryInterval;
  for (;;) {
    bool done = false;
    std::string why;
    contain_and([&] { done = attempt.done(Clock::now() + kPollSlice); },
                [&](const std::exception* error) { why = text_of(error); });
    if (!why.empty()) return cannot(why);
    if (done) return {Kind::kConnected, ""};
    check_wait();
    if (deadline.passed(Clock::now()))
      return cannot("it was not connected within " + how_long(deadline) + ", half of the group's timeout");
    if (Clock::now() < next_query) continue;
    if (store_.get(key(kCannotKey), milliseconds(0))) return {Kind::kCancelled, "another rank cannot set it up"};
    next_query = Clock::now() + kQueryInterval;
  }
}

DelegateSetup::Outcome DelegateSetup::cannot(const std::string& why) {
  store_.set(key(kCannotKey), {uint8_t(Kind::kCannot)});
  return {Kind::kCannot, why};
}

}  // namespace nvx
