#include "net/executor.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/round_up.h"
#include "base/thread_state.h"

namespace nvx::net {
namespace {

using Cause = ScheduleRun::Verdict::Cause;

constexpr int kChecksBetweenFingerprints = int(std::chrono::seconds(1) / kWatchInterval);

bool overlap(const std::byte* a, size_t an, const std::byte* b, size_t bn) {
  return an != 0 && bn != 0 && a < b + bn && b < a + an;
}

}  // namespace

ScheduleRun::ScheduleRun(GroupPort& port, ScheduleArgs args)
    : port_(port),
      args_(std::move(args)),
      steps_(args_.row->steps(args_.layout, args_.place)),
      messages_(args_.members.size()) {
  args_.depth = std::clamp(args_.depth, 1, kMaxDepth);
  port_.open(*this);
}

ScheduleRun::~ScheduleRun() {
  ScheduleRun* const self[] = {this};
  abandon(port_, self);
  port_.close(*this);
}

std::byte* ScheduleRun::at(const schedule::Range& range) const {
  switch (range.buffer) {
    // Schedules never write to the input, except through an output in the same memory.
    case schedule::Buffer::kInput: return const_cast<std::byte*>(args_.input) + range.offset;
    case schedule::Buffer::kOutput: return args_.output + range.offset;
    case schedule::Buffer::kScratch: return args_.scratch + range.offset;
  }
  return nullptr;
}

Progress ScheduleRun::advance() {
  if (verdict_.cause != Cause::kNone || port_.failed()) return Progress::kFailed;
  do {
    for (uint32_t i = first_; i != behind_; ++i) post(flights_[i % kMaxDepth]);
    // Segments that arrived before their step began, or before the data that they overwrite had been sent.
    for (uint32_t i = first_; i != behind_; ++i) {
      Flight& flight = flights_[i % kMaxDepth];
      if (std::exchange(flight.early, false))
        port_.flow().offer(*this, rank_of(flight.step.recv_from), flight.in_number);
    }
  } while (begin_steps());
  if (verdict_.cause != Cause::kNone) return Progress::kFailed;
  return done() ? Progress::kDone : Progress::kPending;
}

/// Steps end in the order in which they began, so that the steps in flight form a ring.
void ScheduleRun::reap() {
  while (first_ != behind_ && flights_[first_ % kMaxDepth].over()) ++first_;
}

bool ScheduleRun::begin_next() {
  if (next_ == steps_ || behind_ - first_ >= uint32_t(args_.depth)) return false;
  schedule::Step step = args_.row->at(args_.layout, args_.place, next_);
  if (absent(step.send_to)) step.send_to = -1;
  if (absent(step.recv_from)) step.recv_from = -1;
  const bool inside = step.send_to == args_.place;
  if (inside && !step.reduce && at(step.send) == at(step.recv))
    return ++next_, true;  // source and destination are the same
  if (!clear_for(step)) return false;
  ++next_;
  if (inside) {
    move_inside(step);
  } else if (step.send_to >= 0 || step.recv_from >= 0) {
    begin(step);
  }
  return true;
}

/// Begins the steps that have become possible. Returns false if there were none.
bool ScheduleRun::begin_steps() {
  reap();
  if (given_up_ || verdict_.cause != Cause::kNone) return false;
  bool began = false;
  while (begin_next()) began = true;
  return began;
}

bool ScheduleRun::clear_for(const schedule::Step& step) const {
  const auto overlaps = [&](const schedule::Range& a, const schedule::Range& b) {
    return overlap(at(a), a.bytes, at(b), b.bytes);
  };
  for (uint32_t i = first_; i != behind_; ++i) {
    const Flight& flight = flights_[i % kMaxDepth];
    if (!schedule::may_begin_beside(flight.step, flight.received_all, flight.sends_over(), step, overlaps))
      return false;
  }
  return true;
}

void ScheduleRun::move_inside(const schedule::Step& step) {
  std::byte* to = at(step.recv);
  const std::byte* from = at(step.send);
  if (step.recv.bytes == 0) return;
  if (step.reduce) {
    const void* sources[] = {at(step.with), from};
    const DefaultFloatMode mode;
    args_.reduce(to, sources, 2, step.recv.bytes / args_.layout.width, nullptr);
  } else if (to != from) {
    std::memmove(to, from, step.recv.bytes);
  }
}

void ScheduleRun::begin(const schedule::Step& step) {
  Flight& flight = flights_[behind_ % kMaxDepth];
  flight = Flight{};
  flight.step = step;
  if (step.send_to >= 0) {
    flight.posted_all = false;
    flight.may_post = !args_.on_device;
    flight.out_number = messages_[size_t(step.send_to)].sent++;
  }
  if (step.recv_from >= 0) {
    flight.received_all = false;
    flight.early = true;
    flight.in_number = messages_[size_t(step.recv_from)].received++;
    if (args_.on_device) send_ready(flight);
  }
  ++behind_;
  post(flight);
}

MessageHeader ScheduleRun::header_of(Kind kind, uint16_t message) const {
  MessageHeader header(kind);
  header.op = args_.op;
  header.run = args_.run;
  header.message = message;
  return header;
}

void ScheduleRun::send_ready(const Flight& flight) {
  port_.mutex().held_by_caller();
  port_.send(rank_of(flight.step.recv_from), header_of(Kind::kReady, flight.in_number));
}

/// Passes segments to the link as far as the receiver's credit allows.
void ScheduleRun::post(Flight& flight) {
  port_.mutex().held_by_caller();
  if (flight.posted_all) return;
  const int rank = rank_of(flight.step.send_to);
  flight.may_post = flight.may_post || port_.flow().take_ready(*this, rank, flight.out_number);
  if (!flight.may_post) return;
  const std::byte* data = at(flight.step.send);
  const size_t total = flight.step.send.bytes, segment = port_.messenger().segment_bytes();
  const bool is_oldest = port_.is_oldest(*this);
  do {
    const size_t bytes = std::min(segment, total - flight.posted);
    if (!port_.flow().take_credit(rank, bytes, is_oldest)) return;
    const bool is_first = flight.posted == 0;
    MessageHeader header = header_of(is_first ? Kind::kFirst : Kind::kNext, flight.out_number);
    header.segment = uint32_t(flight.posted / segment);
    const First first{args_.fingerprint, total};
    const auto behind = std::as_bytes(std::span(&first, is_first ? 1 : 0));
    const std::byte* body = data + flight.posted;
    flight.posted += bytes;
    flight.posted_all = flight.posted == total;
    ++flight.unread;
    port_.send(rank, header, behind, {body, bytes}, this, uint64_t(&flight - flights_.data()));
  } while (!flight.posted_all);
}

void ScheduleRun::sent(uint64_t cookie, const Status& status) {
  Flight& flight = flights_[cookie];
  --flight.unread;
  if (!status.ok()) refuse({Cause::kLost, rank_of(flight.step.send_to)});
}

ScheduleRun::Flight* ScheduleRun::flight_of(uint32_t rank, uint16_t number) {
  for (uint32_t i = first_; i != behind_; ++i) {
    Flight& flight = flights_[i % kMaxDepth];
    if (!flight.received_all && flight.in_number == number && rank_of(flight.step.recv_from) == int(rank))
      return &flight;
  }
  return nullptr;
}

ScheduleRun::Outcome ScheduleRun::refuse(const Verdict& verdict) {
  if (verdict_.cause == Cause::kNone) verdict_ = verdict;
  return Outcome::kNever;
}

void ScheduleRun::compare(uint32_t from, const First& first) {
  if (first.fingerprint != args_.fingerprint) refuse({Cause::kMismatch, int(from), first.fingerprint});
}

bool ScheduleRun::fits(const Flight& flight, uint32_t number, size_t bytes) const {
  const size_t total = flight.step.recv.bytes, segment = port_.messenger().segment_bytes(), offset = number * segment;
  return (offset < total || number == 0) && bytes == std::min(segment, total - offset);
}

/// Marks a segment as seen. Returns false if it was seen before.
bool ScheduleRun::claim(Flight& flight, uint32_t number) {
  const size_t total = flight.step.recv.bytes, segment = port_.messenger().segment_bytes();
  flight.seen.resize(std::max<size_t>(1, ceil_div(total, segment)));
  if (flight.seen[number]) return false;
  return flight.seen[number] = true;
}

ScheduleRun::Outcome ScheduleRun::take(const MessageHeader& header, const std::optional<First>& first,
                                       std::span<const std::byte> body) {
  Flight* flight = flight_of(header.from, header.message);
  if (!flight && begin_steps()) flight = flight_of(header.from, header.message);
  const bool fetched = flight && end_fetch(*flight, header, body);
  const Outcome took = verdict_on(flight, header, first, body, fetched);
  if (took == Outcome::kYes) store(*flight, size_t(header.segment) * port_.messenger().segment_bytes(), body);
  return took;
}

/// Whether the link has fetched this segment directly to its place; if so, it has finished writing there.
bool ScheduleRun::end_fetch(Flight& flight, const MessageHeader& header, std::span<const std::byte> body) const {
  const size_t offset = size_t(header.segment) * port_.messenger().segment_bytes();
  if (flight.fetching == 0 || !fits(flight, header.segment, body.size())) return false;
  if (body.data() != at(flight.step.recv) + offset) return false;
  --flight.fetching;
  return true;
}

/// Whether a segment is to be stored. The run fails if the segment cannot belong to it.
ScheduleRun::Outcome ScheduleRun::verdict_on(Flight* flight, const MessageHeader& header,
                                             const std::optional<First>& first, std::span<const std::byte> body,
                                             bool fetched) {
  const int from = int(header.from);
  if (given_up_) return Outcome::kNever;
  if (first.has_value() != (header.segment == 0)) return refuse({Cause::kGarbage, from});
  if (first && first->fingerprint != args_.fingerprint) return refuse({Cause::kMismatch, from, first->fingerprint});
  if (!flight) return Outcome::kLater;
  const schedule::Step& step = flight->step;
  if (first && first->bytes != step.recv.bytes)
    return refuse({Cause::kCounts, from, {}, step.recv.bytes, first->bytes});
  if (!fits(*flight, header.segment, body.size())) return refuse({Cause::kGarbage, from});
  const std::byte* to = at(step.recv) + size_t(header.segment) * port_.messenger().segment_bytes();
  const bool stored_by_host = !fetched && !body.empty();
  if (args_.on_device && stored_by_host) return refuse({Cause::kGarbage, from});
  if (would_overwrite_own(*flight, to, body.size())) {
    flight->early = true;
    return Outcome::kLater;
  }
  if (!fetched && !claim(*flight, header.segment)) return refuse({Cause::kGarbage, from});
  return Outcome::kYes;
}

/// The outgoing message of a step must be read before it is overwritten.
bool ScheduleRun::would_overwrite_own(const Flight& flight, const std::byte* to, size_t bytes) const {
  const schedule::Step& step = flight.step;
  return !flight.sends_over() && overlap(to, bytes, at(step.send), step.send_to >= 0 ? step.send.bytes : 0);
}

void ScheduleRun::store(Flight& flight, size_t offset, std::span<const std::byte> body) {
  std::byte* to = at(flight.step.recv) + offset;
  if (body.empty()) {
    // an empty message only orders steps
  } else if (flight.step.reduce) {
    // The operands are in the order of the places: of two zeros or two NaNs an operator keeps the one at a certain
    // position, and both sides of an exchange must keep the same one.
    const void* sources[] = {at(flight.step.with) + offset, body.data()};
    if (flight.step.recv_from < args_.place) std::swap(sources[0], sources[1]);
    const DefaultFloatMode mode;
    args_.reduce(to, sources, 2, body.size() / args_.layout.width, nullptr);
  } else if (to != body.data()) {
    std::memcpy(to, body.data(), body.size());
  }
  flight.received += body.size();
  flight.received_all = flight.received == flight.step.recv.bytes;
}

/// A segment can be fetched directly to its place only if it is stored unchanged, not if it is reduced.
std::byte* ScheduleRun::place(const MessageHeader& header, size_t bytes) {
  Flight* flight = flight_of(header.from, header.message);
  if (given_up_ || !flight || flight->step.reduce || bytes == 0 || !fits(*flight, header.segment, bytes))
    return nullptr;
  std::byte* to = at(flight->step.recv) + size_t(header.segment) * port_.messenger().segment_bytes();
  if (would_overwrite_own(*flight, to, bytes) || !claim(*flight, header.segment)) return nullptr;
  ++flight->fetching;
  return to;
}

void ScheduleRun::dropped(const MessageHeader& header) {
  Flight* flight = flight_of(header.from, header.message);
  if (!flight || flight->fetching == 0) return;
  --flight->fetching;
  flight->seen[header.segment] = false;
}

std::vector<int> ScheduleRun::waits_for() const {
  std::vector<int> ranks;
  for (uint32_t i = first_; i != behind_; ++i) {
    const Flight& flight = flights_[i % kMaxDepth];
    if (!flight.received_all) ranks.push_back(rank_of(flight.step.recv_from));
    if (!flight.sends_over()) ranks.push_back(rank_of(flight.step.send_to));
  }
  std::ranges::sort(ranks);
  ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
  return ranks;
}

int ScheduleRun::waits_first_for() const {
  if (first_ == behind_) return -1;
  const Flight& oldest = flights_[first_ % kMaxDepth];
  const int place = oldest.received_all ? oldest.step.send_to : oldest.step.recv_from;
  return place < 0 ? -1 : rank_of(place);
}

std::vector<int> ScheduleRun::not_called() const {
  std::vector<int> ranks;
  for (uint32_t i = first_; i != behind_; ++i) {
    const Flight& flight = flights_[i % kMaxDepth];
    if (flight.received_all) continue;
    const int rank = rank_of(flight.step.recv_from);
    if (!port_.calls().has_called(rank, args_.op) && std::ranges::find(ranks, rank) == ranks.end())
      ranks.push_back(rank);
  }
  return ranks;
}

void ScheduleRun::check_peers() {
  port_.mutex().held_by_caller();
  // All data of a rank that has ended may be here already, kept for a step.
  if (advance() != Progress::kPending) return;
  for (const int rank : waits_for()) {
    if (port_.departure(rank)) {
      refuse({Cause::kLost, rank});
      continue;
    }
    port_.ping(rank);
    if (checks_ % kChecksBetweenFingerprints == 0) port_.send_fingerprint(rank, args_.op);
  }
  ++checks_;
  if (const auto clash = port_.calls().clash(args_.op)) refuse({Cause::kMismatch, clash->rank, clash->fingerprint});
}

int ScheduleRun::in_link() const {
  int open = 0;
  for (const Flight& flight : flights_) open += flight.in_link();
  return open;
}

/// Closes the connections for which the link still has segments.
void ScheduleRun::disconnect() {
  port_.mutex().held_by_caller();
  for (const Flight& flight : flights_) {
    if (flight.unread != 0) port_.disconnect(rank_of(flight.step.send_to));
    if (flight.fetching != 0) port_.disconnect(rank_of(flight.step.recv_from));
  }
}

void ScheduleRun::abandon(GroupPort& port, std::span<ScheduleRun* const> runs) {
  port.messenger().mutex().held_by_caller();
  for (ScheduleRun* run : runs) run->given_up_ = true;
  const auto in_link = [&] {
    int open = 0;
    for (const ScheduleRun* run : runs) open += run->in_link();
    return open;
  };
  port.messenger().release_from_link(runs, in_link, [&] {
    for (ScheduleRun* run : runs) run->disconnect();
  });
  if (in_link() == 0) return;
  for (ScheduleRun* run : runs) {
    // The destructor abandons the run again and must not wait a second time.
    for (Flight& flight : run->flights_) flight.unread = flight.fetching = 0;
  }
}

}  // namespace nvx::net
