#pragma once

#include <ATen/ATen.h>
#include <c10/core/Event.h>

#include <atomic>
#include <memory>
#include <vector>

#include "base/mutex.h"

namespace nvx {

/// Where results will be that are on their way through host memory, and what was handed over uses: an operation that
/// reads or writes there, before anybody has waited for that, comes behind it, as it would on a stream.
class Results {
 public:
  /// Those of one operation.
  class Expected {
   public:
    Expected(const std::vector<at::Tensor>& outputs, c10::DeviceType device);
    /// The stream has been given all that brings them, or what there will be of it.
    void set_out(const c10::Stream& stream);
    bool is_over();
    /// The stream waits for them. False where that is not set out yet.
    bool hold_back(const c10::Stream& stream);
    bool meets(const std::vector<at::Tensor>& tensors) const;

   private:
    struct Range {
      const char* begin;
      const char* end;
    };
    static std::vector<Range> ranges_of(const std::vector<at::Tensor>& tensors);

    const std::vector<Range> ranges_;
    c10::Event there_;  // recorded before is_out_
    std::atomic<bool> is_out_{false};
  };

  std::shared_ptr<Expected> expect(const std::vector<at::Tensor>& outputs, c10::DeviceType device) EXCLUDES(mutex_);
  /// Whether some are on their way to where these are.
  bool awaited_in(const std::vector<at::Tensor>& tensors) EXCLUDES(mutex_);
  /// The stream waits for those that are on their way there. False where it cannot for some, as they are not set out.
  bool follow(const std::vector<at::Tensor>& tensors, const c10::Stream& stream) EXCLUDES(mutex_);

 private:
  Mutex mutex_;
  std::vector<std::shared_ptr<Expected>> expected_ GUARDED_BY(mutex_);
};

}  // namespace nvx
