#pragma once

#include <cstdint>

/// By which of several routes a collective's tensors reach the other ranks. This is the one place that decides it:
/// pure, and of facts that all ranks know alike, so no rank takes a route that another one does not.
namespace nvx {

enum class Route : uint8_t {
  kMemory,     ///< tensors of the CPU: the operation uses them where they are
  kStaged,     ///< a device's tensors, copied to host memory as a whole: then as the CPU's, and copied back
  kChunks,     ///< the same for large ones, chunk by chunk, so that one chunk is copied while the ranks are at another
  kHostProxy,  ///< over several hosts: kernels do all that is done on devices, and wait there for what the hosts do
  kKernels,    ///< nvx's kernels use a device's tensors where they are
  kDelegate,   ///< a backend of torch's own, NCCL, uses them where they are
};

/// What the route is chosen by. A fact that has not been asked for yet is false: whether proxies serve is asked
/// only where may_be_proxied() says that the answer matters.
struct RouteFacts {
  bool on_device = false;        ///< the tensors are in the memory of an accelerator
  bool delegate_serves = false;  ///< NVX_DELEGATE names this collective, and the ranks have that backend for it
  bool kernels_serve = false;    ///< the ranks have agreed that kernels serve this device
  bool is_large = false;         ///< as goes_in_chunks() says
  bool delegate_named = false;   ///< NVX_DELEGATE names anything
  bool proxies_serve = false;    ///< the ranks have agreed that kernels serve the ranks of each host, for proxies
};

/// There is no proxy in a group that has a delegate. They have streams of their own: nothing would give both one order
/// on all ranks, and they might wait for each other crosswise.
constexpr Route route_of(const RouteFacts& facts) {
  if (!facts.on_device) return Route::kMemory;
  if (facts.delegate_serves) return Route::kDelegate;
  if (facts.kernels_serve) return Route::kKernels;
  if (facts.proxies_serve && !facts.delegate_named) return Route::kHostProxy;
  return facts.is_large ? Route::kChunks : Route::kStaged;
}

/// Whether it depends on the ranks' answer that this is a proxy.
constexpr bool may_be_proxied(RouteFacts facts) {
  facts.proxies_serve = true;
  return route_of(facts) == Route::kHostProxy;
}

/// Whether the operation is told the memory of the tensors themselves, and not that of stand-ins.
constexpr bool uses_tensors(Route route) { return route != Route::kStaged; }

/// Whether it passes through host memory part by part.
constexpr bool goes_in_parts(Route route) { return route == Route::kChunks || route == Route::kHostProxy; }

}  // namespace nvx
