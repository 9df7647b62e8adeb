#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include <algorithm>
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
    for (std::chrono::nanoseconds pause = kFirstPause;; pause = std::min(2 * pause, longest_pause_)) {
      if (store_->check({key})) return store_->get(key);
      const auto left = end - Clock::now();
      if (left <= left.zero()) return std::nullopt;
      std::this_thread::sleep_for(std::min<std::chrono::nanoseconds>(pause, left));
    }
  }
  int64_t add(const std::string& key, int64_t n) override { return store_->add(key, n); }

 private:
  static constexpr std::chrono::microseconds kFirstPause{200}, kLongestPause{10'000};
  static constexpr std::chrono::microseconds kPauseOfARank{200};  // all of them ask: 5000 times a second together

  c10::intrusive_ptr<c10d::Store> store_;
  const std::chrono::nanoseconds longest_pause_;
};

}  // namespace nvx
