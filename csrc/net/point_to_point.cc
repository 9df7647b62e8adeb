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

uint64_t cost_of(const PointToPoint::Control& control) {
  return control.kind == Kind::kEnvelope ? kAnnouncement + control.body.size() / kUnit : 1;
}

template <class Queue>
std::optional<typename Queue::value_type> pop(Queue& queue) {
  if (queue.empty()) return std::nullopt;
  auto next = std::move(queue.front());
  queue.pop_front();
  return next;
}

}  // namespace

std::optional<PointToPoint::Control> PointToPoint::next_control() {
  std::optional<Control> control = pop(controls_);
  if (control) unread_[size_t(control->from)] -= cost_of(*control);
  return control;
}

void PointToPoint::take_control(const MessageHeader& header, std::span<const std::byte> whole,
                                std::span<const std::byte> body) {
  port_.mutex().held_by_caller();
  Control control{header.kind, int(header.from), header.value, {}, {}};
  if (header.kind == Kind::kEnvelope) {
    const auto envelope = read_behind_header<Envelope>(whole);
    if (!envelope || body.size() > kMostEager || (envelope->carries_data && body.size() != envelope->bytes)) return;
    control.envelope = *envelope;
    control.body.assign(body.begin(), body.end());
  }
  if ((unread_[header.from] += cost_of(control)) > kMostUnread)
    return port_.disconnect(int(header.from), kExceedsCredit);
  controls_.push_back(std::move(control));
  notify_();
}

void PointToPoint::announce(int rank, const Envelope& envelope, std::span<const std::byte> body, Owner owner) {
  port_.mutex().held_by_caller();
  const auto behind = std::as_bytes(std::span(&envelope, 1));
  if (!owner) return port_.send(rank, {Kind::kEnvelope}, behind, body);
  const uint64_t id = next_id_++;
  outgoing_.push_back({.id = id,
                       .rank = rank,
                       .number = envelope.number,
                       .data = nullptr,
                       .bytes = body.size(),
                       .owner = std::move(owner),
                       .moved = body.size(),
                       .busy = 1});
  port_.send(rank, {Kind::kEnvelope}, behind, body, this, id);
}

void PointToPoint::grant(int rank, uint64_t number, std::byte* data, size_t bytes, Owner owner) {
  port_.mutex().held_by_caller();
  const size_t segment = port_.messenger().segment_bytes();
  incoming_.push_back({next_id_++, rank, number, data, bytes, std::move(owner)});
  incoming_.back().seen.resize(ceil_div(bytes, segment));
  port_.send(rank, {Kind::kGrant, number});
}

void PointToPoint::send(int rank, uint64_t number, const std::byte* data, size_t bytes, Owner owner) {
  outgoing_.push_back({next_id_++, rank, number, const_cast<std::byte*>(data), bytes, std::move(owner)});
  push(outgoing_.back());
}

/// Sends a few segments at a time; more follow when the link has read those.
void PointToPoint::push(Transfer& transfer) {
  constexpr int kMostUnread = 8;
  port_.mutex().held_by_caller();
  const size_t segment = port_.messenger().segment_bytes();
  while (transfer.moved != transfer.bytes && transfer.busy < kMostUnread && !transfer.failed) {
    const size_t bytes = std::min(segment, transfer.bytes - transfer.moved);
    MessageHeader header(Kind::kSegment);
    header.op = uint32_t(transfer.number);
    header.segment = uint32_t(transfer.moved / segment);
    const std::byte* data = transfer.data + transfer.moved;
    transfer.moved += bytes;
    ++transfer.busy;
    const bool last = transfer.moved == transfer.bytes;
    port_.send(transfer.rank, header, {}, {data, bytes}, this, transfer.id);
    if (last) return;  // it may have ended, and been erased, inside send()
  }
}

/// The link has read a segment of the transfer with this id.
void PointToPoint::sent(uint64_t cookie, const Status& status) {
  const auto it = std::ranges::find(outgoing_, cookie, &Transfer::id);
  if (it == outgoing_.end()) return;
  --it->busy;
  it->failed |= !status.ok();  // the loss of the rank is reported elsewhere
  may_push_ |= it->moved != it->bytes;
  if (it->busy == 0 && it->moved == it->bytes && !it->failed) {
    done_.push_back(std::move(it->owner));
    outgoing_.erase(it);
  }
  notify_();  // a segment can be sent, or a transfer is complete
}

/// The granted message of a segment with this length, or null.
PointToPoint::Transfer* PointToPoint::transfer_of(const MessageHeader& header, size_t bytes) {
  const size_t segment = port_.messenger().segment_bytes();
  for (Transfer& transfer : incoming_) {
    if (transfer.rank != int(header.from) || uint32_t(transfer.number) != header.op) continue;
    const bool fits = header.segment < transfer.seen.size() &&
                      bytes == std::min(segment, transfer.bytes - size_t(header.segment) * segment);
    return fits ? &transfer : nullptr;
  }
  return nullptr;
}

std::byte* PointToPoint::place(const MessageHeader& header, size_t bytes) {
  Transfer* const transfer = transfer_of(header, bytes);
  if (!transfer || transfer->seen[header.segment]) return nullptr;
  transfer->seen[header.segment] = true;
  ++transfer->busy;
  return transfer->data + size_t(header.segment) * port_.messenger().segment_bytes();
}

bool PointToPoint::dropped(const std::byte* where) {
  for (Transfer& transfer : incoming_) {
    if (where < transfer.data || where >= transfer.data + transfer.bytes) continue;
    --transfer.busy;
    transfer.seen[size_t(where - transfer.data) / port_.messenger().segment_bytes()] = false;
    return true;
  }
  return false;
}

void PointToPoint::take_segment(const MessageHeader& header, std::span<const std::byte> body) {
  Transfer* const transfer = transfer_of(header, body.size());
  if (!transfer) return;
  std::byte* const to = transfer->data + size_t(header.segment) * port_.messenger().segment_bytes();
  if (transfer->busy != 0 && body.data() == to) {
    --transfer->busy;
  } else if (transfer->seen[header.segment]) {
    return;
  } else {
    transfer->seen[header.segment] = true;
    std::memcpy(to, body.data(), body.size());
  }
  transfer->moved += body.size();
  if (transfer->moved != transfer->bytes) return;
  done_.push_back(std::move(transfer->owner));
  std::erase_if(incoming_, [&](const Transfer& p) { return &p == transfer; });
  notify_();
}

PointToPoint::Owner PointToPoint::next_done() {
  if (std::exchange(may_push_, false)) {
    for (auto it = outgoing_.begin(); it != outgoing_.end();) push(*it++);
  }
  return pop(done_).value_or(nullptr);
}

int PointToPoint::busy() const {
  int segments = 0;
  for (const std::list<Transfer>* transfers : {&outgoing_, &incoming_}) {
    for (const Transfer& transfer : *transfers) segments += transfer.busy;
  }
  return segments;
}

void PointToPoint::disconnect_busy() {
  port_.mutex().held_by_caller();
  for (const std::list<Transfer>* transfers : {&outgoing_, &incoming_}) {
    for (const Transfer& transfer : *transfers) {
      if (transfer.busy != 0) port_.disconnect(transfer.rank);
    }
  }
}

void PointToPoint::drop() {
  port_.messenger().mutex().held_by_caller();
  for (Transfer& transfer : outgoing_) transfer.failed = true;                            // nothing more is sent
  for (Transfer& transfer : incoming_) transfer.seen.assign(transfer.seen.size(), true);  // nothing more is received
  const std::array<const Sender*, 1> self{this};
  port_.messenger().release_from_link(
      self, [this] { return busy(); }, [this] { disconnect_busy(); });
  std::ranges::fill(unread_, 0);
  controls_.clear();
  outgoing_.clear();
  incoming_.clear();
  done_.clear();
}

}  // namespace nvx::net
