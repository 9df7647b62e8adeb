#include "net/point_to_point.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <utility>

#include "base/round_up.h"
#include "net/group_port.h"

namespace nvx::net {
namespace {

/// The cost of a control message is its memory in units of 64 bytes: of an announcement 1 KiB and its body. A rank's
/// unread control messages may cost 16 MiB.
constexpr uint64_t kUnit = 64, kMostUnread = (16 << 20) / kUnit, kAnnouncement = (1 << 10) / kUnit;

/// The most that segments without a grant may cost: of one sender to one receiver, enough for 4 MiB of data, and of all
/// senders of a group to one receiver, which keeps them.
constexpr uint64_t kMostAhead = (4 << 20) + (128 << 10), kMostAheadOfAll = 64 << 20;

uint64_t cost_of(std::span<const std::byte> segment) { return segment.size() + kSegmentCost; }

uint64_t cost_of(const PointToPoint::Control& control) {
  return control.kind == Kind::kEnvelope ? kAnnouncement + control.body.size() / kUnit : 1;
}

uint64_t key_of(int rank, uint64_t number) { return uint64_t(rank) << 32 | uint32_t(number); }

template <class Queue>
std::optional<typename Queue::value_type> pop(Queue& queue) {
  if (queue.empty()) return std::nullopt;
  auto next = std::move(queue.front());
  queue.pop_front();
  return next;
}

}  // namespace

PointToPoint::PointToPoint(GroupPort& port, int ranks)
    : port_(port), ranks_(size_t(ranks)), most_ahead_(std::min(kMostAhead, kMostAheadOfAll / uint64_t(ranks))) {}

std::optional<PointToPoint::Control> PointToPoint::next_control() {
  std::optional<Control> control = pop(controls_);
  if (control) ranks_[size_t(control->from)].unread -= cost_of(*control);
  return control;
}

void PointToPoint::take_control(const MessageHeader& header, std::span<const std::byte> whole,
                                std::span<const std::byte> body) {
  port_.mutex().held_by_caller();
  if (header.kind == Kind::kGrant) return take_grant(key_of(int(header.from), header.value));
  Control control{header.kind, int(header.from), header.value, {}, {}};
  if (header.kind == Kind::kEnvelope) {
    const auto envelope = read_behind_header<Envelope>(whole);
    if (!envelope || body.size() > kMostEager || (envelope->carries_data && body.size() != envelope->bytes)) return;
    control.envelope = *envelope;
    control.body.assign(body.begin(), body.end());
  }
  if ((ranks_[header.from].unread += cost_of(control)) > kMostUnread)
    return port_.disconnect(int(header.from), kExceedsCredit);
  controls_.push_back(std::move(control));
  notify_();
}

void PointToPoint::announce(int rank, const Envelope& envelope, std::span<const std::byte> body, Owner owner) {
  port_.mutex().held_by_caller();
  const auto behind = std::as_bytes(std::span(&envelope, 1));
  if (!owner) return port_.send(rank, {Kind::kEnvelope}, behind, body);
  const Key key = key_of(rank, envelope.number);
  outgoing_[key] = {.rank = rank,
                    .data = nullptr,
                    .bytes = body.size(),
                    .owner = std::move(owner),
                    .moved = body.size(),
                    .busy = 1,
                    .may_move = body.size(),
                    .granted = true};
  port_.send(rank, {Kind::kEnvelope}, behind, body, this, key);
}

void PointToPoint::grant(int rank, uint64_t number, std::byte* data, size_t bytes, Owner owner) {
  port_.mutex().held_by_caller();
  const Key key = key_of(rank, number);
  Transfer& transfer = incoming_[key] = {.rank = rank, .data = data, .bytes = bytes, .owner = std::move(owner)};
  transfer.seen.resize(ceil_div(bytes, port_.messenger().segment_bytes()));
  const auto early = early_.extract(key);
  if (early) {
    for (const Early& one : early.mapped()) ranks_[size_t(rank)].kept -= cost_of(one.body);
  }
  port_.send(rank, {Kind::kGrant, number});  // the sender may send as much again ahead of other grants
  if (!early) return;
  for (const Early& one : early.mapped()) {
    if (store(key, transfer, one.segment, one.body)) return;
  }
}

void PointToPoint::send(int rank, uint64_t number, const std::byte* data, size_t bytes, bool is_full, Owner owner) {
  const Key key = key_of(rank, number);
  Transfer& transfer =
      outgoing_[key] = {.rank = rank, .data = const_cast<std::byte*>(data), .bytes = bytes, .owner = std::move(owner)};
  const size_t segment = port_.messenger().segment_bytes();
  Rank& there = ranks_[size_t(rank)];
  while (!is_full && transfer.may_move != bytes) {
    const std::span<const std::byte> next(data + transfer.may_move, std::min(segment, bytes - transfer.may_move));
    if (there.ahead + cost_of(next) > most_ahead_) break;
    there.ahead += cost_of(next);
    transfer.ahead += cost_of(next);
    transfer.may_move += next.size();
  }
  push(key, transfer);
}

void PointToPoint::take_grant(Key key) {
  const auto found = outgoing_.find(key);
  if (found == outgoing_.end() || std::exchange(found->second.granted, true)) return;
  Transfer& transfer = found->second;
  ranks_[size_t(transfer.rank)].ahead -= std::exchange(transfer.ahead, 0);
  transfer.may_move = transfer.bytes;
  if (transfer.moved == transfer.bytes) return end_if_over(key, transfer);
  push(key, transfer);
}

/// Sends a few segments at a time; more follow when the link has read those.
void PointToPoint::push(Key key, Transfer& transfer) {
  constexpr int kMostInLink = 8;
  port_.mutex().held_by_caller();
  const size_t segment = port_.messenger().segment_bytes();
  while (transfer.moved != transfer.may_move && transfer.busy < kMostInLink && !transfer.failed) {
    const size_t bytes = std::min(segment, transfer.bytes - transfer.moved);
    MessageHeader header(Kind::kSegment);
    header.op = uint32_t(key);
    header.segment = uint32_t(transfer.moved / segment);
    const std::byte* data = transfer.data + transfer.moved;
    transfer.moved += bytes;
    ++transfer.busy;
    const bool last = transfer.moved == transfer.bytes;
    port_.send(transfer.rank, header, {}, {data, bytes}, this, key);
    if (last) return;  // it may have ended, and been erased, inside send()
  }
}

/// The link has read a segment of this transfer.
void PointToPoint::sent(uint64_t cookie, const Status& status) {
  const auto found = outgoing_.find(cookie);
  if (found == outgoing_.end()) return;
  Transfer& transfer = found->second;
  --transfer.busy;
  transfer.failed |= !status.ok();  // the loss of the rank is reported elsewhere
  if (transfer.moved != transfer.may_move) {
    to_push_.push_back(cookie);
    notify_();
  }
  end_if_over(cookie, transfer);
}

void PointToPoint::end_if_over(Key key, Transfer& transfer) {
  if (!transfer.granted || transfer.busy != 0 || transfer.moved != transfer.bytes || transfer.failed) return;
  done_.push_back(std::move(transfer.owner));
  outgoing_.erase(key);
  notify_();
}

bool PointToPoint::fits(const Transfer& transfer, uint32_t segment, size_t bytes) const {
  const size_t most = port_.messenger().segment_bytes();
  return segment < transfer.seen.size() && bytes == std::min(most, transfer.bytes - size_t(segment) * most);
}

std::byte* PointToPoint::place(const MessageHeader& header, size_t bytes) {
  const auto found = incoming_.find(key_of(int(header.from), header.op));
  if (found == incoming_.end()) return nullptr;
  Transfer& transfer = found->second;
  if (!fits(transfer, header.segment, bytes) || transfer.seen[header.segment]) return nullptr;
  transfer.seen[header.segment] = true;
  ++transfer.busy;
  return transfer.data + size_t(header.segment) * port_.messenger().segment_bytes();
}

bool PointToPoint::dropped(const std::byte* where) {
  for (auto& [key, transfer] : incoming_) {
    if (where < transfer.data || where >= transfer.data + transfer.bytes) continue;
    --transfer.busy;
    transfer.seen[size_t(where - transfer.data) / port_.messenger().segment_bytes()] = false;
    return true;
  }
  return false;
}

void PointToPoint::take_segment(const MessageHeader& header, std::span<const std::byte> body) {
  const Key key = key_of(int(header.from), header.op);
  const auto found = incoming_.find(key);
  if (found == incoming_.end()) return keep(header, body);
  (void)store(key, found->second, header.segment, body);
}

/// Keeps a segment whose message has no grant yet.
void PointToPoint::keep(const MessageHeader& header, std::span<const std::byte> body) {
  port_.mutex().held_by_caller();
  if (dropped_ || body.empty()) return;
  uint64_t& kept = ranks_[header.from].kept;
  if (kept + cost_of(body) > most_ahead_) return port_.disconnect(int(header.from), kExceedsCredit);
  early_[key_of(int(header.from), header.op)].push_back({header.segment, {body.begin(), body.end()}});
  kept += cost_of(body);
}

/// Returns true if this was the last segment: the transfer does not exist any more.
bool PointToPoint::store(Key key, Transfer& transfer, uint32_t segment, std::span<const std::byte> body) {
  if (!fits(transfer, segment, body.size())) return false;
  std::byte* const to = transfer.data + size_t(segment) * port_.messenger().segment_bytes();
  if (transfer.busy != 0 && body.data() == to) {
    --transfer.busy;
  } else if (transfer.seen[segment]) {
    return false;
  } else {
    transfer.seen[segment] = true;
    std::memcpy(to, body.data(), body.size());
  }
  transfer.moved += body.size();
  if (transfer.moved != transfer.bytes) return false;
  done_.push_back(std::move(transfer.owner));
  incoming_.erase(key);
  notify_();
  return true;
}

PointToPoint::Owner PointToPoint::next_done() {
  for (const Key key : std::exchange(to_push_, {})) {
    if (const auto found = outgoing_.find(key); found != outgoing_.end()) push(key, found->second);
  }
  return pop(done_).value_or(nullptr);
}

int PointToPoint::busy() const {
  int segments = 0;
  for (const auto* transfers : {&outgoing_, &incoming_}) {
    for (const auto& [key, transfer] : *transfers) segments += transfer.busy;
  }
  return segments;
}

void PointToPoint::disconnect_busy() {
  port_.mutex().held_by_caller();
  for (const auto* transfers : {&outgoing_, &incoming_}) {
    for (const auto& [key, transfer] : *transfers) {
      if (transfer.busy != 0) port_.disconnect(transfer.rank);
    }
  }
}

void PointToPoint::drop() {
  port_.messenger().mutex().held_by_caller();
  dropped_ = true;
  for (auto& [key, transfer] : outgoing_) transfer.failed = true;                            // nothing more is sent
  for (auto& [key, transfer] : incoming_) transfer.seen.assign(transfer.seen.size(), true);  // or received
  const std::array<const Sender*, 1> self{this};
  port_.messenger().release_from_link(
      self, [this] { return busy(); }, [this] { disconnect_busy(); });
  std::ranges::fill(ranks_, Rank{});
  controls_.clear();
  outgoing_.clear();
  incoming_.clear();
  early_.clear();
  done_.clear();
}

}  // namespace nvx::net
