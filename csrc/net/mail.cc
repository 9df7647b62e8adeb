#include "net/mail.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "base/round_up.h"
#include "net/group_port.h"

namespace nvx::net {
namespace {

constexpr size_t kMostBytes = 1 << 10;  ///< with an announcement
/// The most cost of a rank's unread letters, and that of an announcement, which holds memory; of others it is 1.
constexpr uint64_t kMostUnread = 1 << 18, kAnnouncement = 16;

uint64_t cost_of(const Mail::Letter& letter) { return letter.kind == Kind::kMail ? kAnnouncement : 1; }

template <class Queue>
std::optional<typename Queue::value_type> pop(Queue& queue) {
  if (queue.empty()) return std::nullopt;
  auto next = std::move(queue.front());
  queue.pop_front();
  return next;
}

}  // namespace

std::optional<Mail::Letter> Mail::next_letter() {
  std::optional<Letter> letter = pop(letters_);
  if (letter) unread_[size_t(letter->from)] -= cost_of(*letter);
  return letter;
}

void Mail::take_letter(const MessageHeader& header, std::span<const std::byte> whole, std::span<const std::byte> body) {
  port_.mutex().held_by_caller();
  Letter letter{header.kind, int(header.from), header.value, {}, {}};
  if (header.kind == Kind::kMail) {
    const auto head = read_behind_header<MailHead>(whole);
    if (!head || body.size() > kMostBytes || (head->carries_data && body.size() != head->bytes)) return;
    letter.head = *head;
    letter.body.assign(body.begin(), body.end());
  }
  if ((unread_[header.from] += cost_of(letter)) > kMostUnread)
    return port_.disconnect(int(header.from), kExceedsCredit);
  letters_.push_back(std::move(letter));
  notify_();
}

void Mail::announce(int rank, const MailHead& head, std::span<const std::byte> body) {
  port_.mutex().held_by_caller();
  port_.send(rank, {Kind::kMail}, std::as_bytes(std::span(&head, 1)), body);
}

void Mail::grant(int rank, uint64_t number, std::byte* data, size_t bytes, Owner owner) {
  port_.mutex().held_by_caller();
  const size_t segment = port_.messenger().segment_bytes();
  incoming_.push_back({next_id_++, rank, number, data, bytes, std::move(owner)});
  incoming_.back().seen.resize(ceil_div(bytes, segment));
  port_.send(rank, {Kind::kGrant, number});
}

void Mail::send(int rank, uint64_t number, const std::byte* data, size_t bytes, Owner owner) {
  outgoing_.push_back({next_id_++, rank, number, const_cast<std::byte*>(data), bytes, std::move(owner)});
  push();
}

/// Sends a few segments of each transfer at a time; more follow when the link has read those.
void Mail::push() {
  constexpr int kMostUnread = 8;
  port_.mutex().held_by_caller();
  const size_t segment = port_.messenger().segment_bytes();
  for (auto it = outgoing_.begin(); it != outgoing_.end();) {
    Transfer& transfer = *it++;  // the transfer may end, and be erased, inside send()
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
      if (last) break;
    }
  }
}

/// The link has read a segment of the transfer with this id.
void Mail::sent(uint64_t cookie, const Status& status) {
  const auto it = std::ranges::find(outgoing_, cookie, &Transfer::id);
  if (it == outgoing_.end()) return;
  --it->busy;
  it->failed |= !status.ok();  // the loss of the rank is reported elsewhere
  if (it->busy == 0 && it->moved == it->bytes && !it->failed) {
    done_.push_back(std::move(it->owner));
    outgoing_.erase(it);
  }
  notify_();  // a segment can be sent, or a transfer is complete
}

/// The granted message of a segment with this length, or null.
Mail::Transfer* Mail::transfer_of(const MessageHeader& header, size_t bytes) {
  const size_t segment = port_.messenger().segment_bytes();
  for (Transfer& transfer : incoming_) {
    if (transfer.rank != int(header.from) || uint32_t(transfer.number) != header.op) continue;
    const bool fits = header.segment < transfer.seen.size() &&
                      bytes == std::min(segment, transfer.bytes - size_t(header.segment) * segment);
    return fits ? &transfer : nullptr;
  }
  return nullptr;
}

std::byte* Mail::place(const MessageHeader& header, size_t bytes) {
  Transfer* const transfer = transfer_of(header, bytes);
  if (!transfer || transfer->seen[header.segment]) return nullptr;
  transfer->seen[header.segment] = true;
  ++transfer->busy;
  return transfer->data + size_t(header.segment) * port_.messenger().segment_bytes();
}

bool Mail::dropped(const std::byte* where) {
  for (Transfer& transfer : incoming_) {
    if (where < transfer.data || where >= transfer.data + transfer.bytes) continue;
    --transfer.busy;
    transfer.seen[size_t(where - transfer.data) / port_.messenger().segment_bytes()] = false;
    return true;
  }
  return false;
}

void Mail::take_segment(const MessageHeader& header, std::span<const std::byte> body) {
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

Mail::Owner Mail::next_done() {
  push();
  return pop(done_).value_or(nullptr);
}

int Mail::busy() const {
  int segments = 0;
  for (const std::list<Transfer>* transfers : {&outgoing_, &incoming_}) {
    for (const Transfer& transfer : *transfers) segments += transfer.busy;
  }
  return segments;
}

void Mail::disconnect_busy() {
  port_.mutex().held_by_caller();
  for (const std::list<Transfer>* transfers : {&outgoing_, &incoming_}) {
    for (const Transfer& transfer : *transfers) {
      if (transfer.busy != 0) port_.disconnect(transfer.rank);
    }
  }
}

void Mail::drop() {
  port_.messenger().mutex().held_by_caller();
  for (Transfer& transfer : outgoing_) transfer.failed = true;                            // nothing more is sent
  for (Transfer& transfer : incoming_) transfer.seen.assign(transfer.seen.size(), true);  // nothing more is received
  const std::array<const Sender*, 1> self{this};
  port_.messenger().release_from_link(
      self, [this] { return busy(); }, [this] { disconnect_busy(); });
  std::ranges::fill(unread_, 0);
  letters_.clear();
  outgoing_.clear();
  incoming_.clear();
  done_.clear();
}

}  // namespace nvx::net
