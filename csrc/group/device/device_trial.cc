#include "group/device/device_trial.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <string>
#include <utility>

#include "base/contain.h"
#include "base/error.h"
#include "group/meet/store.h"
#include "kernel/gpu/packs.h"
#include "memory/driver/cards.h"
#include "memory/driver/thread_call.h"

namespace nvx {
namespace {

using kernel::DeviceAlgorithm;
using kernel::DevicePad;
using kernel::Part;

/// The exchanges in order, and the bytes of each rank's piece that a block takes.
struct TrialStage {
  DeviceAlgorithm algorithm;
  size_t share;
};
constexpr TrialStage kTrialStages[kTrialEpochs] = {{DeviceAlgorithm::kExchangePackets, 16},
                                                   {DeviceAlgorithm::kExchangeChunks, 256}};

/// The layout of `desk`: the copied part of a pad, then for each stage this rank's piece and all received pieces.
struct Shared {
  kernel::DeviceShape shape;

  size_t pad_bytes() const { return DevicePad{shape}.offset(Part::kStaging); }
  size_t piece(uint32_t stage) const { return kTrialStages[stage].share * shape.blocks; }
  size_t sent(uint32_t stage) const { return stage == 0 ? pad_bytes() : received(stage - 1, shape.ranks); }
  size_t received(uint32_t stage, uint32_t rank) const { return sent(stage) + (rank + 1) * piece(stage); }
  size_t bytes() const { return received(kTrialEpochs - 1, shape.ranks); }
};

/// A rank's progress. Fixed layout; comes from peers.
struct TrialCard {
  static constexpr uint32_t kMagic = 0x7478766e;  // "nvxt"
  uint32_t magic = kMagic;
  int32_t rank = -1;
  uint32_t ended = 0;  // stages ended well
  uint32_t whole = 0;  // whether all received data is correct
};

/// A rank's finding about a peer. Fixed layout; comes from peers.
struct TrialFinding {
  uint32_t state = 0;  // a PairState
  uint32_t stage = 0;
  char why[120] = {};
};

std::byte pattern(uint32_t rank, uint32_t stage, size_t i) { return std::byte(37 * i + 101 * rank + 11 * stage + 1); }

/// One rank's part of the trial.
class DeviceTrial {
 public:
  DeviceTrial(std::shared_ptr<DeviceDriver> driver, Exchange& exchange, const TrialSetting& setting)
      : driver_(std::move(driver)),
        exchange_(exchange),
        setting_(setting),
        shared_{setting.channel.shape},
        findings_(setting.channel.shape.ranks) {}

  /// Closing a queue may hang, so it has a deadline too.
  ~DeviceTrial() {
    contain("closing the queue of the first exchange between GPU kernels", [&] {
      (void)call_or_throw<bool>("the driver", Deadline::after(setting_.farewell), [work = std::move(work_)]() mutable {
        work.reset();
        return true;
      });
    });
  }
  DeviceTrial(const DeviceTrial&) = delete;
  DeviceTrial& operator=(const DeviceTrial&) = delete;

  TrialVerdict run(kernel::KernelLauncher& launcher) {
    write_pieces();
    launch(launcher);
    const bool whole = ended() == kTrialEpochs && look_at_pieces();
    if (tell_end(whole)) return {std::vector<PairVerdict>(ranks()), false, ""};
    // All ranks' kernels have ended, so their stores are now visible here, however late, or were lost.
    if (ended() < kTrialEpochs) look_at_pads();
    return judge();
  }

 private:
  uint32_t ranks() const { return setting_.channel.shape.ranks; }
  uint32_t me() const { return uint32_t(setting_.rank); }
  std::byte* desk() const { return setting_.desk->host(); }
  std::byte* desk_of_device() const { return reinterpret_cast<std::byte*>(setting_.desk->base()); }
  const kernel::Control& control() const { return *setting_.control; }

  void write_pieces() {
    for (uint32_t stage = 0; stage < kTrialEpochs; ++stage) {
      for (size_t i = 0; i < shared_.piece(stage); ++i) desk()[shared_.sent(stage) + i] = pattern(me(), stage, i);
    }
  }

  std::vector<kernel::Job> jobs() const {
    std::vector<kernel::Job> jobs(kTrialEpochs);
    for (uint32_t stage = 0; stage < kTrialEpochs; ++stage) {
      kernel::Job& job = jobs[stage];
      const size_t bytes = shared_.piece(stage);
      job.algorithm = kTrialStages[stage].algorithm;
      job.fingerprint.collective = kernel::Collective::kAllGather;
      job.fingerprint.count = bytes * ranks();
      job.send = {kernel::Pieces::Kind::kSame, 0, desk_of_device() + shared_.sent(stage), bytes};
      job.recv = {kernel::Pieces::Kind::kEven, 0, desk_of_device() + shared_.received(stage, 0), bytes};
      job.patience_ns = uint64_t(std::chrono::nanoseconds(setting_.patience).count());
    }
    return jobs;
  }

  /// Returns when the kernel has ended.
  void launch(kernel::KernelLauncher& launcher) {
    const Deadline deadline = Deadline::after(kTrialEpochs * setting_.patience + setting_.farewell);
    const auto open = [driver = driver_, device = setting_.device, touches = setting_.touches] {
      return std::make_shared<DeviceWork>(driver, device, touches);
    };
    work_ = call_or_throw<std::shared_ptr<DeviceWork>>("opening a queue", deadline, open);
    const Status begun = launcher.launch_on_queue(work_->lend(), setting_.channel, jobs(), {});
    drain(deadline, "the first exchange between GPU kernels");
    if (!begun.ok()) throw Error(begun);
  }

  /// Starts a copy if `from` is set, and waits for all work in the queue.
  void drain(const Deadline& deadline, const std::string& what, DevicePtr from = 0) {
    const auto steps = [work = work_, deadline, from, to = setting_.desk->base(), bytes = shared_.pad_bytes()] {
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

  /// The number of stages that have ended well here.
  uint32_t ended() const {
    if (kernel::least_ended(control(), setting_.channel.shape.blocks).epoch == setting_.first_epoch + kTrialEpochs)
      return kTrialEpochs;
    const kernel::DeviceVerdict& verdict = control().verdict;
    return verdict.state == kernel::DeviceVerdict::kReadable ? verdict.epoch - setting_.first_epoch - 1 : 0;
  }

  /// Whether the data received from all ranks is correct.
  bool look_at_pieces() {
    bool whole = true;
    for (uint32_t stage = 0; stage < kTrialEpochs; ++stage) {
      for (uint32_t p = 0; p < ranks(); ++p) {
        const std::byte* const piece = desk() + shared_.received(stage, p);
        size_t at = 0;
        while (at < shared_.piece(stage) && piece[at] == pattern(p, stage, at)) ++at;
        if (at == shared_.piece(stage)) continue;
        whole = false;
        find(p, PairState::kCorrupt, stage,
             "data that kernels send is corrupt from byte " + std::to_string(at) + " on, but copied data is intact");
      }
    }
    return whole;
  }

  void find(uint32_t peer, PairState state, uint32_t stage, const std::string& why) {
    if (findings_[peer].state != uint32_t(PairState::kFine)) return;
    findings_[peer].state = uint32_t(state);
    findings_[peer].stage = stage;
    put(findings_[peer].why, why);
  }

  /// Publishes this rank's end. Returns whether all ranks have ended well.
  bool tell_end(bool whole) {
    TrialCard card;
    card.rank = setting_.rank;
    card.ended = ended();
    card.whole = whole;
    const auto cards = read_cards<TrialCard>(exchange_.all_gather(bytes_of(card)), 1, setting_.name);
    bool well = true;
    for (uint32_t r = 0; r < ranks(); ++r) {
      if (cards[r].magic != TrialCard::kMagic || cards[r].rank != int32_t(r))
        throw Error(Code::kMismatch,
                    "nvx: " + setting_.name(int(r)) + " describes its GPU in the format of another version of nvx",
                    kOneVersion);
      well = well && cards[r].ended == kTrialEpochs && cards[r].whole == 1;
    }
    return well;
  }

  /// Finds the peers whose first packets, or in the second stage whose flags, are missing or wrong.
  void look_at_pads() {
    const kernel::DeviceVerdict& verdict = control().verdict;
    const std::string though = ", but copied data is intact";
    if (verdict.peer >= 0 && verdict.cause != kernel::Verdict::Cause::kWait)
      find(uint32_t(verdict.peer), PairState::kCorrupt, ended(), "data that kernels send is corrupt" + though);
    for (uint32_t p = 0; p < ranks(); ++p) {
      if (p == me()) continue;
      if (copied_ != setting_.pads[p].mine) copy_pad(setting_.pads[p].mine);
      if (!has_greeted(p))
        find(p, PairState::kHung, 0, "no store of a kernel arrives" + though);
      else if (ended() == 1 && verdict.peer == int32_t(p) && has_greeted(p, 1) && !has_posted(p))
        find(p, PairState::kHung, 1, "no signal of a kernel arrives" + though);
    }
  }

  void copy_pad(const std::byte* pad) {
    drain(Deadline::after(setting_.farewell), "reading the pad", reinterpret_cast<DevicePtr>(pad));
    copied_ = pad;
  }

  template <class Cell>
  const Cell& cell(Part part, uint32_t block, uint32_t peer) const {
    return *reinterpret_cast<const Cell*>(desk() + DevicePad{shared_.shape}.offset(part, block, peer));
  }
  /// Checks all blocks: a block that saw another one fail does not begin.
  bool has_greeted(uint32_t peer, uint32_t stage = 0) const {
    const uint32_t epoch = setting_.first_epoch + 1 + stage;
    bool greeted = false;
    for (uint32_t block = 0; block < shared_.shape.blocks; ++block) {
      const auto& packet = cell<kernel::Packet>(DevicePad::of(Part::kGreetings, epoch % kernel::kBuffers), block, peer);
      greeted = greeted || kernel::is_stamped(packet, epoch);
    }
    return greeted;
  }
  bool has_posted(uint32_t peer) const {
    return cell<kernel::PeerCounters>(Part::kCounters, control().verdict.block, peer).posted != 0;
  }

  /// The first stage with a finding decides, since it also makes later stages fail.
  TrialVerdict judge() {
    const auto all =
        read_cards<TrialFinding>(exchange_.all_gather(std::as_bytes(std::span(findings_))), ranks(), setting_.name);
    const auto is_fine = [](const TrialFinding& f) { return f.state == uint32_t(PairState::kFine); };
    uint32_t first = UINT32_MAX;
    for (const TrialFinding& f : all) first = is_fine(f) ? first : std::min(first, f.stage);
    TrialVerdict verdict{std::vector<PairVerdict>(ranks()), true, "a rank took part too late"};
    for (size_t i = all.size(); i-- > 0;) {
      if (is_fine(all[i]) || all[i].stage != first) continue;
      const size_t by = i / ranks(), of = i % ranks();
      const PairVerdict pair{PairState(std::min(all[i].state, uint32_t(PairState::kCorrupt))), text_of(all[i].why)};
      verdict.why = "from " + setting_.name(int(of)) + " to " + setting_.name(int(by)) + ": " + pair.why;
      if (by == me()) verdict.peers[of] = pair;
      if (of == me()) verdict.peers[by] = pair;
    }
    return verdict;
  }

  const std::shared_ptr<DeviceDriver> driver_;
  Exchange& exchange_;
  const TrialSetting& setting_;
  const Shared shared_;
  std::vector<TrialFinding> findings_;  // by peer
  std::shared_ptr<DeviceWork> work_;    // the queue of the kernel, and then of the copies of pads
  const std::byte* copied_ = nullptr;   // the pad copied to `desk`
};

}  // namespace

size_t trial_bytes(const kernel::DeviceShape& shape) { return Shared{shape}.bytes(); }

TrialVerdict try_kernels(std::shared_ptr<DeviceDriver> driver, Exchange& exchange, kernel::KernelLauncher& launcher,
                         const TrialSetting& setting) {
  return DeviceTrial(std::move(driver), exchange, setting).run(launcher);
}

}  // namespace nvx
