#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <atomic>
#include <string>

#include "base/mutex.h"
#include "torch/communicator.h"
#include "torch/core/interrupt.h"
#include "torch/core/origin.h"

namespace nvx {

/// The work that reconfigure() returns: the set-up of the next communicator.
class ReconfigureWork final : public c10d::Work {
 public:
  /// what: its name in errors.
  ReconfigureWork(int rank, std::string what);

  /// Raises the failure. A timeout of wait() ends only the wait; Ctrl-C aborts the set-up.
  bool wait(std::chrono::milliseconds timeout) override;
  /// torch calls this with the GIL, which a callback of the future needs.
  void synchronize() override {
    without_python_lock([this] { (void)wait(kNoTimeout); });
  }
  /// The caller waits, because there is no stream.
  void blockCurrentStream() override { (void)wait(kNoTimeout); }
  void abort() override { cancel(); }
  Tensors result() override { return {}; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override;

  /// Aborts the set-up, which then ends within a moment. Does nothing in a forked child.
  void cancel() EXCLUDES(made_mutex_);
  bool cancelled() const { return cancelled_.load(); }
  /// Holds the communicator that is set up and has yet to open its device: from now on cancel() aborts it. Returns
  /// false if cancel() was called first.
  bool hold_communicator(const std::shared_ptr<Communicator>& made) EXCLUDES(made_mutex_);
  /// Releases the communicator; from now on only its owner holds it. Returns false if the set-up has been aborted.
  bool release_communicator() EXCLUDES(made_mutex_);
  /// Call it once. null: success.
  void end(const std::exception_ptr& error);

 private:
  const Origin origin_;
  const std::string what_;
  const c10::intrusive_ptr<c10::ivalue::Future> future_;
  std::atomic<bool> cancelled_{false};  // written under the mutex
  Mutex made_mutex_;                    // never held while a group is ended or destroyed
  std::shared_ptr<Communicator> made_ GUARDED_BY(made_mutex_);
};

}  // namespace nvx
