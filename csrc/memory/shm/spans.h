#pragma once

#include <cstddef>
#include <functional>
#include <map>
#include <string>
#include <vector>

#include "base/mutex.h"

namespace nvx {

/// A piece of a memory that is handed out in pieces.
struct Span {
  size_t offset = 0;
  size_t bytes = 0;
  explicit operator bool() const { return bytes != 0; }
};

/// The largest base page that Linux uses. Spans consist of whole ones, so two never share a page.
inline constexpr size_t kSpanPage = 65536;

/// A memory that is handed out in pieces.
class SpanSource {
 public:
  virtual ~SpanSource() = default;
  /// Throws Error when there is no room.
  virtual Span allocate(size_t bytes) = 0;
  virtual void free(Span span) = 0;
  /// Gives a span back once no peer can still touch it. Whether that is so, released() is asked now and at each later
  /// allocation.
  virtual void bury(Span span, std::function<bool()> released) = 0;
};

/// Which pieces of a memory are in use, the buried ones too.
class SpanBook {
 public:
  /// page: spans begin and end at its multiples. scrub: called with each span that comes back, before it is handed out
  /// again. name: what the memory is called in the error that says that it is full.
  SpanBook(size_t bytes, size_t page, std::string name, std::function<void(Span)> scrub);

  Span allocate(size_t bytes) EXCLUDES(mutex_);
  /// As allocate(), but gives an empty span where there is no room.
  Span find(size_t bytes) EXCLUDES(mutex_);
  /// Adds a span by which the memory has become larger.
  void add(Span span) EXCLUDES(mutex_);
  void bury(Span span, std::function<bool()> released) EXCLUDES(mutex_);
  void free(Span span) EXCLUDES(mutex_);
  size_t used() EXCLUDES(mutex_);

 private:
  struct Grave {
    Span span;
    std::function<bool()> released;
  };

  void sweep() REQUIRES(mutex_);
  Span take(size_t bytes) REQUIRES(mutex_);
  void give_back(Span span) REQUIRES(mutex_);
  void open_hole(Span span) REQUIRES(mutex_);

  const size_t page_;
  const std::string name_;
  const std::function<void(Span)> scrub_;
  Mutex mutex_;
  std::map<size_t, size_t> holes_ GUARDED_BY(mutex_);  // offset -> bytes
  std::vector<Grave> graves_ GUARDED_BY(mutex_);
  size_t used_ GUARDED_BY(mutex_) = 0;
};

}  // namespace nvx
