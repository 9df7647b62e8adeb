#pragma once

#include <deque>
#include <memory>
#include <string>

#include "base/deadline.h"
#include "torch/core/store.h"

namespace nvx {

/// Detects ranks that use gloo itself, without NVX_AS, in a group in which nvx replaces gloo here. They would wait
/// until their timeout, so this rank's entry in the store, where gloo reads its address, makes gloo fail at once.
class GlooRanks {
 public:
  /// Writes this rank's entry. `store` is the one that torch gives the backend.
  GlooRanks(std::shared_ptr<TorchStore> store, std::string group, int rank, int size);
  /// For the waits of set-up, which call it repeatedly. Throws Error if a rank uses gloo itself.
  void check();
  /// Removes this rank's entry. Call when all ranks have arrived; a rank that reads it meanwhile does not wait.
  void leave();

 private:
  const std::shared_ptr<TorchStore> store_;
  const std::string group_;
  const int rank_, size_;
  std::deque<int> others_;  // whose use of nvx is not proved; empty: none need be checked
  const Clock::duration pause_;
  Clock::time_point next_;
};

}  // namespace nvx
