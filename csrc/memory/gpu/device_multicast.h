#pragma once

#include <functional>
#include <memory>
#include <utility>

#include "memory/gpu/device_arena.h"

namespace nvx {

class MulticastObject;

/// A part of this rank's arena that is bound to a multicast object, with a part of each other rank's.
class MulticastSpan {
 public:
  /// `offset`: of the part in the arena. Parts are aligned, so the span around it is larger.
  MulticastSpan(DeviceArena& arena, Span span, size_t offset, std::shared_ptr<MulticastObject> object)
      : arena_(arena), span_(span), offset_(offset), object_(std::move(object)) {}
  /// Requires that no kernel of any rank accesses the memory any more.
  ~MulticastSpan() {
    release_when([] { return true; });
  }
  MulticastSpan(const MulticastSpan&) = delete;

  /// The address at which this device reaches the parts of all ranks.
  DevicePtr all() const;
  DevicePtr mine() const { return arena_.at(offset_); }
  size_t bytes() const;

  /// Releases the memory once `gone` holds: then no kernel of a peer accesses it. Called by any thread, at any time.
  void release_when(std::function<bool()> gone);
  /// Keeps the memory until the process ends, because a kernel may still access it.
  void keep();

 private:
  DeviceArena& arena_;
  Span span_;
  const size_t offset_;
  std::shared_ptr<MulticastObject> object_;
};

}  // namespace nvx
