#pragma once

#include <torch/csrc/distributed/c10d/Store.hpp>

#include "base/deadline.h"
#include "group/store.h"

namespace nvx {

/// A c10d store, as the group sees it.
class TorchStore final : public Store {
 public:
  explicit TorchStore(c10::intrusive_ptr<c10d::Store> store) : store_(std::move(store)) {}

  void set(const std::string& key, const std::vector<uint8_t>& value) override { store_->set(key, value); }
  std::optional<std::vector<uint8_t>> get(const std::string& key, std::chrono::milliseconds span) override {
    const auto began = Clock::now();
    try {
      store_->wait({key}, span);
    } catch (...) {
      if (Clock::now() - began < span / 2) throw;  // that was no time-out
      return std::nullopt;
    }
    return store_->get(key);
  }
  int64_t add(const std::string& key, int64_t n) override { return store_->add(key, n); }

 private:
  c10::intrusive_ptr<c10d::Store> store_;
};

}  // namespace nvx
