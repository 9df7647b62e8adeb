#pragma once

#include <cxxabi.h>

#include <condition_variable>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "base/deadline.h"
#include "base/error.h"
#include "memory/driver/beside_captures.h"

/// Calls that may never return. Each runs on a thread of its own. When its time is up, the thread is left to itself
/// with everything that it may still touch, so a call must own all that it captures.
namespace nvx {

/// How long a deadline gave: "2000 ms".
inline std::string how_long(const Deadline& deadline) {
  return std::to_string(std::chrono::duration_cast<std::chrono::milliseconds>(deadline.end - deadline.start).count()) +
         " ms";
}

/// Work that has been begun on a thread of its own.
template <class Result>
class Apart {
 public:
  /// Throws std::system_error where there is no thread.
  explicit Apart(std::function<Result()> work) {
    std::thread([desk = desk_, work = std::move(work)]() mutable {
      const BesideCaptures beside;
      std::optional<Result> result;
      std::exception_ptr thrown;
      try {
        result = work();
      } catch (abi::__forced_unwind&) {
        throw;  // the end of a thread is no exception, and must not be stopped
      } catch (...) {
        thrown = std::current_exception();
      }
      work = nullptr;  // who has the result need not wait for what the work held
      const std::lock_guard lock(desk->mutex);
      desk->result = std::move(result);
      desk->thrown = std::move(thrown);
      desk->end.notify_all();
    }).detach();
  }

  /// What work returns or throws; only the first call gets it. Nothing if it has done neither by then. A result that is
  /// never fetched goes with the thread.
  std::optional<Result> get(Clock::time_point until) {
    std::unique_lock lock(desk_->mutex);
    desk_->end.wait_until(lock, until, [&] { return desk_->result.has_value() || desk_->thrown; });
    if (desk_->thrown) std::rethrow_exception(std::exchange(desk_->thrown, nullptr));
    return std::move(desk_->result);
  }

 private:
  struct Desk {
    std::mutex mutex;
    std::condition_variable end;
    std::optional<Result> result;
    std::exception_ptr thrown;
  };
  const std::shared_ptr<Desk> desk_ = std::make_shared<Desk>();
};

/// What work returns or throws. Nothing if it has done neither by the deadline and a little more; a later result goes
/// with its thread. Throws std::system_error where there is no thread.
template <class Result>
std::optional<Result> run_apart(std::function<Result()> work, const Deadline& deadline) {
  constexpr std::chrono::milliseconds kGrace{250};  // for work that sees the deadline pass itself, and says so
  return Apart<Result>(std::move(work))
      .get(deadline.end == Clock::time_point::max() ? deadline.end : deadline.end + kGrace);
}

/// The same for a caller that needs the result. Throws Error where there is none; it is of Code::kTimeout if the work
/// has not returned in time: "<what> did not return within 2000 ms".
template <class Result>
Result demand_apart(const std::string& what, const Deadline& deadline, std::function<Result()> work) {
  try {
    if (auto result = run_apart(std::move(work), deadline)) return *std::move(result);
  } catch (const std::system_error&) {
    throw Error(Code::kSystem, "nvx: " + what + ": the system gives no thread for it");
  }
  throw Error(Code::kTimeout, "nvx: " + what + " did not return within " + how_long(deadline));
}

/// One thing, made by the first who asks for it. Whoever asks meanwhile waits for it. If making it fails, the next who
/// asks tries again, but never while an attempt has not returned.
template <class T>
class MadeApart {
 public:
  /// Throws Error: what make has thrown, or kTimeout as above. After a timeout whoever asks is told so at once, until
  /// that attempt returns at last.
  T& get(const std::string& what, const Deadline& deadline, const std::function<std::unique_ptr<T>()>& make) {
    std::unique_lock lock(state_->mutex);
    if (state_->thing) return *state_->thing;
    if (state_->making && state_->late) throw Error(Code::kTimeout, "nvx: " + what + " has not returned for long");
    if (!state_->making) begin(what, make);
    if (!state_->end.wait_until(lock, deadline.end, [&] { return !state_->making; })) {
      state_->late = true;
      throw Error(Code::kTimeout, "nvx: " + what + " did not return within " + how_long(deadline));
    }
    if (!state_->thing) throw Error(state_->failure->status());  // each thrower its own
    return *state_->thing;
  }

  /// Null until it is made.
  T* made() const {
    const std::lock_guard lock(state_->mutex);
    return state_->thing.get();
  }

 private:
  struct State {
    std::mutex mutex;
    std::condition_variable end;
    std::unique_ptr<T> thing;
    std::optional<Error> failure;
    bool making = false;
    bool late = false;

    void finish(std::function<std::unique_ptr<T>()> make) {
      std::unique_ptr<T> made;
      std::optional<Error> failed;
      try {
        made = make();
      } catch (const Error& error) {
        failed = error;
      } catch (const std::exception& error) {
        failed = Error(Code::kSystem, std::string("nvx: ") + error.what());
      }
      make = nullptr;
      const std::lock_guard lock(mutex);
      thing = std::move(made);
      failure = std::move(failed);
      making = false;
      end.notify_all();
    }
  };

  void begin(const std::string& what, const std::function<std::unique_ptr<T>()>& make) {
    try {
      std::thread([state = state_, make]() mutable {
        const BesideCaptures beside;
        state->finish(std::move(make));
      }).detach();
    } catch (const std::system_error&) {
      throw Error(Code::kSystem, "nvx: " + what + ": the system gives no thread for it");
    }
    state_->making = true;
    state_->late = false;
  }

  const std::shared_ptr<State> state_ = std::make_shared<State>();
};

}  // namespace nvx
