#pragma once

#include <c10/util/intrusive_ptr.h>
#include <torch/csrc/distributed/c10d/Store.hpp>

#include <map>
#include <memory>
#include <string>

#include "base/mutex.h"
#include "group/group.h"

namespace nvx {

/// The groups that were split off a group or merged. torch up to 2.13 asks once for each device type, with the same
/// store and name: all of these requests get one group.
class Children {
 public:
  /// The group that was made from this store and name, if it still exists.
  std::shared_ptr<Group> find(const std::string& name, const c10::intrusive_ptr<c10d::Store>& store) EXCLUDES(mutex_) {
    c10::intrusive_ptr<c10d::Store> its_store;  // destroyed after the lock's release: not under the lock
    MutexLock lock(mutex_);
    const auto known = children_.find(name);
    if (known != children_.end()) its_store = known->second.store.lock();
    std::shared_ptr<Group> there;
    if (its_store && its_store == store) there = known->second.group.lock();
    lock.unlock();
    return there;
  }
  void add(const std::string& name, const c10::intrusive_ptr<c10d::Store>& store, const std::shared_ptr<Group>& group)
      EXCLUDES(mutex_) {
    MutexLock lock(mutex_);
    std::erase_if(children_, [](const auto& known) { return known.second.group.expired(); });
    children_.insert_or_assign(name, Child{c10::weak_intrusive_ptr<c10d::Store>(store), group});
  }

 private:
  struct Child {
    c10::weak_intrusive_ptr<c10d::Store> store;
    std::weak_ptr<Group> group;
  };
  Mutex mutex_;
  std::map<std::string, Child> children_ GUARDED_BY(mutex_);  // by name
};

}  // namespace nvx
