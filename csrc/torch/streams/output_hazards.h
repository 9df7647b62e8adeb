#pragma once

#include <ATen/ATen.h>

#include <atomic>
#include <memory>
#include <vector>

#include "base/mutex.h"
#include "torch/core/tensors.h"
#include "torch/streams/pooled_event.h"

namespace nvx {

/// Memory that pending results will be written to, or that a delegated collective uses. An operation that touches it
/// before the caller has waited is ordered after that write or use, as on one stream.
class OutputHazards {
 public:
  /// The results of one operation, and the memory that they will be written to.
  class Expected {
   public:
    explicit Expected(const Tensors& outputs) : spans_(spans_of(outputs)) {}
    /// The work that produces the results is on the stream; if the operation has failed, as much of it as will ever be.
    void set_out(const c10::Stream& stream);
    bool is_over() { return is_out_.load(std::memory_order_acquire) && there_.query(); }
    /// Makes the stream wait for the results. Returns false, without a wait, if the work that produces them is not on
    /// its stream yet.
    bool block(const c10::Stream& stream);
    /// Whether some results will be written to memory of these tensors.
    bool overlaps(const Tensors& tensors) const;

   private:
    static std::vector<MemorySpan> spans_of(const Tensors& tensors);

    const std::vector<MemorySpan> spans_;
    PooledEvent there_;  // recorded before `is_out_` is set, so a thread that loads true finds it recorded
    std::atomic<bool> is_out_{false};
  };

  std::shared_ptr<Expected> expect(const Tensors& outputs) EXCLUDES(mutex_);
  /// Whether some results will be written to memory of these tensors.
  bool awaited_in(const Tensors& tensors) EXCLUDES(mutex_);
  /// Makes the stream wait for results that will be written to memory of these tensors. Returns false if the work that
  /// produces some of them is not on its stream yet; the stream does not wait for those.
  bool follow(const Tensors& tensors, const c10::Stream& stream) EXCLUDES(mutex_);

 private:
  /// Calls act for the results that will be written to memory of these tensors, and drops those that have arrived.
  template <class Act>
  void for_each_in(const Tensors& tensors, const Act& act) EXCLUDES(mutex_);

  Mutex mutex_;
  std::vector<std::shared_ptr<Expected>> expected_ GUARDED_BY(mutex_);
};

}  // namespace nvx
