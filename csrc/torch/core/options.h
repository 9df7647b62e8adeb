#pragma once

#include <torch/version.h>

#include <torch/csrc/distributed/c10d/Backend.hpp>

#include <optional>

#include "base/config.h"

namespace nvx {

/// torch makes timedelta.max, which means no timeout, a huge negative.
constexpr bool is_no_timeout(std::chrono::milliseconds given) { return given < -std::chrono::hours(24 * 1'000'000); }

/// The timeout of a wait(); 0: none. A negative one has passed already.
inline std::chrono::milliseconds span_of_wait(std::chrono::milliseconds given) {
  if (is_no_timeout(given)) return kNoTimeout;
  return given.count() < 0 ? std::chrono::milliseconds(1) : given;
}

/// The options of an nvx group: pg_options, and the properties that torch sets.
struct NvxOptions final : c10d::Backend::Options {
  explicit NvxOptions(std::chrono::milliseconds timeout = kBackendDefaultTimeout)
      : c10d::Backend::Options("nvx", timeout) {}
  /// For a group whose ranks' global ranks are unknown, such as one merged out of several, or a program's own.
  bool ranks_unknown = false;
  /// nvx replaces gloo in this group: see GlooRanks.
  bool replaces_gloo = false;
  /// Its barrier waits for no device, as gloo's, until the group has run collectives of device tensors.
  bool barrier_on_host = false;
  /// Instead of `NVX_KERNELS`.
  std::optional<Kernels> kernels;
  /// As `NVX_TUNE`; a key here counts instead of the same key there.
  std::string tune;
#ifdef C10D_BACKEND_HAS_HOOKS
  c10::intrusive_ptr<c10d::Backend::Options> clone() const override { return c10::make_intrusive<NvxOptions>(*this); }
#endif
};

}  // namespace nvx
