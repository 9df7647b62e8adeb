#pragma once

#include <memory>
#include <string>
#include <vector>

#include "kernel/gpu/launch_cuda.h"
#include "support/pools.h"
#include "support/simulated_device.h"
#include "support/ways.h"

/// Collectives of the device algorithms on threads.
namespace nvx::test {

using kernel::Job;

inline constexpr uint64_t kTimeout = 60'000'000'000;

/// Which of a rank's tensors are in its pool.
struct Placed {
  bool in = false, out = false;
};

/// One rank's side of several operations that one kernel runs.
class Batch {
 public:
  /// `pools`: this rank's is reset.
  Batch(SimulatedDevices& devices, int rank, Pools* pools = nullptr) : devices_(devices), rank_(rank), pools_(pools) {
    if (pools) pools->begin_anew(rank);
  }

  void add(DeviceAlgorithm algorithm, const Spec& spec, uint64_t timeout_ns = kTimeout, Placed placed = {}) {
    const SlotRequest room = [this](size_t bytes) { return pools_->allocate(rank_, bytes); };
    sides_.push_back(
        std::make_unique<Side>(spec, rank_, devices_.ranks(), placed.in ? room : nullptr, placed.out ? room : nullptr));
    texts_.push_back(std::string(kernel::name(algorithm)) + " " + describe(spec));
    table_.resize(table_.size() + 2 * size_t(devices_.ranks()));
    const size_t index = table_.size() - 2 * size_t(devices_.ranks());
    Job job = kernel::job_of(algorithm, sides_.back()->args(), uint32_t(rank_), uint32_t(devices_.ranks()),
                             sides_.back()->width(), uint32_t(index), table_.data() + index);
    job.timeout_ns = timeout_ns;
    if (pools_) {
      kernel::put_places(job, uint32_t(devices_.ranks()), table_.data(),
                         [this](const std::byte* data, size_t bytes) { return pools_->place_of(rank_, data, bytes); });
    }
    jobs_.push_back(job);
  }
  /// The piece of the last operation for a rank, which has uneven counts, and the place of its result.
  kernel::Piece& piece(int to) { return table_[table_.size() - 2 * size_t(devices_.ranks()) + size_t(to)]; }
  std::byte* out() { return sides_.back()->out(); }
  std::byte* in() { return const_cast<std::byte*>(sides_.back()->in()); }
  size_t in_bytes() const { return sides_.back()->args().count * sides_.back()->width(); }
  /// The output of the i-th operation, and what is wrong with it, if anything.
  Bytes result(size_t i) const { return Bytes(sides_[i]->out(), sides_[i]->out() + result_bytes(i)); }
  std::string verdict(size_t i) const { return sides_[i]->verdict(); }
  bool fits() const { return kernel::can_do(jobs_.back().algorithm, jobs_.back(), devices_.shape(), table_.data()); }

  /// Whether its last operation alone is one of the hot ones.
  bool is_hot() const {
    return kernel::with_hot_operation(devices_.channel(rank_), jobs_.back(), table_.data(), [](auto) {});
  }

  /// Empty: every lane succeeded, and every output is correct.
  template <class Rules = kernel::PushRules>
  std::string run(KernelChoice choice = KernelChoice::kAsLaunched) {
    const Status may = kernel::check_launch(devices_.channel(rank_), jobs_, table_);
    if (!may.ok()) return may.what();
    const int well = devices_.launch<Rules>(rank_, jobs_, table_.data(), choice);
    if (well != devices_.lanes_in_all()) {
      const kernel::DeviceVerdict& v = devices_.control(rank_).verdict;
      return "rank " + std::to_string(rank_) + ": " + std::to_string(well) + " lanes ended well; cause " +
             std::to_string(int(v.cause)) + " peer " + std::to_string(v.peer) + " of " + texts_[0];
    }
    for (size_t i = 0; i < sides_.size(); ++i) {
      const std::string wrong = sides_[i]->verdict();
      if (!wrong.empty()) return texts_[i] + ": " + wrong;
    }
    return "";
  }

 private:
  size_t result_bytes(size_t i) const { return sides_[i]->out() ? sides_[i]->out_bytes() : 0; }

  SimulatedDevices& devices_;
  int rank_;
  Pools* pools_;
  std::vector<std::unique_ptr<Side>> sides_;
  std::vector<std::string> texts_;
  std::vector<kernel::Piece> table_;
  std::vector<Job> jobs_;
};

}  // namespace nvx::test
