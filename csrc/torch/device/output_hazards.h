#pragma once

#include <ATen/ATen.h>
#include <c10/core/Event.h>

#include <atomic>
#include <memory>
#include <vector>

#include "base/mutex.h"

namespace nvx {

/// Memory that pending results will be written to, or that a delegated collective uses. Operations that touch it before
/// anybody waited are ordered behind, as on one stream.
class OutputHazards {
 public:
  /// The results of one operation, and the memory that they will be written to.
  class Expected {
   public:
    Expected(const std::vector<at::Tensor>& outputs, c10::DeviceType device);
    /// The stream has been given all that brings them; or as much of it as it will get, if the operation has failed.
    void set_out(const c10::Stream& stream);
    /// Whether they have arrived.
    bool is_over();
    /// Has the stream wait for them. False, and it does not, if they have not set out.
    bool hold_back(const c10::Stream& stream);
    /// Whether some will be written to memory of these tensors.
    bool meets(const std::vector<at::Tensor>& tensors) const;

   private:
    struct Range {
      const char* begin;
      const char* end;
    };
    static std::vector<Range> ranges_of(const std::vector<at::Tensor>& tensors);

    const std::vector<Range> ranges_;
    c10::Event there_;  // recorded before is_out_ is set
    std::atomic<bool> is_out_{false};
  };

  std::shared_ptr<Expected> expect(const std::vector<at::Tensor>& outputs, c10::DeviceType device) EXCLUDES(mutex_);
  /// Whether some will be written to memory of these tensors.
  bool awaited_in(const std::vector<at::Tensor>& tensors) EXCLUDES(mutex_);
  /// Has the stream wait for those that will be written to memory of these tensors. False if some have not set out, so
  /// that it does not wait for them.
  bool follow(const std::vector<at::Tensor>& tensors, const c10::Stream& stream) EXCLUDES(mutex_);

 private:
  Mutex mutex_;
  std::vector<std::shared_ptr<Expected>> expected_ GUARDED_BY(mutex_);
};

}  // namespace nvx
