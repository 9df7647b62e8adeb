#pragma once

#include <cstdint>

/// Chooses the route of a collective's tensors to the other ranks. No other code decides it. Pure, and a function of
/// facts that all ranks share, so all ranks take the same route.
namespace nvx {

enum class Route : uint8_t {
  kMemory,     ///< CPU tensors: the operation uses them in place
  kStaged,     ///< device tensors, copied as a whole to host memory and, after the operation there, back
  kChunks,     ///< the same for large tensors in chunks: one chunk is copied while the ranks are at another
  kHostProxy,  ///< over several hosts: kernels do the work on devices, and wait there for the host's transfers
  kKernels,    ///< nvx's kernels use device tensors in place
  kDelegate,   ///< another torch backend, NCCL, uses them in place
};

/// The facts that decide the route. A fact that was not queried yet is false: `proxies_serve` is queried only if
/// `may_be_proxied()` is true.
struct RouteFacts {
  bool on_device = false;        ///< the tensors are in the memory of an accelerator
  bool delegate_serves = false;  ///< `NVX_DELEGATE` names this collective, and the ranks have that backend for it
  bool kernels_serve = false;    ///< the ranks have agreed that kernels serve this device
  bool is_large = false;         ///< the result of `goes_in_chunks()`
  bool delegate_named = false;   ///< `NVX_DELEGATE` names anything
  bool proxies_serve = false;    ///< the ranks have agreed that kernels serve the ranks of each host, for proxies
};

/// A group with a delegate has no proxies: nothing would order their streams alike on all ranks, which could deadlock.
constexpr Route route_of(const RouteFacts& facts) {
  if (!facts.on_device) return Route::kMemory;
  if (facts.delegate_serves) return Route::kDelegate;
  if (facts.kernels_serve) return Route::kKernels;
  if (facts.proxies_serve && !facts.delegate_named) return Route::kHostProxy;
  return facts.is_large ? Route::kChunks : Route::kStaged;
}

/// Whether the route is kHostProxy if the ranks agree that proxies serve.
constexpr bool may_be_proxied(RouteFacts facts) {
  facts.proxies_serve = true;
  return route_of(facts) == Route::kHostProxy;
}

/// Whether the operation gets the tensors' own memory rather than that of host copies.
constexpr bool uses_tensors(Route route) { return route != Route::kStaged; }

/// Whether the data passes through host memory in parts.
constexpr bool goes_in_parts(Route route) { return route == Route::kChunks || route == Route::kHostProxy; }

}  // namespace nvx
