// Ranks as processes: on one GPU each, or sharing one, where the device time-slices them unless MPS runs them
// concurrently. The parent never initializes CUDA, because CUDA does not survive a fork.

#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstring>

#include "base/error.h"
#include "gpu/parts.h"
#include "gpu/rank.h"
#include "kernel/gpu/launch_cuda.h"

namespace nvx::gpu {
namespace {

using kernel::Collective;
using kernel::DeviceAlgorithm;

// The messages of a rank: a character for its kind, then the content.
constexpr char kCheck = 'C', kLine = 'L', kSkip = 'S';

/// Sends a rank's results to the report of the parent.
class ResultSender {
 public:
  explicit ResultSender(Member& member) : member_(member) {}
  void line(const Line& line) { member_.send(kLine + line.text()); }
  void skip(const std::string& why) { member_.send(kSkip + why); }
  bool check(const std::string& what, const std::string& wrong) {
    const std::string who = "rank " + std::to_string(member_.number()) + ": " + what;
    member_.send(kCheck + who + '\0' + wrong);
    return wrong.empty();
  }

 private:
  Member& member_;
};

pid_t spawn(const std::vector<std::string>& words, int kept) {
  const pid_t child = fork();
  if (child != 0) return child;
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  fcntl(kept, F_SETFD, 0);  // the one descriptor that the child inherits
  std::vector<char*> arguments;
  for (const std::string& word : words) arguments.push_back(const_cast<char*>(word.c_str()));
  arguments.push_back(nullptr);
  execv("/proc/self/exe", arguments.data());
  _exit(127);
}

std::string ending(pid_t child) {
  int status = 0;
  if (waitpid(child, &status, 0) != child) return "it did not end";
  if (WIFSIGNALED(status)) return "it died of signal " + std::to_string(WTERMSIG(status));
  return WEXITSTATUS(status) == 0 ? "" : "it ended with code " + std::to_string(WEXITSTATUS(status));
}

struct Cast {
  const char* role;
  uint32_t ranks;
  const PartOptions& options;
  int victim = -1;
};

/// Starts the ranks, collects their results, and waits for them to end. Not empty: the reason why they could not begin.
std::string perform(Report& report, const Cast& cast) {
  Hub hub(cast.ranks);
  std::vector<pid_t> children;
  for (uint32_t r = 0; r < cast.ranks; ++r) {
    const Fd end = hub.take(r);
    const auto text = [](auto n) { return std::to_string(n); };
    children.push_back(
        spawn({"nvx_gpu", "rank", cast.role, text(end.get()), text(r), text(cast.ranks),
               cast.options.together ? "together" : "apart", text(report.time_left().count()), cast.options.kind},
              end.get()));
  }
  std::string skipped;
  Hub::Rules rules;
  rules.receive = [&](uint32_t, const std::string& message) {
    const size_t cut = message.find('\0');
    if (message[0] == kLine) report.print(message.substr(1));
    if (message[0] == kSkip) skipped = message.substr(1);
    if (message[0] == kCheck && cut != std::string::npos)
      report.check(message.substr(1, cut - 1), message.substr(cut + 1));
  };
  rules.victim = uint32_t(std::max(cast.victim, 0));
  rules.kill = [&] {
    ::kill(children[rules.victim], SIGKILL);
    (void)ending(std::exchange(children[rules.victim], -1));
  };
  const auto left = std::max(report.time_left(), std::chrono::milliseconds(1000));
  const bool in_time = hub.serve(rules, Deadline::after(left));
  if (!in_time) report.check("ranks as processes", "they did not end in time");
  for (uint32_t r = 0; r < cast.ranks; ++r) {
    if (children[r] < 0) continue;
    if (!in_time) ::kill(children[r], SIGKILL);
    const std::string wrong = ending(children[r]);
    if (skipped.empty() && in_time) report.check("the process of rank " + std::to_string(r), wrong);
  }
  return skipped;
}

// ---- in the ranks' processes

std::string error_of(Rank& rank, RankProgram& program) {
  if (const std::string wrong = verdict_of(rank.control()); !wrong.empty()) return wrong;
  return program.verdict();
}

ChannelShape shape_of(uint32_t ranks) {
  const uint32_t blocks = std::max(1u, std::min(4u, resident_blocks() / ranks));
  return {{ranks, blocks, 256, 2048}, uint32_t(-10), 0};
}

void report_start(ResultSender& results, Rank& rank, const StartTimes& times) {
  PeerMappings& mappings = rank.mappings();
  results.line(Line()
                   .add("start", "processes")
                   .add("ranks", rank.shape().ranks)
                   .add("kind", name(mappings.agreement().kind))
                   .add("why_not_better", mappings.agreement().why_not_better)
                   .add("fallbacks", mappings.fallbacks())
                   .add("share_ms", times.share)
                   .add("channel_ms", times.channel)
                   .add("init_ms", times.share + times.channel)
                   .add("arena_bytes", uint64_t(mappings.arena().region().bytes()))
                   .add("pad_bytes", uint64_t(rank.pad_bytes())));
}

void run_member(Member& member, ResultSender& results, const Place& place) {
  StartTimes times;
  Rank rank(member, shape_of(member.members()), place, &times);
  report_start(results, rank, times);
  const ShareKind kind = rank.mappings().agreement().kind;
  if (place.kind && !results.check("the requested kind", kind == *place.kind ? "" : name(kind))) return;
  const std::vector<Case> cases = some_cases(member.members(), rank.shape(), 7);
  for (const size_t at_once : {size_t(1), size_t(4)}) {
    for (size_t at = 0; at < cases.size(); at += 8) {
      const std::vector<Case> some(cases.begin() + long(at), cases.begin() + long(std::min(at + 8, cases.size())));
      RankProgram program = rank.write(some, kTimeoutNs);
      member.barrier();  // otherwise the first launch would wait for the slowest upload
      const auto began = Clock::now();
      rank.launch(program, at_once);
      std::string wrong = rank.wait(std::chrono::seconds(45));
      const double ms = std::chrono::duration<double, std::milli>(Clock::now() - began).count();
      if (wrong.empty()) wrong = error_of(rank, program);
      if (!results.check(std::to_string(at_once) + " a launch, from " + describe(some[0]), wrong)) return;
      if (member.number() == 0) {
        results.line(Line()
                         .add("operations", uint64_t(some.size()))
                         .add("a_launch", uint64_t(at_once))
                         .add("ranks", member.members())
                         .add("ms", ms));
      }
    }
  }
}

/// The last rank is killed while its kernel and another rank's wait for rank 0. Rank 0 launches after the kill.
void outlive(Member& member, ResultSender& results, const Place& place) {
  constexpr uint64_t kTimeout = 2'000'000'000;  // longer than the end of a process takes: 0.3 s with an H200
  const uint32_t ranks = member.members();
  const int victim = int(ranks) - 1;
  StartTimes times;
  Rank rank(member, shape_of(ranks), place, &times);
  const auto sum = [](uint32_t n, size_t count, uint64_t round) {
    Case test_case{DeviceAlgorithm::kReduceChunks,
                   {.collective = Collective::kAllReduce, .counts = {}, .round = round}};
    test_case.spec.counts.assign(n, count);
    return test_case;
  };
  RankProgram before = rank.write({sum(ranks, 2000, 1)}, kTimeoutNs);
  rank.launch(before, 1);
  std::string wrong = rank.wait(std::chrono::seconds(45));
  if (!results.check("before", wrong.empty() ? error_of(rank, before) : wrong)) return;
  RankProgram program = rank.write({sum(ranks, 20'000, 2), sum(ranks, 300, 3)}, kTimeout);
  member.barrier();
  if (member.number() != 0) rank.launch(program, 1);
  member.await_killing();
  const auto began = Clock::now();
  if (member.number() == 0) rank.launch(program, 1);
  wrong = rank.wait(std::chrono::seconds(30));
  const double ms = std::chrono::duration<double, std::milli>(Clock::now() - began).count();
  const kernel::DeviceVerdict& v = rank.control().verdict;
  if (wrong.empty() && (v.state == 0 || v.peer != victim || v.cause != kernel::Verdict::Cause::kWait))
    wrong = "it does not name the dead rank: " + verdict_of(rank.control());
  if (wrong.empty() && ms > 4000 + double(kTimeout) / 1e6) wrong = "the verdict took " + std::to_string(ms) + " ms";
  if (wrong.empty()) wrong = program.untouched();
  results.line(Line()
                   .add("killed", victim)
                   .add("rank", member.number())
                   .add("patience_ms", kTimeout / 1'000'000)
                   .add("verdict_ms", ms));
  if (!results.check("a rank is killed", wrong)) return;
  World fresh({{3, 2, 256, 2048}, 0, 0}, World::How::kFused);
  results.check("the device works on", fresh.perform(some_cases(3, fresh.shape(), 900)));
  Rank again(member, shape_of(member.members()), place, &times);
  RankProgram after = again.write(some_cases(member.members(), again.shape(), 40), kTimeoutNs);
  again.launch(after, 4);
  wrong = again.wait(std::chrono::seconds(45));
  results.check("a group of those who are left", wrong.empty() ? error_of(again, after) : wrong);
}

/// The value of each rank.
std::vector<double> of_all(Member& member, double mine) {
  std::vector<double> all;
  for (const std::vector<std::byte>& one : member.all_gather(std::as_bytes(std::span(&mine, 1))))
    std::memcpy(&all.emplace_back(), one.data(), std::min(one.size(), sizeof mine));
  return all;
}

/// The least time left of all ranks.
double agreed_us_left(Member& member, const Deadline& deadline) {
  const std::chrono::duration<double, std::micro> left = deadline.end - Clock::now();
  const std::vector<double> all = of_all(member, left.count());
  return *std::min_element(all.begin(), all.end());
}

/// The slowest rank's time of a collective launch, over successive launches. Their number fills half of the time left,
/// estimated from a first launch. None: the time does not allow one launch a round.
std::optional<double> agreed_us(Member& member, const Stream& stream, int most, const Deadline& deadline,
                                const std::function<void()>& launch) {
  constexpr int kRounds = 5;
  const auto slowest = [&](int runs, int rounds) {
    const std::vector<double> all = of_all(member, time_of(stream, runs, rounds, launch));
    return *std::max_element(all.begin(), all.end());
  };
  if (agreed_us_left(member, deadline) <= 0) return std::nullopt;
  const double once = slowest(1, 1);
  const double fit = agreed_us_left(member, deadline) / 2 / (once * (kRounds + 1));
  if (fit < 1) return std::nullopt;
  return slowest(int(std::min(fit, double(most))), kRounds);
}

/// The slowest rank's time of an all-reduce, over successive launches.
void measure(Member& member, ResultSender& results, const Place& place, const Deadline& deadline) {
  const uint32_t ranks = member.members(), resident = resident_blocks();
  struct Spot {
    uint32_t blocks, packets, chunk_bytes;
    size_t least, most;
  };
  for (const Spot& spot : {Spot{std::min(4u, resident / ranks), 1024, 8192, 8, 256 << 10},
                           Spot{std::min(16u, resident / ranks), 64, 16 << 10, 1 << 20, 64 << 20}}) {
    if (spot.blocks == 0) continue;
    StartTimes times;
    Rank rank(member, {{ranks, spot.blocks, spot.packets, spot.chunk_bytes}, 0, 0}, place, &times);
    report_start(results, rank, times);
    const Memory tensor(spot.most);
    for (size_t bytes = spot.least; bytes <= spot.most; bytes *= bytes < 4096 ? 8 : 4) {
      for (const DeviceAlgorithm algorithm :
           {DeviceAlgorithm::kReducePackets, DeviceAlgorithm::kReducePacketsTwoShot, DeviceAlgorithm::kReduceChunks}) {
        kernel::CollectiveArgs args;
        args.call.fingerprint = {Collective::kAllReduce, DType::kF32, ReduceOp::kSum, {}, -1, bytes / 4, 0, 0};
        args.in = tensor.data(), args.out = tensor.data(), args.count = bytes / 4;
        kernel::Job job = kernel::job_of(algorithm, args, member.number(), ranks, 4, 0, nullptr);
        job.timeout_ns = kTimeoutNs;
        if (!kernel::can_do(algorithm, job, rank.shape(), nullptr)) continue;
        const std::optional<double> us = agreed_us(member, rank.stream(), bytes <= (1 << 20) ? 100 : 10, deadline, [&] {
          rank.launch({&job, 1});
        });
        if (!us) {
          if (member.number() == 0)
            results.line(Line().add("left_out", std::to_string(bytes) + " bytes and more").add("why", "time ran out"));
          return;
        }
        const bool ok = results.check("timed", verdict_of(rank.control()));
        if (member.number() == 0 && ok) {
          results.line(Line()
                           .add("bench", "all_reduce, processes")
                           .add("algorithm", short_name(algorithm))
                           .add("ranks", ranks)
                           .add("blocks", spot.blocks)
                           .add("bytes", uint64_t(bytes))
                           .add("launch_us", *us));
        }
      }
    }
  }
}

}  // namespace

int be_rank(const std::vector<std::string>& arguments) {
  if (arguments.size() != 7) return 2;
  const std::string& role = arguments[0];
  Member member(Fd(std::stoi(arguments[1])), uint32_t(std::stoul(arguments[2])), uint32_t(std::stoul(arguments[3])));
  ResultSender results(member);
  try {
    const bool together = arguments[4] == "together";
    int devices = 0;
    if (const std::string none = no_device(); !none.empty()) return results.skip(none), 0;
    must(cudaGetDeviceCount(&devices), "cudaGetDeviceCount");
    if (role == "measure" && !together && devices < int(member.members())) {
      results.skip("without MPS the ranks take turns on the GPU: their time slices would be measured");
      return 0;
    }
    const int device = int(member.number()) % devices;
    must(cudaSetDevice(device), "cudaSetDevice");
    const Place place{device, kind_of(arguments[6])};
    if (role == "run") run_member(member, results, place);
    if (role == "outlive") outlive(member, results, place);
    const auto left = std::chrono::milliseconds(std::stoll(arguments[5]) * 8 / 10);
    if (role == "measure") measure(member, results, place, Deadline::after(left));
    (void)cudaDeviceReset();  // MPS refuses clients while it clears up after one that has just exited
  } catch (const std::exception& error) {
    try {
      results.check("its process", error.what());
    } catch (const Error&) {
    }
    return 1;
  }
  return 0;
}

namespace {

/// Runs one role for each number of ranks; skipped if none of them could run.
int perform_all(Report& report, const char* role, const PartOptions& options, const std::vector<uint32_t>& usual) {
  std::string skipped;
  for (const uint32_t ranks : options.ranks.empty() ? usual : options.ranks) {
    const std::string what = std::to_string(ranks) + " ranks";
    if (!report.has_time()) {
      report.cut_short(what);
    } else if (const std::string why = perform(report, {role, ranks, options}); !why.empty()) {
      skipped = why;
      report.print(Line().add("left_out", what).add("why", why));
    }
  }
  return report.tried() == 0 && !skipped.empty() ? report.skip(skipped) : report.finish();
}

}  // namespace

int processes(const PartOptions& options) {
  Report report("processes", options.span);
  return perform_all(report, "run", options, {2, 4, 8});
}

int killed(const PartOptions& options) {
  Report report("killed", options.span);
  const std::string why = perform(report, {"outlive", 3, options, /*victim=*/2});
  return why.empty() ? report.finish() : report.skip(why);
}

int bench_processes(const PartOptions& options) {
  Report report("bench_processes", options.span);
  return perform_all(report, "measure", options, {8, 2, 4});
}

}  // namespace nvx::gpu
