#include "group/setup/store_notes.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <span>
#include <thread>

#include "base/contain.h"
#include "base/text.h"
#include "group/setup/topology.h"

namespace nvx {
namespace {

/// The key of the number of ranks that have given up.
std::string count_in(const std::string& prefix) { return prefix + "failures"; }

std::string note_in(const std::string& prefix) { return prefix + "failure"; }

constexpr const char* kWorldSize = "nvx/world_size";

}  // namespace

void leave_note(Store& store, const std::string& prefix, const Failure& why) {
  if (store.is_lost()) return;
  const Store::Hurry hurry(store);
  if (store.add(count_in(prefix), 1) != 1) return;
  const FailureNote note = FailureNote::of(why);
  const auto* begin = reinterpret_cast<const uint8_t*>(note.used().data());
  store.set(note_in(prefix), {begin, begin + note.used().size()});
}

std::optional<Failure> read_note(Store& store, const std::string& prefix, int ranks) {
  constexpr std::chrono::milliseconds kSpan{200};  // the first rank to count writes its note at once
  if (store.add(count_in(prefix), 0) == 0) return std::nullopt;
  const auto note = store.get(note_in(prefix), kSpan);
  if (!note) return std::nullopt;
  const std::string text(reinterpret_cast<const char*>(note->data()), std::min(note->size(), FailureNote::kMostText));
  if (text.starts_with("rank "))
    return Failure{
        .code = Code::kPeerFailed, .cause = printable(text), .advice = see_log_of("that rank"), .reported = true};
  return FailureNote::read(std::as_bytes(std::span(*note)), ranks).value_or(unreadable_note("a rank"));
}

void publish_world_size(Store& store, int rank, int size, const std::string& host) {
  const std::string place = "pid " + std::to_string(getpid()) + ", host " + own_host_name(host);
  const std::string text = std::to_string(rank) + " " + described(of_rank(rank), place) +
                           " was started with a world size of " + std::to_string(size);
  contain_and([&] { store.set(kWorldSize, {text.begin(), text.end()}); }, [](const std::exception*) {});
}

std::optional<OtherWorld> published_world_size(Store& store) {
  constexpr size_t kMost = 200;
  const auto value = store.get(kWorldSize, std::chrono::milliseconds(0));
  if (!value) return std::nullopt;
  const std::string text(value->begin(), value->begin() + ptrdiff_t(std::min(value->size(), kMost)));
  const size_t space = text.find(' ');
  if (space == std::string::npos) return std::nullopt;
  return OtherWorld{std::atoi(text.c_str()), printable(text.substr(space + 1))};
}

void await_notes(Store& store, const std::string& prefix, int64_t ranks, std::chrono::milliseconds most) {
  constexpr std::chrono::milliseconds kPause{20};
  for (auto left = most; left.count() > 0 && store.add(count_in(prefix), 0) < ranks; left -= kPause) {
    std::this_thread::sleep_for(kPause);
  }
}

}  // namespace nvx
