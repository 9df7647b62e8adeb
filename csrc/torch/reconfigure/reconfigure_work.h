#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <atomic>
#include <string>

#include "base/mutex.h"
#include "torch/backend.h"
#include "torch/core/origin.h"

namespace nvx {

/// What reconfigure() returns while the ranks meet.
class ReconfigureWork final : public c10d::Work {
 public:
  /// what: as it is called in errors.
  ReconfigureWork(int rank, std::string what);

  /// Raises what has gone wrong. A timeout of its own ends only the waiting; Ctrl-C calls the meeting off.
  bool wait(std::chrono::milliseconds timeout) override;
  void synchronize() override { (void)wait(kNoTimeout); }
  /// The caller waits, as there is no stream.
  void blockCurrentStream() override { (void)wait(kNoTimeout); }
  void abort() override { call_off(); }
  std::vector<at::Tensor> result() override { return {}; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

  /// For who has the ranks meet, which then ends within a moment, and for who wants to know. Nothing in a forked child,
  /// and nothing once the group is handed over.
  void call_off() EXCLUDES(made_mutex_);
  bool called_off() const { return called_off_.load(); }
  /// The group whose ranks have met, and which has yet to open its device: whoever calls the meeting off now calls the
  /// group off. False where that has been done before.
  bool take_in(const c10::intrusive_ptr<ProcessGroupNVX>& made) EXCLUDES(made_mutex_);
  /// Lets go of the group, which is its owner's alone then. False where the meeting has been called off.
  bool hand_over() EXCLUDES(made_mutex_);
  /// Called once. null: it ended well.
  void end(const std::exception_ptr& error);

 private:
  const Origin origin_;
  const std::string what_;
  const c10::intrusive_ptr<c10::ivalue::Future> future_;
  std::atomic<bool> called_off_{false};  // written under the mutex
  Mutex made_mutex_;                     // never held while a group is ended or goes
  c10::intrusive_ptr<ProcessGroupNVX> made_ GUARDED_BY(made_mutex_);
};

}  // namespace nvx
