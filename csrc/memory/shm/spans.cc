#include "memory/shm/spans.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "base/error.h"
#include "base/round_up.h"

namespace nvx {

SpanAllocator::SpanAllocator(size_t bytes, size_t page, std::string name, std::function<void(Span)> scrub)
    : page_(page), name_(std::move(name)), scrub_(std::move(scrub)) {
  if (bytes > 0) holes_[0] = bytes;
}

Span SpanAllocator::allocate(size_t bytes, size_t left) {
  MutexLock lock(mutex_);
  if (const Span span = take(bytes)) {
    size_t free = 0;
    for (const auto& hole : holes_) free += hole.second;
    if (free >= left) return span;
    give_back(span);
  }
  throw Error(Code::kSystem,
              "nvx: " + name_ + " is full (" + std::to_string(used_ >> 20) + " MiB in use" +
                  (left == 0 ? ")" : ", " + std::to_string(left >> 20) + " MiB kept for staging)"),
              "destroy groups that are no longer needed, and drop all references to them and to their works");
}

Span SpanAllocator::find(size_t bytes) {
  MutexLock lock(mutex_);
  return take(bytes);
}

void SpanAllocator::add(Span span) {
  MutexLock lock(mutex_);
  add_hole(span);
}

Span SpanAllocator::take(size_t bytes) {
  bytes = round_up(bytes, page_);
  free_deferred();
  for (auto hole = holes_.begin(); hole != holes_.end(); ++hole) {
    if (hole->second < bytes) continue;
    const Span span{hole->first, bytes};
    const size_t rest = hole->second - bytes;
    holes_.erase(hole);
    if (rest) holes_[span.offset + bytes] = rest;
    used_ += bytes;
    return span;
  }
  return {};
}

void SpanAllocator::free_when(Span span, std::function<bool()> released) {
  MutexLock lock(mutex_);
  deferred_.push_back({span, std::move(released)});
  free_deferred();
}

void SpanAllocator::free(Span span) {
  MutexLock lock(mutex_);
  give_back(span);
}

size_t SpanAllocator::used() {
  MutexLock lock(mutex_);
  free_deferred();
  return used_;
}

void SpanAllocator::free_deferred() {
  const auto open =
      std::partition(deferred_.begin(), deferred_.end(), [](const Deferred& deferred) { return !deferred.released(); });
  for (auto deferred = open; deferred != deferred_.end(); ++deferred) give_back(deferred->span);
  deferred_.erase(open, deferred_.end());
}

void SpanAllocator::give_back(Span span) {
  scrub_(span);
  used_ -= span.bytes;
  add_hole(span);
}

void SpanAllocator::add_hole(Span span) {
  auto [hole, added] = holes_.emplace(span.offset, span.bytes);
  const auto next = std::next(hole);
  if (next != holes_.end() && hole->first + hole->second == next->first) {
    hole->second += next->second;
    holes_.erase(next);
  }
  if (hole == holes_.begin()) return;
  const auto before = std::prev(hole);
  if (before->first + before->second == hole->first) {
    before->second += hole->second;
    holes_.erase(hole);
  }
}

}  // namespace nvx
