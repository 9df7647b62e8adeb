#include "group/core/device_copies.h"

#include <algorithm>
#include <bit>
#include <iterator>
#include <utility>

#include "base/error.h"
#include "base/flag.h"
#include "base/per_process.h"
#include "memory/driver/relaxed_capture_guard.h"
#include "memory/driver/thread_call.h"

namespace nvx {
namespace {

using Streams = std::vector<std::unique_ptr<DeviceWork>>;

constexpr size_t kLeastLease = 256 << 10, kMostLease = DeviceArena::kForMessages / 2;
constexpr int kStreams = 2;

}  // namespace

std::shared_ptr<DeviceCopies> DeviceCopies::of(Setting setting) {
  const auto open = [driver = setting.driver, device = setting.device] {
    const RelaxedCaptureGuard relaxed;
    Streams streams;
    for (int i = 0; i < kStreams; ++i)
      streams.push_back(std::make_unique<DeviceWork>(driver, device, std::vector<std::shared_ptr<DeviceRegion>>()));
    return streams;
  };
  Streams streams = call_or_throw<Streams>("creating streams for messages", Deadline::after(setting.timeout), open);
  const std::shared_ptr<DeviceCopies> copies(new DeviceCopies(std::move(setting)));
  copies->idle_ = std::move(streams);
  copies->poller_ = Poller::of(copies->weak_from_this(), &DeviceCopies::progress, Poller::kSoon);
  return copies;
}

/// No copy runs any more. The driver may hang in the calls below. The streams are destroyed before the mappings.
DeviceCopies::~DeviceCopies() {
  destroy_on_thread("destroying the streams of messages", std::pair(std::move(setting_.peers), std::move(idle_)),
                    setting_.timeout);
}

uint64_t DeviceCopies::place_of(DevicePtr at, size_t bytes) const {
  return setting_.place_of(reinterpret_cast<const std::byte*>(at), bytes);
}

DevicePtr DeviceCopies::in_pool(int local_rank, uint64_t offset, uint64_t bytes) const {
  const std::shared_ptr<PeerPool>& pool = peer(local_rank).pool;
  const uint64_t mapped = pool ? pool->mapped() : 0;
  return offset < mapped && bytes <= mapped - offset ? pool->base() + offset : 0;
}

DevicePtr DeviceCopies::in_arena(int local_rank, uint64_t offset, uint64_t bytes) const {
  const Peer& it = peer(local_rank);
  return offset < it.bytes && bytes <= it.bytes - offset ? it.theirs + offset : 0;
}

/// At most half of what is left, so that messages of other pairs find room too.
Span DeviceCopies::lease(size_t bytes) {
  Span span;
  SpanAllocator& spans = setting_.arena->messages();
  size_t wanted = std::clamp(std::bit_ceil(bytes), kLeastLease, kMostLease);
  for (; !span && wanted >= kLeastLease; wanted /= 2) {
    if (2 * wanted <= DeviceArena::kForMessages - spans.used()) span = spans.find(wanted);
  }
  return span;
}

void DeviceCopies::begin(const std::shared_ptr<DeviceCopy>& copy) {
  {
    MutexLock lock(mutex_);
    copy->copies_ = shared_from_this();
    begun_.push_back(copy);
  }
  if (poller_->wake()) return;
  MutexLock lock(mutex_);
  if (std::erase(begun_, copy) == 0) return;  // a poller that was running has taken it
  lock.unlock();
  end(*copy, DeviceCopy::State::kEnded, Status(Code::kSystem, "nvx: no thread could be started for a message"));
}

/// Polls for a further 50 us after a copy has begun or ended, since most take microseconds. True if any still runs.
bool DeviceCopies::progress() {
  constexpr std::chrono::microseconds kPollFor{50};
  const RelaxedCaptureGuard relaxed;
  for (;; relax()) {
    {
      MutexLock lock(mutex_);
      std::ranges::move(begun_, std::back_inserter(in_flight_));
      begun_.clear();
    }
    if (in_flight_.empty()) return false;
    std::erase_if(in_flight_, [this](const auto& copy) { return advance(copy); });
    if (Clock::now() >= last_change_ + kPollFor) return !in_flight_.empty();
  }
}

/// Begins a copy, or checks whether it has ended. True if it is over.
bool DeviceCopies::advance(const std::shared_ptr<DeviceCopy>& copy) {
  try {
    if (!copy->work_) {
      const bool given_up = copy->given_up_.load(std::memory_order_acquire);
      if (given_up || !lost_.ok()) {
        end(*copy, DeviceCopy::State::kEnded,
            lost_.ok() ? Status(Code::kAborted, "nvx: a message was given up") : lost_);
        return true;
      }
      if (idle_.empty()) return false;
      copy->work_ = std::move(idle_.back());
      idle_.pop_back();
      last_change_ = Clock::now();
      for (const DeviceCopy::Piece& piece : copy->pieces) {
        copy->work_->copy(piece.to, piece.from, piece.bytes);
        copy->begun_ = true;
      }
    }
    const Clock::time_point now = Clock::now();
    if (!copy->work_->drain({now, now})) return false;
    last_change_ = now;
    idle_.push_back(std::move(copy->work_));
    end(*copy, DeviceCopy::State::kEnded, {});
  } catch (const std::exception& error) {
    const Status why(system_failure("a message could not be copied between GPUs", error));
    if (copy->begun_) {
      keep_until_exit(copy);  // it may still run
      lost_ = why;
    } else {
      idle_.push_back(std::move(copy->work_));
    }
    end(*copy, copy->begun_ ? DeviceCopy::State::kLost : DeviceCopy::State::kEnded, why);
  }
  return true;
}

void DeviceCopies::end(DeviceCopy& copy, DeviceCopy::State state, const Status& status) {
  copy.status_ = status;
  if (state == DeviceCopy::State::kEnded) copy.memory.reset(), copy.copies_.reset();
  copy.state_.store(state, std::memory_order_release);
  copy.on_end();
}

}  // namespace nvx
