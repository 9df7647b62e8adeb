#pragma once

#include <torch/csrc/distributed/c10d/Work.hpp>

#include <atomic>
#include <string>

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
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }

  /// For who has the ranks meet, which then ends within a moment, and for who wants to know.
  void call_off() { called_off_.store(true); }
  bool called_off() const { return called_off_.load(); }
  /// Called once. null: it ended well.
  void end(const std::exception_ptr& error);

 private:
  const std::string what_;
  const c10::intrusive_ptr<c10::ivalue::Future> future_;
  std::atomic<bool> called_off_{false};
};

}  // namespace nvx
