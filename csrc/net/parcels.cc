#include "net/parcels.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "net/group_port.h"

namespace nvx::net {
namespace {

template <class Queue>
std::optional<typename Queue::value_type> pop(Queue& queue) {
  if (queue.empty()) return std::nullopt;
  const auto next = queue.front();
  queue.pop_front();
  return next;
}

}  // namespace

Parcels::Parcels(GroupPort& port, std::function<void()> poke) : port_(port), poke_(std::move(poke)) {}

void Parcels::expect(int rank, uint64_t number, std::byte* data, size_t bytes) {
  const size_t segment = port_.messenger().segment_bytes();
  incoming_.push_back({next_id_++, rank, number, data, bytes});
  incoming_.back().seen.resize((bytes + segment - 1) / segment);
}

void Parcels::send(int rank, uint64_t number, const std::byte* data, size_t bytes) {
  outgoing_.push_back({next_id_++, rank, number, const_cast<std::byte*>(data), bytes});
  push();
}

/// Sends a few segments of each parcel at a time; the rest follows when the link has read those.
void Parcels::push() {
  constexpr int kMostUnread = 8;
  port_.mutex().held_by_caller();
  const size_t segment = port_.messenger().segment_bytes();
  for (auto it = outgoing_.begin(); it != outgoing_.end();) {
    Parcel& parcel = *it++;  // it may be over, and gone, before send() returns
    while (parcel.moved != parcel.bytes && parcel.busy < kMostUnread && !parcel.failed) {
      const size_t bytes = std::min(segment, parcel.bytes - parcel.moved);
      MessageHeader header;
      header.kind = Kind::kParcel;
      header.op = uint32_t(parcel.number);
      header.segment = uint32_t(parcel.moved / segment);
      const std::byte* data = parcel.data + parcel.moved;
      parcel.moved += bytes;
      ++parcel.busy;
      const bool last = parcel.moved == parcel.bytes;
      port_.send(parcel.rank, header, {}, {data, bytes}, this, parcel.id);
      if (last) break;
    }
  }
}

/// The link has read a segment of the parcel with this id.
void Parcels::sent(uint64_t cookie, const Status& status) {
  const auto it = std::find_if(outgoing_.begin(), outgoing_.end(), [&](const Parcel& p) { return p.id == cookie; });
  if (it == outgoing_.end()) return;
  --it->busy;
  it->failed |= !status.ok();  // what has become of the rank is told elsewhere
  if (it->busy == 0 && it->moved == it->bytes && !it->failed) {
    sent_.emplace_back(it->rank, it->number);
    outgoing_.erase(it);
  }
  poke_();  // there is room for more, or an end to tell of
}

/// The granted message that a segment of this length belongs to.
Parcels::Parcel* Parcels::parcel_of(const MessageHeader& header, size_t bytes) {
  const size_t segment = port_.messenger().segment_bytes();
  for (Parcel& parcel : incoming_) {
    if (parcel.rank != int(header.from) || uint32_t(parcel.number) != header.op) continue;
    const bool fits = header.segment < parcel.seen.size() &&
                      bytes == std::min(segment, parcel.bytes - size_t(header.segment) * segment);
    return fits ? &parcel : nullptr;
  }
  return nullptr;
}

std::byte* Parcels::place(const MessageHeader& header, size_t bytes) {
  Parcel* const parcel = parcel_of(header, bytes);
  if (!parcel || parcel->seen[header.segment]) return nullptr;
  parcel->seen[header.segment] = true;
  ++parcel->busy;
  return parcel->data + size_t(header.segment) * port_.messenger().segment_bytes();
}

bool Parcels::dropped(const std::byte* where) {
  for (Parcel& parcel : incoming_) {
    if (where < parcel.data || where >= parcel.data + parcel.bytes) continue;
    --parcel.busy;
    parcel.seen[size_t(where - parcel.data) / port_.messenger().segment_bytes()] = false;
    return true;
  }
  return false;
}

void Parcels::take(const MessageHeader& header, std::span<const std::byte> body) {
  Parcel* const parcel = parcel_of(header, body.size());
  if (!parcel) return;
  std::byte* const to = parcel->data + size_t(header.segment) * port_.messenger().segment_bytes();
  if (parcel->busy != 0 && body.data() == to) {
    --parcel->busy;
  } else if (parcel->seen[header.segment]) {
    return;
  } else {
    parcel->seen[header.segment] = true;
    std::memcpy(to, body.data(), body.size());
  }
  parcel->moved += body.size();
  if (parcel->moved != parcel->bytes) return;
  received_.emplace_back(parcel->rank, parcel->number);
  std::erase_if(incoming_, [&](const Parcel& p) { return &p == parcel; });
  poke_();
}

std::optional<Parcels::Message> Parcels::next_sent() {
  push();
  return pop(sent_);
}

std::optional<Parcels::Message> Parcels::next_received() { return pop(received_); }

int Parcels::busy() const {
  int segments = 0;
  for (const std::list<Parcel>* parcels : {&outgoing_, &incoming_}) {
    for (const Parcel& parcel : *parcels) segments += parcel.busy;
  }
  return segments;
}

void Parcels::sever_busy() {
  port_.mutex().held_by_caller();
  for (const std::list<Parcel>* parcels : {&outgoing_, &incoming_}) {
    for (const Parcel& parcel : *parcels) {
      if (parcel.busy != 0) port_.sever(parcel.rank);
    }
  }
}

void Parcels::drop() {
  port_.messenger().mutex().held_by_caller();
  for (Parcel& parcel : outgoing_) parcel.failed = true;                          // no more of it goes out
  for (Parcel& parcel : incoming_) parcel.seen.assign(parcel.seen.size(), true);  // nor in
  const std::array<const Sender*, 1> self{this};
  port_.messenger().let_go_of(
      self, [this] { return busy(); }, [this] { sever_busy(); });
  outgoing_.clear();
  incoming_.clear();
  sent_.clear();
  received_.clear();
}

}  // namespace nvx::net
