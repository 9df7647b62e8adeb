#pragma once

#include <torch/version.h>

#include <torch/csrc/distributed/c10d/Backend.hpp>

namespace nvx {

/// What a group of nvx is made with: pg_options, and what torch says of the group.
struct NvxOptions final : c10d::Backend::Options {
  explicit NvxOptions(std::chrono::milliseconds timeout = kBackendDefaultTimeout)
      : c10d::Backend::Options("nvx", timeout) {}
  /// Of a group that was merged out of several: nobody knows which ranks of the job these are.
  bool ranks_unknown = false;
#ifdef C10D_BACKEND_HAS_HOOKS
  c10::intrusive_ptr<c10d::Backend::Options> clone() const override { return c10::make_intrusive<NvxOptions>(*this); }
#endif
};

}  // namespace nvx
