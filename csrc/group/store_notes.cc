#include "group/store_notes.h"

#include <algorithm>
#include <thread>

#include "base/words.h"

namespace nvx {
namespace {

/// How many ranks have given up.
std::string count_in(const std::string& prefix) { return prefix + "failures"; }

std::string note_in(const std::string& prefix) { return prefix + "failure"; }

}  // namespace

void leave_note(Store& store, const std::string& prefix, const std::string& why) {
  if (store.add(count_in(prefix), 1) == 1) store.set(note_in(prefix), {why.begin(), why.end()});
}

std::optional<std::string> read_note(Store& store, const std::string& prefix) {
  constexpr std::chrono::milliseconds kSpan{200};  // the first one to count writes its note at once
  constexpr size_t kLongest = 1024;
  if (store.add(count_in(prefix), 0) == 0) return std::nullopt;
  const auto note = store.get(note_in(prefix), kSpan);
  if (!note) return std::nullopt;
  return printable({note->begin(), note->begin() + ptrdiff_t(std::min(note->size(), kLongest))});
}

void await_notes(Store& store, const std::string& prefix, int64_t ranks, std::chrono::milliseconds most) {
  constexpr std::chrono::milliseconds kPause{20};
  for (auto left = most; left.count() > 0 && store.add(count_in(prefix), 0) < ranks; left -= kPause) {
    std::this_thread::sleep_for(kPause);
  }
}

}  // namespace nvx
