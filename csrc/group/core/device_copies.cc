#include "group/core/device_copies.h"

#include <algorithm>
#include <bit>
#include <iterator>
#include <utility>

#include "base/contain.h"
#include "base/flag.h"
#include "base/reason.h"
#include "memory/driver/beside_captures.h"
#include "memory/driver/thread_call.h"

namespace nvx {
namespace {

using Regions = std::vector<std::shared_ptr<DeviceRegion>>;

constexpr size_t kLeastLease = 256 << 10, kMostLease = 16 << 20;

/// A copy that failed may have begun, so its memory stays until the process ends.
void keep_for_ever(const std::shared_ptr<DeviceCopy>& copy) {
  static Mutex mutex;
  static auto* const kKept = new std::vector<std::shared_ptr<DeviceCopy>>;
  MutexLock lock(mutex);
  kKept->push_back(copy);
}

}  // namespace

std::shared_ptr<DeviceCopies> DeviceCopies::of(Setting setting) {
  const std::shared_ptr<DeviceCopies> copies(new DeviceCopies(std::move(setting)));
  copies->poller_ = std::make_shared<Poller>(
      [weak = std::weak_ptr<DeviceCopies>(copies)] {
        const std::shared_ptr<DeviceCopies> there = weak.lock();
        return Poller::Seen{there && there->look(), {}};
      },
      Poller::kSoon);
  return copies;
}

/// No copy runs any more. The driver may hang in what it is told here.
DeviceCopies::~DeviceCopies() {
  struct Last {
    std::vector<std::unique_ptr<DeviceWork>> queues;
    std::vector<Peer> peers;
  };
  const auto last = std::make_shared<Last>(Last{std::move(idle_), std::move(setting_.peers)});
  contain("closing the queues of messages", [&] {
    (void)call_or_throw<bool>("the driver", Deadline::after(setting_.patience), [last] {
      *last = {};
      return true;
    });
  });
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
  DeviceArena& arena = *setting_.arena;
  size_t wanted = std::clamp(std::bit_ceil(bytes), kLeastLease, kMostLease);
  for (; !span && wanted >= kLeastLease; wanted /= 2) {
    if (2 * wanted <= arena.region().bytes() - arena.used()) span = arena.find(wanted);
  }
  return span;
}

void DeviceCopies::begin(const std::shared_ptr<DeviceCopy>& copy) {
  {
    MutexLock lock(mutex_);
    begun_.push_back(copy);
    kept_ = shared_from_this();
  }
  if (poller_->wake()) return;
  MutexLock lock(mutex_);
  std::erase(begun_, copy);
  lock.unlock();
  end(*copy, DeviceCopy::State::kEnded, Status(Code::kSystem, "nvx: no thread could be started for a message"));
}

/// Most copies take some microseconds, so this looks again for a moment. True if any copy still runs.
bool DeviceCopies::look() {
  constexpr std::chrono::microseconds kMoment{50};
  const BesideCaptures beside;
  for (const auto until = Clock::now() + kMoment;; relax()) {
    {
      MutexLock lock(mutex_);
      std::move(begun_.begin(), begun_.end(), std::back_inserter(flying_));
      begun_.clear();
      if (flying_.empty()) kept_.reset();
    }
    if (flying_.empty()) return false;
    const size_t ended = std::erase_if(flying_, [this](const auto& copy) { return advance(copy); });
    if (ended == 0 && Clock::now() >= until) return true;
  }
}

/// Begins a copy, or looks whether it has ended. True if it is over.
bool DeviceCopies::advance(const std::shared_ptr<DeviceCopy>& copy) {
  try {
    if (!copy->work_) {
      if (idle_.empty()) idle_.push_back(std::make_unique<DeviceWork>(setting_.driver, setting_.device, Regions()));
      copy->work_ = std::move(idle_.back());
      idle_.pop_back();
      for (const DeviceCopy::Piece& piece : copy->pieces) copy->work_->copy(piece.to, piece.from, piece.bytes);
    }
    const Clock::time_point now = Clock::now();
    if (!copy->work_->drain({now, now})) return false;
    idle_.push_back(std::move(copy->work_));
    end(*copy, DeviceCopy::State::kEnded, {});
  } catch (const std::exception& error) {
    keep_for_ever(copy);
    end(*copy, DeviceCopy::State::kLost, Status(system_failure("a message could not be copied between GPUs", error)));
  }
  return true;
}

void DeviceCopies::end(DeviceCopy& copy, DeviceCopy::State state, const Status& status) {
  copy.status_ = status;
  if (state == DeviceCopy::State::kEnded) copy.memory.reset();
  copy.state_.store(state, std::memory_order_release);
  copy.tell();
}

}  // namespace nvx
