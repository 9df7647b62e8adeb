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

#include "base/contain.h"
#include "base/deadline.h"
#include "base/error.h"
#include "base/text.h"
#include "memory/driver/relaxed_capture_guard.h"

/// Calls that may never return. Each runs on a thread of its own. On a timeout the thread is abandoned together with
/// everything that it may still access, so a call must own all that it captures.
namespace nvx {

/// Work that runs on a thread of its own.
template <class Result>
class ThreadCall {
 public:
  /// Throws std::system_error if no thread can be started.
  explicit ThreadCall(std::function<Result()> work) {
    std::thread([all = shared_, work = std::move(work)]() mutable {
      const RelaxedCaptureGuard relaxed;
      const auto shared = std::move(all);  // a result that is not fetched is destroyed here, under the guard
      std::optional<Result> result;
      std::exception_ptr thrown;
      try {
        result = work();
      } catch (abi::__forced_unwind&) {
        throw;  // pthread_exit() and cancellation unwind this way and must not be stopped
      } catch (...) {
        thrown = std::current_exception();
      }
      work = nullptr;  // release its captures before the result is visible
      const std::lock_guard lock(shared->mutex);
      shared->result = std::move(result);
      shared->thrown = std::move(thrown);
      shared->end.notify_all();
    }).detach();
  }

  /// Returns the result of the work, or rethrows its exception; only the first call gets it. Returns nothing if the
  /// work does not end by `until`. A result that is never fetched is destroyed by the thread.
  std::optional<Result> get(Clock::time_point until) {
    std::unique_lock lock(shared_->mutex);
    shared_->end.wait_until(lock, until, [&] { return shared_->result.has_value() || shared_->thrown; });
    if (shared_->thrown) std::rethrow_exception(std::exchange(shared_->thrown, nullptr));
    return std::move(shared_->result);
  }

 private:
  struct Shared {
    std::mutex mutex;
    std::condition_variable end;
    std::optional<Result> result;
    std::exception_ptr thrown;
  };
  const std::shared_ptr<Shared> shared_ = std::make_shared<Shared>();
};

/// Returns the result of the work, or rethrows its exception. Returns nothing if the work does not end by the deadline
/// plus a grace period; its thread then destroys a later result. Throws std::system_error if no thread can be started.
template <class Result>
std::optional<Result> call_on_thread(std::function<Result()> work, const Deadline& deadline) {
  constexpr std::chrono::milliseconds kGrace{250};  // for work that notices the deadline itself and reports it
  return ThreadCall<Result>(std::move(work))
      .get(deadline.end == Clock::time_point::max() ? deadline.end : deadline.end + kGrace);
}

/// Like call_on_thread(), for a caller that needs the result. Throws Error if there is none, with kTimeout if the work
/// does not return in time: "<what> did not return within 2000 ms".
template <class Result>
Result call_or_throw(const std::string& what, const Deadline& deadline, std::function<Result()> work) {
  try {
    if (auto result = call_on_thread(std::move(work), deadline)) return *std::move(result);
  } catch (const std::system_error& error) {
    throw system_error("cannot start a thread for " + what, error.code().value());
  }
  throw Error(Code::kTimeout, "nvx: " + what + " did not return within " + how_long(deadline));
}

/// Destroys an object on a thread of its own, because the driver may hang in that, and waits for it. Logs a failure.
template <class T>
void destroy_on_thread(const char* doing, T object, std::chrono::milliseconds timeout) {
  contain(doing, [&] {
    (void)call_or_throw<bool>("the driver", Deadline::after(timeout),
                              [last = std::make_shared<T>(std::move(object))]() mutable { return last.reset(), true; });
  });
}

/// An object that the first caller creates. Concurrent callers wait for it. If the creation fails, the next caller
/// tries again, but never while an earlier attempt has not returned.
template <class T>
class CreatedOnce {
 public:
  /// Throws Error: that of `make`, or kTimeout. After a timeout all callers fail at once until that attempt returns.
  T& get(const std::string& what, const Deadline& deadline, const std::function<std::unique_ptr<T>()>& make) {
    std::unique_lock lock(state_->mutex);
    if (state_->object) return *state_->object;
    if (state_->making && state_->late) throw Error(Code::kTimeout, "nvx: " + what + " has still not returned");
    if (!state_->making) begin(what, make);
    if (!state_->end.wait_until(lock, deadline.end, [&] { return !state_->making; })) {
      state_->late = true;
      throw Error(Code::kTimeout, "nvx: " + what + " did not return within " + how_long(deadline));
    }
    if (!state_->object) throw Error(state_->failure->status());  // each caller throws its own copy
    return *state_->object;
  }

  /// Null until the object exists.
  T* made() const {
    const std::lock_guard lock(state_->mutex);
    return state_->object.get();
  }

 private:
  struct State {
    std::mutex mutex;
    std::condition_variable end;
    std::unique_ptr<T> object;
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
      object = std::move(made);
      failure = std::move(failed);
      making = false;
      end.notify_all();
    }
  };

  void begin(const std::string& what, const std::function<std::unique_ptr<T>()>& make) {
    try {
      const ThreadCall<bool> call([state = state_, make]() mutable { return state->finish(std::move(make)), true; });
    } catch (const std::system_error& error) {
      throw system_error("cannot start a thread for " + what, error.code().value());
    }
    state_->making = true;
    state_->late = false;
  }

  const std::shared_ptr<State> state_ = std::make_shared<State>();
};

}  // namespace nvx
