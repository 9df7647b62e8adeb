#include "net/segment_flow.h"

#include <algorithm>
#include <utility>

#include "net/executor.h"
#include "net/group_port.h"

namespace nvx::net {
namespace {

constexpr uint64_t kCredit = 4 << 20;          ///< cost that may be unacknowledged by a rank
constexpr uint64_t kCreditStep = kCredit / 4;  ///< a receiver acknowledges once this much has accumulated
constexpr uint64_t kReserve = kCredit / 2;  ///< beyond kCredit, for the oldest run: more than kCreditStep and a segment
constexpr size_t kMostReady = 1 << 16;      ///< kReady messages of other ranks that no step here has used yet

}  // namespace

bool SegmentFlow::take_credit(int rank, size_t bytes, bool is_oldest) {
  Rank& there = ranks_[size_t(rank)];
  const uint64_t cost = bytes + kSegmentCost, most = is_oldest ? kCredit + kReserve : kCredit;
  // The receiver does not acknowledge less than a step, so less than a step must not block the sender.
  if (there.unacknowledged >= kCreditStep && there.unacknowledged + cost > most) return false;
  there.unacknowledged += cost;
  return true;
}

void SegmentFlow::credit(uint32_t rank, uint64_t cost) {
  ranks_[rank].unacknowledged -= std::min(ranks_[rank].unacknowledged, cost);
}

void SegmentFlow::acknowledge(int rank, size_t bytes) {
  port_.mutex().held_by_caller();
  Rank& there = ranks_[size_t(rank)];
  there.to_acknowledge += bytes + kSegmentCost;
  if (there.to_acknowledge < kCreditStep) return;
  port_.send(rank, {Kind::kCredit, std::exchange(there.to_acknowledge, 0)});
}

void SegmentFlow::keep(const MessageHeader& header, const std::optional<First>& first,
                       std::span<const std::byte> body) {
  port_.mutex().held_by_caller();
  Rank& there = ranks_[header.from];
  if (there.kept + body.size() > kCredit + kReserve + kCreditStep + port_.messenger().segment_bytes())
    return port_.disconnect(int(header.from), kExceedsCredit);
  there.kept += body.size() + kSegmentCost;
  early_[{header.op, header.run, header.from, header.message}].push_back({header, first, {body.begin(), body.end()}});
}

void SegmentFlow::forget(const Early& early) {
  ranks_[early.header.from].kept -= early.body.size() + kSegmentCost;
  acknowledge(int(early.header.from), early.body.size());
}

void SegmentFlow::note_ready(const MessageHeader& header) {
  port_.mutex().held_by_caller();
  if (ready_.size() >= kMostReady) return port_.disconnect(int(header.from), kExceedsCredit);
  ready_.insert({header.op, header.run, header.from, header.message});
}

bool SegmentFlow::take_ready(const ScheduleRun& run, int to, uint16_t message) {
  return ready_.erase({run.op(), run.number(), uint32_t(to), message}) != 0;
}

void SegmentFlow::offer(ScheduleRun& run, int from, uint16_t message) {
  if (early_.empty()) return;
  const auto it = early_.find({run.op(), run.number(), uint32_t(from), message});
  if (it == early_.end()) return;
  std::erase_if(it->second, [&](const Early& early) {
    if (run.take(early.header, early.first, early.body) == ScheduleRun::Outcome::kLater) return false;
    forget(early);
    return true;
  });
  if (it->second.empty()) early_.erase(it);
}

void SegmentFlow::compare(ScheduleRun& run) {
  for (auto it = early_.lower_bound({run.op(), run.number(), 0, 0}); it != early_.end(); ++it) {
    if (it->first.op != run.op() || it->first.run != run.number()) break;
    for (const Early& early : it->second) {
      if (early.first) run.compare(early.header.from, *early.first);
    }
  }
}

void SegmentFlow::drop(uint32_t first_op, uint32_t last_op) {
  std::erase_if(ready_, [&](const Message& message) { return message.op >= first_op && message.op <= last_op; });
  auto it = early_.lower_bound({first_op, 0, 0, 0});
  while (it != early_.end() && it->first.op <= last_op) {
    for (const Early& early : it->second) {
      if (early.first) port_.calls().note_late({int(early.header.from), early.header.op, early.first->fingerprint});
      forget(early);
    }
    it = early_.erase(it);
  }
}

}  // namespace nvx::net
