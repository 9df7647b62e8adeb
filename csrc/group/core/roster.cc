#include "group/core/roster.h"

#include "base/contain.h"
#include "base/per_process.h"

namespace nvx {
namespace {

thread_local bool telling = false;

}  // namespace

Roster& Roster::here() { return of_this_process<Roster>(); }

void Roster::join(FailureState& group) {
  MutexLock lock(mutex_);
  groups_.push_back(&group);
}

void Roster::leave(FailureState& group) {
  MutexLock lock(mutex_);
  std::erase(groups_, &group);
}

bool Roster::is_telling() { return telling; }

void Roster::tell_others(const FailureState& of, const std::function<void(FailureState&)>& tell) {
  if (telling) return;
  MutexLock lock(mutex_);
  telling = true;
  for (FailureState* const group : groups_) {
    if (group != &of) contain("telling another group of a failure", [&] { tell(*group); });
  }
  telling = false;
}

}  // namespace nvx
