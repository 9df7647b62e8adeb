#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <algorithm>
#include <string>
#include <thread>

#include "base/deadline.h"
#include "group/store.h"

namespace nvx {

/// A c10d store, as the group sees it.
class TorchStore final : public Store {
 public:
  TorchStore(c10::intrusive_ptr<c10d::Store> store, int ranks)
      : store_(std::move(store)), longest_pause_(std::max(kLongestPause, ranks * kPauseOfARank)) {}

  void set(const std::string& key, const std::vector<uint8_t>& value) override { store_->set(key, value); }
  std::optional<std::vector<uint8_t>> get(const std::string& key, std::chrono::milliseconds span) override {
    // Not Store::wait(): where that runs out of time, torch writes lines to stderr, and here it often does.
    const auto end = Clock::now() + span;
    if (key != asked_for_) {
      asked_for_ = key;
      pause_ = kFirstPause;
      next_ = Clock::now();
    }
    for (;;) {
      if (Clock::now() >= next_) {
        if (store_->check({key})) return store_->get(key);
        next_ = Clock::now() + pause_;
        pause_ = std::min(2 * pause_, longest_pause_);
      }
      if (Clock::now() >= end) return std::nullopt;
      std::this_thread::sleep_until(std::min<Clock::time_point>(next_, end));
    }
  }
  int64_t add(const std::string& key, int64_t n) override { return store_->add(key, n); }
  void remove(const std::string& key) override {
    try {
      store_->deleteKey(key);
    } catch (const std::exception&) {  // not every store can
    }
  }

 private:
  static constexpr std::chrono::microseconds kFirstPause{200}, kLongestPause{10'000};
  static constexpr std::chrono::microseconds kPauseOfARank{200};  // so all together ask 5000 times a second

  c10::intrusive_ptr<c10d::Store> store_;
  const std::chrono::nanoseconds longest_pause_;
  std::string asked_for_;  // the key that is waited for, over several calls
  std::chrono::nanoseconds pause_{kFirstPause};
  Clock::time_point next_{};
};

}  // namespace nvx
