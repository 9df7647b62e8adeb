#include "gpu/cases.h"

#include <algorithm>
#include <thread>

#include "kernel/cpu/host_collectives.h"
#include "support/channels.h"

namespace nvx::gpu {

using kernel::Collective;
using kernel::DeviceAlgorithm;
using kernel::DeviceShape;
using test::Nature;
using test::Spec;

namespace {

constexpr uint64_t kMostFailures = 10;  // a group of cases ends after this many failures

/// Collects operations into kernels, and opens a fresh channel after a kernel that failed.
class Runner {
 public:
  Runner(const MakeChannel& make, const CaseOptions& options, Report& report)
      : make_(make), options_(options), report_(report) {}

  /// A channel of this many ranks, with fewer blocks if the device cannot run as many at once.
  bool open(std::string name, ChannelShape shape) {
    const uint32_t most = options_.most_blocks / shape.device.ranks;
    if (most == 0) return false;
    shape.device.blocks = std::min(shape.device.blocks, most);
    name_ = std::move(name), shape_ = shape, failed_at_ = report_.failed(), cases_ = 0, began_ = Clock::now();
    channel_ = make_(shape_);
    return true;
  }
  bool goes_on() const { return report_.has_time() && report_.failed() - failed_at_ < kMostFailures; }

  void add(const Case& test_case) {
    if (!goes_on() || !fits(test_case, shape_.device)) return;
    waiting_.push_back(test_case);
    if (waiting_.size() >= options_.at_once) perform();
  }
  /// Launches the operations added so far as one kernel.
  void flush() { perform(); }
  void close() {
    perform();
    if (!report_.has_time()) report_.cut_short(name_ + " of " + std::to_string(shape_.device.ranks) + " ranks");
    report_.print(Line()
                      .add("case", name_)
                      .add("ranks", shape_.device.ranks)
                      .add("blocks", shape_.device.blocks)
                      .add("operations", cases_)
                      .add("wrong", report_.failed() - failed_at_)
                      .add("seconds", std::chrono::duration<double>(Clock::now() - began_).count()));
    channel_.reset();
  }

 private:
  void perform() {
    if (waiting_.empty()) return;
    const std::vector<Case> cases = std::exchange(waiting_, {});
    cases_ += cases.size();
    if (!report_.check(name_ + ": " + describe(cases.front()), channel_->perform(cases))) channel_ = make_(shape_);
  }

  const MakeChannel& make_;
  const CaseOptions& options_;
  Report& report_;
  std::string name_;
  ChannelShape shape_;
  std::unique_ptr<TestChannel> channel_;
  std::vector<Case> waiting_;
  uint64_t failed_at_ = 0, cases_ = 0;
  Clock::time_point began_;
};

void every_count(Runner& run, uint32_t ranks, bool lean, uint32_t first_epoch, const char* name) {
  const Stamp chunk = first_epoch == 0 ? 0 : first_epoch > (1u << 31) ? Stamp(0) - 5 : (Stamp(1) << 32) - 5;
  if (!run.open(name, {{ranks, 2, 128, 256}, first_epoch, chunk})) return;
  uint64_t round = 0;
  const std::vector<size_t> few = {1, 45, 131}, all = {0, 1, 3, 17, 45, 131, 2049};
  for (const size_t n : lean ? few : all) {
    for (const auto& [algorithm, collective] : test::kWays) {
      Spec spec = test::spec_of(collective, n, int(ranks), ++round);
      spec.shift = round % 5 == 4 ? 8 : round % 5;
      spec.in_place = round % 3 == 0;
      run.add({algorithm, spec});
    }
  }
  run.close();
}

/// Chunks and packets of real size, several blocks, messages of some hundred KiB.
void large_messages(Runner& run, uint32_t ranks) {
  if (!run.open("large", {{ranks, 4, 2048, 16 << 10}, 0, 0})) return;
  uint64_t round = 1000;
  for (const size_t n : {size_t(9'001), size_t(30'011)}) {
    for (const auto& [algorithm, collective] : test::kWays) {
      Spec spec = test::spec_of(collective, n, int(ranks), ++round);
      spec.shift = round % 2 ? 0 : 16;
      run.add({algorithm, spec});
      run.flush();
    }
  }
  run.close();
}

void every_type(Runner& run, uint32_t ranks, bool lean) {
  constexpr DeviceAlgorithm kReducing[] = {DeviceAlgorithm::kReducePackets, DeviceAlgorithm::kReducePacketsTwoShot,
                                           DeviceAlgorithm::kReduceChunks};
  if (!run.open("types", {{ranks, 1, 128, 256}, uint32_t(-40), 0})) return;
  uint64_t round = 2000;
  for (size_t t = 0; t < kernel::kDTypeCount; ++t) {
    for (size_t o = 0; o < kernel::kReduceOpCount; ++o) {
      if (!kernel::level().reduce(DType(t), ReduceOp(o))) continue;
      for (const DeviceAlgorithm algorithm : kReducing) {
        if (lean && round++ % 3 != 0) continue;
        Spec spec{.collective = Collective::kAllReduce, .dtype = DType(t), .op = ReduceOp(o), .counts = {}};
        spec.round = ++round;
        spec.counts.assign(ranks, round % 2 ? 61 : 23);
        const size_t element = size_of(DType(t)), shifts[] = {0, element, 3 * element, 16};
        spec.shift = shifts[round % 4];
        spec.nature = round % 5 == 2 ? Nature::kTiny : Nature::kNearOne;
        run.add({algorithm, spec});
      }
    }
  }
  run.close();
}

/// Values far from one. Code that flushes subnormal numbers produces other bits. Infinities, NaNs and overflowing sums
/// must match the host's.
void odd_values(Runner& run, uint32_t ranks, Nature nature, const char* name) {
  if (!run.open(name, {{ranks, 1, 128, 256}, 0, 0})) return;
  uint64_t round = 3000 + 500 * uint64_t(nature);
  for (size_t t = size_t(DType::kF16); t < kernel::kDTypeCount; ++t) {  // the types after the integers
    for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kAvg, ReduceOp::kPremulSum, ReduceOp::kMax, ReduceOp::kMin}) {
      if (!kernel::level().reduce(DType(t), op)) continue;
      Spec spec{.collective = Collective::kAllReduce, .dtype = DType(t), .op = op, .counts = {}, .round = ++round};
      spec.counts.assign(ranks, 29);
      spec.nature = nature;
      run.add({DeviceAlgorithm::kReducePackets, spec});
      run.add({DeviceAlgorithm::kReduceChunks, spec});
    }
  }
  run.close();
}

void every_offset(Runner& run, uint32_t ranks) {
  if (!run.open("offsets", {{ranks, 2, 128, 256}, 0, 0})) return;
  uint64_t round = 4000;
  for (size_t shift = 0; shift <= 16; ++shift) {
    for (const auto& [algorithm, collective] : test::kWays) {
      if (collective == Collective::kBarrier) continue;
      Spec spec = test::spec_of(collective, 77, int(ranks), ++round);
      spec.dtype = DType::kU8, spec.shift = shift;
      run.add({algorithm, spec});
    }
  }
  run.close();
}

std::string on_cpu(const Spec& spec, int ranks, const kernel::Level& level, kernel::Algorithm algorithm) {
  test::Channels channels(ranks);
  std::vector<std::string> wrong(static_cast<size_t>(ranks));
  std::vector<std::thread> threads;
  for (int r = 0; r < ranks; ++r) {
    threads.emplace_back([&, r] {
      test::Side side(spec, r, ranks);
      const WaitRules rules = test::rules_of(std::chrono::seconds(20));
      kernel::CpuExec ex(side.width(), level.reduce(spec.dtype, spec.op), channels[r].factors().data(), rules);
      const bool ok = kernel::run_on_cpu(algorithm, ex, channels[r], side.args());
      wrong[size_t(r)] = ok ? side.verdict() : "rank " + std::to_string(r) + ": a wait did not end well";
    });
  }
  for (std::thread& t : threads) t.join();
  const auto it = std::find_if(wrong.begin(), wrong.end(), [](const std::string& w) { return !w.empty(); });
  return it == wrong.end() ? "" : *it;
}

}  // namespace

std::string describe(const Case& test_case) {
  return std::string(kernel::name(test_case.algorithm)) + " " + describe(test_case.spec);
}

bool fits(const Case& test_case, const DeviceShape& shape) {
  std::vector<kernel::Piece> table(2 * size_t(shape.ranks));
  for (uint32_t r = 0; r < shape.ranks; ++r) {
    const test::Side side(test_case.spec, int(r), int(shape.ranks));
    const kernel::Job job =
        kernel::job_of(test_case.algorithm, side.args(), r, shape.ranks, side.width(), 0, table.data());
    if (!kernel::can_do(test_case.algorithm, job, shape, table.data())) return false;
  }
  return true;
}

std::vector<Case> some_cases(uint32_t ranks, const DeviceShape& shape, uint64_t first_round) {
  std::vector<Case> cases;
  uint64_t round = first_round;
  for (const auto& [algorithm, collective] : test::kWays) {
    const bool chunks = algorithm == DeviceAlgorithm::kReduceChunks || algorithm == DeviceAlgorithm::kExchangeChunks;
    Case test_case{algorithm, test::spec_of(collective, chunks ? 3001 : 45, int(ranks), ++round)};
    test_case.spec.shift = round % 4;
    if (fits(test_case, shape)) cases.push_back(test_case);
  }
  return cases;
}

void run_cases(const MakeChannel& make, const CaseOptions& options, Report& report) {
  Runner run(make, options, report);
  for (const uint32_t ranks : options.ranks) {
    every_count(run, ranks, options.lean, 0, "counts");
    every_type(run, ranks, options.lean);
    if (options.lean) continue;
    every_count(run, ranks, /*lean=*/true, (1u << 31) - 7, "counts, epochs near 2^31");
    every_count(run, ranks, /*lean=*/true, uint32_t(-7), "counts, epochs near 2^32");
    every_count(run, ranks, /*lean=*/true, kernel::kRestamp - 9, "counts, stamps renewed");
    odd_values(run, ranks, Nature::kTiny, "tiny");
    odd_values(run, ranks, Nature::kWild, "wild");
    every_offset(run, ranks);
    large_messages(run, ranks);
  }
}

void run_cpu_path(const CaseOptions& options, Report& report) {
  uint64_t round = 5000;
  for (const kernel::Level* level : kernel::levels()) {
    const uint64_t before = report.failed(), tried = report.tried();
    for (const uint32_t ranks : options.ranks) {
      for (size_t i = 0; i < kernel::kDTypeCount * kernel::kReduceOpCount && report.has_time(); ++i) {
        const DType type = DType(i / kernel::kReduceOpCount);
        const ReduceOp op = ReduceOp(i % kernel::kReduceOpCount);
        if (!level->reduce(type, op) || (options.lean && ++round % 4 != 0)) continue;
        Spec spec{.collective = Collective::kAllReduce, .dtype = type, .op = op, .counts = {}, .round = ++round};
        spec.counts.assign(ranks, 2049);
        const auto algorithm = round % 2 ? kernel::Algorithm::kReduceOneShot : kernel::Algorithm::kReducePipelined;
        report.check(std::string("the CPU's path, ") + level->name + ": " + describe(spec),
                     on_cpu(spec, int(ranks), *level, algorithm));
      }
    }
    report.print(Line()
                     .add("case", "cpu_path")
                     .add("level", level->name)
                     .add("operations", report.tried() - tried)
                     .add("wrong", report.failed() - before));
  }
}

}  // namespace nvx::gpu
