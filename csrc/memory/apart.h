#pragma once

#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <system_error>
#include <thread>

#include "base/deadline.h"

namespace nvx {

/// Runs what may never return on a thread of its own. Nothing if it has not returned by the deadline and a little more:
/// the thread is then left to itself, with all that work holds on to. Throws std::system_error where there is no
/// thread.
template <class Result>
std::optional<Result> run_apart(std::function<Result()> work, const Deadline& deadline) {
  constexpr std::chrono::milliseconds kGrace{250};  // for who has seen the deadline pass and says so
  struct Desk {
    std::mutex mutex;
    std::condition_variable end;
    std::optional<Result> result;
  };
  const auto desk = std::make_shared<Desk>();
  std::thread([desk, work = std::move(work)] {
    Result result = work();
    const std::lock_guard lock(desk->mutex);
    desk->result = std::move(result);
    desk->end.notify_all();
  }).detach();
  std::unique_lock lock(desk->mutex);
  desk->end.wait_until(lock, deadline.end + kGrace, [&] { return desk->result.has_value(); });
  return desk->result;
}

}  // namespace nvx
