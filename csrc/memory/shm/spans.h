#pragma once

#include <cstddef>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "base/mutex.h"

namespace nvx {

struct Span {
  size_t offset = 0;
  size_t bytes = 0;
  explicit operator bool() const { return bytes != 0; }
};

/// The largest base page that Linux uses. Spans are multiples of it, so two spans never share a page.
inline constexpr size_t kSpanPage = 65536;

class SpanAllocator {
 public:
  /// `page`: spans begin and end at multiples of it. `scrub`: called with each freed span before it is allocated again.
  /// `name`: the name of the memory in error texts.
  SpanAllocator(size_t bytes, size_t page, std::string name, std::function<void(Span)> scrub);

  /// Throws Error if there is no space, or would be less than `left` bytes afterwards.
  Span allocate(size_t bytes, size_t left = 0) EXCLUDES(mutex_);
  /// Like allocate(), but returns an empty span if there is no space.
  Span find(size_t bytes) EXCLUDES(mutex_);
  /// Adds a span by which the memory has grown.
  void add(Span span) EXCLUDES(mutex_);
  /// Frees a span once no peer can access it: calls released() now and at each later allocation until it is true.
  void free_when(Span span, std::function<bool()> released) EXCLUDES(mutex_);
  void free(Span span) EXCLUDES(mutex_);
  size_t used() EXCLUDES(mutex_);

 private:
  struct Deferred {
    Span span;
    std::function<bool()> released;
  };

  void free_deferred() REQUIRES(mutex_);
  Span take(size_t bytes) REQUIRES(mutex_);
  void give_back(Span span) REQUIRES(mutex_);
  void add_hole(Span span) REQUIRES(mutex_);

  const size_t page_;
  const std::string name_;
  const std::function<void(Span)> scrub_;
  Mutex mutex_;
  std::map<size_t, size_t> holes_ GUARDED_BY(mutex_);  // offset -> bytes
  std::vector<Deferred> deferred_ GUARDED_BY(mutex_);
  size_t used_ GUARDED_BY(mutex_) = 0;
};

}  // namespace nvx
