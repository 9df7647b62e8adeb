#include "group/device/device_trial.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <future>
#include <iterator>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>

#include "base/error.h"
#include "base/hash.h"
#include "base/thread_state.h"
#include "group/device/device_wait.h"
#include "kernel/gpu/packs.h"
#include "kernel/reduce/level.h"
#include "kernel/reduce/reduce.h"
#include "memory/driver/gpu_info.h"
#include "memory/driver/thread_call.h"

namespace nvx {
namespace {

using kernel::DeviceAlgorithm;
using kernel::DevicePad;
using kernel::Part;

/// The operations in order. The first two show which pairs are to blame if they fail.
struct TrialStage {
  DeviceAlgorithm algorithm;
  DType dtype = DType::kU8;
  ReduceOp op = ReduceOp::kSum;
  bool with_next = false;  // in the launch of the next one

  bool is_multicast() const { return algorithm == DeviceAlgorithm::kReduceMulticast; }
  bool reduces() const { return kernel::reduces(algorithm) || is_multicast(); }
  std::string name() const {
    return kernel::name(algorithm) + (reduces() ? std::string(" of ") + nvx::name(dtype) : "");
  }
};
using enum DeviceAlgorithm;
constexpr TrialStage kStages[] = {{kExchangePackets},
                                  {kExchangeChunks},
                                  {kExchangePieces},
                                  {kReducePackets, DType::kF32},
                                  {kReducePackets, DType::kBF16},
                                  {kReducePackets, DType::kF16},
                                  {kReducePacketsTwoShot, DType::kF32, ReduceOp::kAvg},
                                  {kReducePacketsTwoShot, DType::kBF16, ReduceOp::kAvg},
                                  {kReducePacketsTwoShot, DType::kF16, ReduceOp::kAvg},
                                  {kReduceChunks, DType::kF32},
                                  {kReduceChunks, DType::kBF16},
                                  {kReduceChunks, DType::kF16},
                                  {kReducePackets, DType::kI32, ReduceOp::kSum, true},
                                  {kExchangePackets},
                                  {kReduceMulticast, DType::kF32},
                                  {kReduceMulticast, DType::kBF16},
                                  {kReduceMulticast, DType::kF16}};
static_assert(std::size(kStages) == kTrialEpochs + kMulticastTrialEpochs);

/// The layout of `buffer`: the copied part of a pad, then for each stage this rank's input and the result.
struct BufferLayout {
  kernel::DeviceShape shape;
  uint32_t stages;

  size_t pad_bytes() const { return DevicePad{shape}.offset(Part::kStaging); }
  /// Bytes of this rank's input: some packs a block in chunks, otherwise one; of each slice where ranks reduce slices.
  size_t piece(uint32_t stage) const {
    const DeviceAlgorithm algorithm = kStages[stage].algorithm;
    const bool sliced =
        algorithm == kReducePacketsTwoShot || algorithm == kReduceChunks || algorithm == kReduceMulticast;
    return size_t(algorithm == kExchangeChunks ? 256 : 16) * shape.blocks * (sliced ? shape.ranks : 1);
  }
  size_t result(uint32_t stage) const { return piece(stage) * (kStages[stage].reduces() ? 1 : shape.ranks); }
  size_t sent(uint32_t stage) const {
    size_t at = pad_bytes();
    for (uint32_t before = 0; before < stage; ++before) at += piece(before) + result(before);
    return at;
  }
  size_t received(uint32_t stage) const { return sent(stage) + piece(stage); }
  size_t bytes() const { return sent(stages); }
};

/// A rank's progress. Fixed layout; comes from peers.
struct TrialInfo {
  static constexpr uint32_t kMagic = 0x7478766e;  // "nvxt"
  static constexpr uint32_t kNone = UINT32_MAX;
  uint32_t magic = kMagic;
  int32_t rank = -1;
  uint32_t ended = 0;      // stages ended
  uint32_t corrupt = 0;    // whether an exchange has brought other data than was sent
  uint32_t wrong = kNone;  // the first reduction whose bits are not the host's
  uint32_t each_us = 0;    // the time of an operation
  uint32_t by_switch = 0;  // whether a sum of the switch is beyond what rounding explains
  uint64_t sums = 0;       // a hash of the switch's sums, which all ranks have alike
};

/// A rank's finding about a peer. Fixed layout; comes from peers.
struct TrialFinding {
  uint32_t state = 0;  // a PairState
  uint32_t stage = 0;
  char why[120] = {};
};

/// A rank's input. Floats are normal numbers of either sign between 1/16 and 8, whose sums are rounded.
void write_input(const TrialStage& stage, uint32_t rank, std::byte* at, size_t bytes) {
  const size_t width = size_of(stage.dtype);
  for (size_t i = 0; i < bytes / width; ++i) {
    uint32_t bits = (uint32_t(i) + 1) * 2654435761u + (rank + 1) * 40503u * 65537u + uint32_t(stage.algorithm);
    bits ^= bits >> 15;
    bits *= 2246822519u;
    bits ^= bits >> 13;
    const uint32_t mantissa = stage.dtype == DType::kF32 ? 23 : stage.dtype == DType::kBF16 ? 7 : 10;
    const uint32_t exponents = stage.dtype == DType::kF16 ? 0x1f : 0xff, sign = uint32_t(1) << (8 * width - 1);
    if (stage.reduces()) {
      const uint32_t exponent = exponents / 2 - 4 + (bits >> mantissa) % 7;
      bits = (bits & (sign | ((uint32_t(1) << mantissa) - 1))) | exponent << mantissa;
    }
    std::memcpy(at + i * width, &bits, width);  // the low bytes
  }
}

/// The result on every rank, as the host computes it.
std::vector<std::byte> expected(const BufferLayout& layout, uint32_t stage) {
  const uint32_t ranks = layout.shape.ranks;
  const TrialStage& what = kStages[stage];
  const size_t piece = layout.piece(stage);
  std::vector<std::byte> inputs(piece * ranks);
  std::vector<const void*> sources;
  for (uint32_t r = 0; r < ranks; ++r) {
    write_input(what, r, &inputs[r * piece], piece);
    sources.push_back(&inputs[r * piece]);
  }
  if (!what.reduces()) return inputs;
  std::vector<std::byte> result(piece);
  kernel::level().reduce(what.dtype, what.op)(result.data(), sources.data(), int(ranks), piece / size_of(what.dtype),
                                              nullptr);
  return result;
}

double element(DType dtype, const std::byte* at, size_t i) {
  const auto read = [&]<class T>(T value) {
    std::memcpy(&value, at + i * sizeof value, sizeof value);
    return double(kernel::Rule<T>::widen(value));
  };
  return dtype == DType::kF32 ? read(float()) : dtype == DType::kBF16 ? read(kernel::BF16()) : read(kernel::F16());
}

/// Whether sums differ from the host's by no more than any order of additions explains, each of which rounds or
/// truncates to the type.
bool are_near(const BufferLayout& layout, uint32_t stage, const std::byte* got) {
  const TrialStage& what = kStages[stage];
  const size_t piece = layout.piece(stage), count = piece / size_of(what.dtype);
  const std::vector<std::byte> want = expected(layout, stage);
  std::vector<double> most(count);
  std::vector<std::byte> input(piece);
  for (uint32_t r = 0; r < layout.shape.ranks; ++r) {
    write_input(what, r, input.data(), piece);
    for (size_t i = 0; i < count; ++i) most[i] += std::abs(element(what.dtype, input.data(), i));
  }
  const double step = what.dtype == DType::kF32 ? 0x1p-23 : what.dtype == DType::kBF16 ? 0x1p-7 : 0x1p-10;
  for (size_t i = 0; i < count; ++i) {
    const double off = std::abs(element(what.dtype, got, i) - element(what.dtype, want.data(), i));
    if (!(off <= step * layout.shape.ranks * most[i])) return false;  // also if it is no number
  }
  return true;
}

class DeviceTrial {
 public:
  DeviceTrial(std::shared_ptr<DeviceDriver> driver, Bootstrap& bootstrap, const Trial& trial)
      : driver_(std::move(driver)),
        bootstrap_(bootstrap),
        trial_(trial),
        options_(trial.options),
        layout_{trial.channel.shape, trial.epochs()},
        findings_(trial.channel.shape.ranks) {}

  /// Destroying a stream may hang, so it has a deadline too.
  ~DeviceTrial() {
    destroy_on_thread("destroying the stream of the first exchange between GPU kernels", std::move(work_),
                      trial_.drain_timeout);
  }
  DeviceTrial(const DeviceTrial&) = delete;

  TrialVerdict run(kernel::KernelLauncher& launcher) {
    for (uint32_t stage = 0; stage < stages(); ++stage)
      write_input(kStages[stage], me(), buffer() + layout_.sent(stage), layout_.piece(stage));
    try {
      launch(launcher);
      // A rank that has begun may wait for one whose device is busy. If one has ended meanwhile, so may all.
      watch(Deadline::after(options_.busy));
      if (!exchange_results() && any_ended_) {
        watch(Deadline::after(options_.timeout));
        (void)exchange_results();
      }
    } catch (const std::exception&) {
      end_kernels();
      throw;
    }
    end_kernels();
    TrialVerdict verdict{std::vector<PairVerdict>(ranks()), !all_well_, !wrong_.empty(), wrong_, no_multicast_, each_};
    if (all_well_ || verdict.wrong) return verdict;
    // All ranks' kernels have ended, so their stores are now visible here, however late, or were lost.
    if (ended() < kTrialEpochs) check_pads();
    return agree_on(std::move(verdict));
  }

 private:
  static constexpr std::chrono::milliseconds kPollSlice{50};

  uint32_t ranks() const { return trial_.channel.shape.ranks; }
  uint32_t me() const { return uint32_t(options_.rank); }
  uint32_t stages() const { return layout_.stages; }
  std::byte* buffer() const { return trial_.buffer->host(); }
  std::byte* device_buffer() const { return reinterpret_cast<std::byte*>(trial_.buffer->base()); }
  const kernel::Control& control() const { return *trial_.control; }

  kernel::Job job(uint32_t stage) const {
    using Kind = kernel::Pieces::Kind;
    const TrialStage& what = kStages[stage];
    const size_t bytes = layout_.piece(stage);
    kernel::Job job;
    job.algorithm = what.algorithm;
    job.fingerprint.collective = what.reduces() ? kernel::Collective::kAllReduce : kernel::Collective::kAllGather;
    job.fingerprint.dtype = what.dtype;
    job.fingerprint.op = what.op;
    job.fingerprint.count = layout_.result(stage) / size_of(what.dtype);
    const bool whole = !what.reduces() || what.algorithm == kReducePackets || what.is_multicast();
    job.send = {whole ? Kind::kSame : Kind::kSplit, 0, device_buffer() + layout_.sent(stage), bytes};
    job.recv = {what.reduces() ? job.send.kind : Kind::kEven, 0, device_buffer() + layout_.received(stage), bytes};
    // For a host that dies or hangs; otherwise the host ends a late operation.
    if (options_.busy.count() > 0) job.timeout_ns = uint64_t(std::chrono::nanoseconds(2 * options_.busy).count());
    return job;
  }

  void launch(kernel::KernelLauncher& launcher) {
    const auto open = [driver = driver_, device = options_.device, touches = trial_.touches] {
      return std::make_shared<DeviceWork>(driver, device, touches);
    };
    work_ =
        call_or_throw<std::shared_ptr<DeviceWork>>("creating a stream", Deadline::after(trial_.drain_timeout), open);
    std::future<void> checks;  // ends after `launched`
    std::promise<void> launched;
    try {
      checks = std::async(std::launch::async, [this, end = launched.get_future()] { check_peers_until(end); });
    } catch (const std::system_error& error) {
      throw system_error("cannot start a thread for the first exchange between GPU kernels", error.code().value());
    }
    std::vector<kernel::Job> jobs;
    for (uint32_t stage = 0; stage < stages(); ++stage) {
      jobs.push_back(job(stage));
      if (kStages[stage].with_next) continue;
      const Status begun =
          launcher.launch_on_stream(work_->external_stream(), trial_.channel, jobs, {}, trial_.multicast);
      if (!begun.ok()) throw Error(begun);
      jobs.clear();
    }
    launched.set_value();
    checks.get();
  }

  /// The driver may block in a launch until its kernel has ended: see `ChannelOptions::on_launch`.
  void check_peers_until(const std::future<void>& launched) {
    begin_own_thread("nvx-trial");
    try {
      while (launched.wait_for(kPollSlice) == std::future_status::timeout) options_.check_peers();
    } catch (...) {
      std::atomic_ref(trial_.control->abort).store(1, std::memory_order_release);
      throw;
    }
  }

  /// Waits until all operations have ended, or one has failed; up to `options_.timeout` from their start, and for that
  /// up to `to_begin`. Times them.
  void watch(const Deadline& to_begin) {
    std::vector<Clock::duration> gaps;
    Clock::time_point last = Clock::now();
    uint32_t seen = progress();
    Deadline limit = to_begin;
    bool begun = false;
    const auto over = [&] {
      const auto now = Clock::now();
      if (!begun && has_begun()) begun = true, limit = Deadline::after(options_.timeout);
      for (const uint32_t ended = progress(); seen < ended; ++seen, last = now) gaps.push_back(now - last);
      return seen == stages() || has_verdict() || limit.passed(now);
    };
    while (!poll_until(over, Deadline::after(kPollSlice))) options_.check_peers();
    if (gaps.size() < stages() / 2) return;
    gaps.erase(gaps.begin());  // it waited for the last rank to arrive
    const auto one = gaps.begin() + std::ptrdiff_t(gaps.size() / (trial_.shares_gpu ? 2 : 4));
    std::nth_element(gaps.begin(), one, gaps.end());
    each_ = std::chrono::duration_cast<std::chrono::microseconds>(*one);
  }

  /// Ends the open trials, and waits for the device to report it.
  void end_kernels() {
    if (!work_) return;
    if (progress() < stages()) std::atomic_ref(trial_.control->abort).store(1, std::memory_order_release);
    drain(Deadline::after(trial_.drain_timeout), "the first operations of GPU kernels");
  }

  /// Starts a copy if `from` is set, and waits for all work on the stream.
  void drain(const Deadline& deadline, const std::string& what, DevicePtr from = 0) {
    const auto steps = [work = work_, deadline, from, to = trial_.buffer->base(), bytes = layout_.pad_bytes()] {
      return work->carry_out([&]() -> PairVerdict {
        if (from) work->copy(to, from, bytes);
        if (work->drain(deadline)) return {};
        return {PairState::kHung, "it did not end within " + how_long(deadline)};
      });
    };
    const PairVerdict ended = run_work(steps, deadline);
    if (ended.fine()) return;
    throw Error(ended.state == PairState::kHung ? Code::kTimeout : Code::kSystem, "nvx: " + what + ": " + ended.why);
  }

  /// The number of operations that all blocks have ended.
  uint32_t progress() const { return kernel::least_ended(control(), layout_.shape.blocks).epoch - trial_.first_epoch; }
  bool has_begun() const {
    auto& begun = const_cast<uint32_t&>(control().begun);
    return std::atomic_ref(begun).load(std::memory_order_acquire) != trial_.first_epoch;
  }
  bool has_verdict() const {
    auto& state = const_cast<uint32_t&>(control().verdict.state);
    return std::atomic_ref(state).load(std::memory_order_acquire) == kernel::DeviceVerdict::kReadable;
  }
  /// The number of stages that have ended well here.
  uint32_t ended() const { return has_verdict() ? control().verdict.epoch - trial_.first_epoch - 1 : progress(); }

  /// Compares all results with the host's: whether all exchanges are right; `wrong`: the first wrong reduction.
  bool check_results(uint32_t* wrong) {
    bool whole = true;
    for (uint32_t stage = 0; stage < kTrialEpochs; ++stage) {
      const std::vector<std::byte> want = expected(layout_, stage);
      const std::byte* const got = buffer() + layout_.received(stage);
      const size_t at = size_t(std::mismatch(want.begin(), want.end(), got).first - want.begin());
      if (at == want.size()) continue;
      if (kStages[stage].reduces()) {
        *wrong = std::min(*wrong, stage);
        continue;
      }
      whole = false;
      find(uint32_t(at / layout_.piece(stage)), PairState::kCorrupt, stage,
           "data that kernels send is corrupt from byte " + std::to_string(at % layout_.piece(stage)) +
               " on, but copied data is intact");
    }
    return whole;
  }

  void check_sums(TrialInfo& info) const {
    Hash hash;
    for (uint32_t stage = kTrialEpochs; stage < stages(); ++stage) {
      const std::byte* const got = buffer() + layout_.received(stage);
      info.by_switch = info.by_switch || !are_near(layout_, stage, got);
      hash.add(std::string_view(reinterpret_cast<const char*>(got), layout_.piece(stage)));
    }
    info.sums = hash.value();
  }

  /// Publishes this rank's progress, and reads the others'. Returns whether all ranks have ended well.
  bool exchange_results() {
    TrialInfo info;
    info.rank = options_.rank;
    info.ended = ended();
    if (info.ended == stages()) {
      end_kernels();  // an end that a kernel reports is not ordered behind its stores
      info.corrupt = !check_results(&info.wrong);
      check_sums(info);
    }
    info.each_us = uint32_t(std::min<int64_t>(each_.count(), UINT32_MAX));
    const auto infos = read_infos<TrialInfo>(bootstrap_.all_gather(bytes_of(info)), options_.name);
    all_well_ = true, any_ended_ = false, no_multicast_.clear();
    bool is_corrupt = false;
    for (uint32_t r = 0; r < ranks(); ++r) {
      const bool is_over = infos[r].ended == stages(), is_wrong = infos[r].wrong < kTrialEpochs;
      if (!is_over && infos[r].ended >= kTrialEpochs)
        no_multicast_ = "the kernel of " + options_.name(int(r)) + " that uses multicast did not end";
      if (is_over && no_multicast_.empty() && (infos[r].by_switch != 0 || infos[r].sums != infos[0].sums))
        no_multicast_ = "the switch's sums on " + options_.name(int(r)) +
                        (infos[r].by_switch ? " are wrong" : " are not those of rank 0");
      if (is_wrong && wrong_.empty())
        wrong_ = options_.name(int(r)) + "'s kernel " + kStages[infos[r].wrong].name() +
                 " computes other bits than the host";
      all_well_ = all_well_ && is_over && !is_wrong && infos[r].corrupt == 0;
      any_ended_ = any_ended_ || is_over;
      is_corrupt = is_corrupt || infos[r].corrupt != 0;
      each_ = std::max(each_, std::chrono::microseconds(infos[r].each_us));
    }
    if (is_corrupt) wrong_.clear();  // corrupt data makes other results; pairs are to blame
    return all_well_;
  }

  void find(uint32_t peer, PairState state, uint32_t stage, const std::string& why) {
    if (findings_[peer].state != uint32_t(PairState::kFine)) return;
    findings_[peer].state = uint32_t(state);
    findings_[peer].stage = stage;
    put(findings_[peer].why, why);
  }

  /// Finds the peers whose first packets, or in the second stage whose flags, are missing or wrong.
  void check_pads() {
    const kernel::DeviceVerdict& verdict = control().verdict;
    const std::string though = ", but copied data is intact";
    if (!has_verdict() || ended() > 1) return;
    if (verdict.peer >= 0 && verdict.cause != kernel::Verdict::Cause::kWait)
      find(uint32_t(verdict.peer), PairState::kCorrupt, ended(), "data that kernels send is corrupt" + though);
    for (uint32_t p = 0; p < ranks(); ++p) {
      if (p == me()) continue;
      if (copied_ != trial_.pads[p].mine) copy_pad(trial_.pads[p].mine);
      if (ended() == 0 && !has_arrived(p))  // a peer that is ahead overwrites the packets of the first stage
        find(p, PairState::kHung, 0, "no store of a kernel arrives" + though);
      else if (ended() == 1 && verdict.peer == int32_t(p) && has_arrived(p, 1) && !has_posted(p))
        find(p, PairState::kHung, 1, "no signal of a kernel arrives" + though);
    }
  }

  void copy_pad(const std::byte* pad) {
    drain(Deadline::after(trial_.drain_timeout), "reading the pad", reinterpret_cast<DevicePtr>(pad));
    copied_ = pad;
  }

  template <class Cell>
  const Cell& cell(Part part, uint32_t block, uint32_t peer) const {
    return *reinterpret_cast<const Cell*>(buffer() + DevicePad{layout_.shape}.offset(part, block, peer));
  }
  /// Checks all blocks: a block that saw another one fail does not begin.
  bool has_arrived(uint32_t peer, uint32_t stage = 0) const {
    const uint32_t epoch = trial_.first_epoch + 1 + stage;
    bool arrived = false;
    for (uint32_t block = 0; block < layout_.shape.blocks; ++block) {
      const auto& packet = cell<kernel::Packet>(DevicePad::of(Part::kArrivals, epoch % kernel::kBuffers), block, peer);
      arrived = arrived || kernel::is_stamped(packet, epoch);
    }
    return arrived;
  }
  bool has_posted(uint32_t peer) const {
    return cell<kernel::PeerCounters>(Part::kCounters, control().verdict.block, peer).posted != 0;
  }

  /// The first stage with a finding decides, since it also makes later stages fail.
  TrialVerdict agree_on(TrialVerdict verdict) {
    const auto all =
        read_infos<TrialFinding>(bootstrap_.all_gather(std::as_bytes(std::span(findings_))), ranks(), options_.name);
    const auto is_fine = [](const TrialFinding& f) { return f.state == uint32_t(PairState::kFine); };
    uint32_t first = UINT32_MAX;
    for (const TrialFinding& f : all) first = is_fine(f) ? first : std::min(first, f.stage);
    verdict.why = "a rank's GPU was busy, or a kernel did not end";
    for (size_t i = all.size(); i-- > 0;) {
      if (is_fine(all[i]) || all[i].stage != first) continue;
      const size_t by = i / ranks(), of = i % ranks();
      const PairVerdict pair{PairState(std::min(all[i].state, uint32_t(PairState::kCorrupt))), text_of(all[i].why)};
      verdict.why = "from " + options_.name(int(of)) + " to " + options_.name(int(by)) + ": " + pair.why;
      if (by == me()) verdict.peers[of] = pair;
      if (of == me()) verdict.peers[by] = pair;
    }
    return verdict;
  }

  const std::shared_ptr<DeviceDriver> driver_;
  Bootstrap& bootstrap_;
  const Trial& trial_;
  const ChannelOptions& options_;
  const BufferLayout layout_;
  std::vector<TrialFinding> findings_;         // by peer
  std::shared_ptr<DeviceWork> work_;           // the stream of the kernel, and then of the copies of pads
  const std::byte* copied_ = nullptr;          // the pad copied to `buffer`
  std::chrono::microseconds each_{0};          // this rank's operations; then the longest of all ranks'
  bool all_well_ = false, any_ended_ = false;  // ranks, by their last TrialInfo
  std::string wrong_;                          // which rank's kernel is wrong; empty if none
  std::string no_multicast_;                   // see TrialVerdict
};

}  // namespace

bool is_shown(int architecture, int cuda) {
  constexpr std::pair<int, int> kShown[] = {{90, 13000}};  // H200, driver 580, the kernels of 78d38baa
  return std::ranges::find(kShown, std::pair(architecture, cuda)) != std::end(kShown);
}

size_t trial_bytes(const Trial& trial) { return BufferLayout{trial.channel.shape, trial.epochs()}.bytes(); }

TrialVerdict try_kernels(std::shared_ptr<DeviceDriver> driver, Bootstrap& bootstrap, kernel::KernelLauncher& launcher,
                         const Trial& trial) {
  return DeviceTrial(std::move(driver), bootstrap, trial).run(launcher);
}

}  // namespace nvx
