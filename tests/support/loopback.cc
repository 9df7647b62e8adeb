#include "support/loopback.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <map>
#include <optional>
#include <utility>

#include "base/deadline.h"
#include "base/hash.h"
#include "base/mutex.h"

namespace nvx::net {
namespace {

constexpr char kClosedThere[] = "it has closed its link";
constexpr char kBroken[] = "the connection broke";

struct Address {
  static constexpr uint64_t kMagic = 0x706f6f6c2d78766e;  // "nvx-loop"
  uint64_t magic;
  uint64_t net;
  uint64_t place;
};

/// A message between two places. The body is a copy, or is still in the post that its sender keeps.
struct Message {
  uint64_t number;
  size_t from;
  uint64_t due;             // call of the receiver's progress()
  Clock::time_point ready;  // not before
  std::vector<std::byte> header, copy;
  const std::byte* body;
  size_t bytes;
  bool in_post;
  bool corrupt = false, unwritten = false;
};

/// The faults of one direction, and how far it is.
struct Direction {
  Faults faults;
  uint64_t messages = 0;
  uint64_t call = 0;  // of the receiver's progress(), to which `taken` belongs
  size_t taken = 0;
};

/// An event to report in the next progress(): the end of a post, or without one the loss of a peer.
struct Event {
  Post* post;
  Status status;
  PeerId peer;
  std::string why;
};

struct Peer {
  size_t place;
  enum { kKnown, kLeaving, kGone } state = kKnown;
};

/// A post whose body its receiver will fetch.
struct OpenPost {
  Post* post;
  size_t to;
  bool being_fetched = false;
};

/// One end of links.
struct End {
  bool closed = false;
  bool killed = false;
  std::vector<Peer> peers;  // by PeerId
  std::deque<Message> inbox;
  std::deque<Event> events;
  std::map<uint64_t, OpenPost> open;  // by number of the message
  uint64_t calls = 0;                 // of progress()
  int sleepers = 0;
  uint64_t wakes = 0;
  bool wake_is_due = false;
  std::condition_variable stirred;

  bool silent() const { return closed || killed; }
  bool something_waits() const;
};

bool End::something_waits() const {
  if (killed) return false;
  const auto now = Clock::now();
  const auto ready = [&](const Message& message) { return message.ready <= now; };
  const auto leaving = [](const Peer& peer) { return peer.state == Peer::kLeaving; };
  return !events.empty() || std::any_of(inbox.begin(), inbox.end(), ready) ||
         std::any_of(peers.begin(), peers.end(), leaving);
}

Status failure(const std::string& why) { return Status(Code::kPeerDied, "nvx: " + why); }

}  // namespace

/// All ends, under one mutex: they are few, and in one process.
class LoopbackNet::Shared {
 public:
  explicit Shared(const Options& options) : options(options) {}

  const Options options;
  Mutex mutex;
  std::condition_variable fetched;                                              // a receiver has left a sender's post
  std::deque<End> ends GUARDED_BY(mutex);                                       // by place
  std::map<std::pair<size_t, size_t>, Direction> directions GUARDED_BY(mutex);  // by sender and receiver
  uint64_t messages GUARDED_BY(mutex) = 0;
  Counts counts GUARDED_BY(mutex);
  std::vector<std::span<const std::byte>> on_device GUARDED_BY(mutex);

  bool is_on_device(const std::byte* at) const REQUIRES(mutex) {
    return std::any_of(on_device.begin(), on_device.end(),
                       [at](const auto& range) { return at >= range.data() && at < range.data() + range.size(); });
  }

  Direction& direction(size_t from, size_t to) REQUIRES(mutex) {
    return directions.try_emplace({from, to}, Direction{options.faults}).first->second;
  }
  void post(size_t from, Post& post) REQUIRES(mutex);
  void send(size_t from, size_t to, Post& post) REQUIRES(mutex);
  void end_posts(End& end, std::optional<size_t> to, const std::string& why) REQUIRES(mutex);
  void lose(End& end, PeerId peer, const std::string& why) REQUIRES(mutex);
  void cut(size_t here, size_t there, const std::string& why) REQUIRES(mutex);
  void kill(size_t place) REQUIRES(mutex);
  void leave(size_t place) REQUIRES(mutex);
  std::optional<Message> next_due(size_t place, uint64_t before) REQUIRES(mutex);
  OpenPost* find_open(const Message& message) REQUIRES(mutex);
  void end_fetch(const Message& message) REQUIRES(mutex);
  void part_with_leavers(End& end) REQUIRES(mutex);
};

void LoopbackNet::Shared::post(size_t from, Post& post) {
  End& end = ends[from];
  ++counts.posted;
  if (end.killed) {
    end.open[++messages] = {&post, from};  // ends with the link
    return;
  }
  const bool known = post.to < end.peers.size() && end.peers[post.to].state != Peer::kGone;
  if (known && end.peers[post.to].state == Peer::kKnown && !ends[end.peers[post.to].place].silent()) {
    send(from, end.peers[post.to].place, post);
    return;
  }
  if (known) lose(end, post.to, kClosedThere);
  end.events.push_back({&post, failure("the peer is lost"), 0, {}});
  end.stirred.notify_all();
}

void LoopbackNet::Shared::send(size_t from, size_t to, Post& post) {
  Direction& direction = this->direction(from, to);
  const uint64_t nth = ++direction.messages;
  const Faults& faults = direction.faults;
  const auto dice = [&](uint64_t kind) {
    return Hash().add(options.seed).add(from).add(to).add(nth).add(kind).value();
  };
  const auto befalls = [&](uint64_t kind, double share) { return double(dice(kind) >> 11) * 0x1p-53 < share; };
  if (faults.cut_after != 0 && nth > faults.cut_after) {
    cut(from, to, kBroken);
    cut(to, from, kBroken);
    ends[from].events.push_back({&post, failure(kBroken), 0, {}});
    return;
  }
  const bool lost = befalls(1, faults.lose), is_device = post.bytes != 0 && is_on_device(post.body),
             in_post = is_device || post.bytes > options.place_above;
  if (lost || !in_post) ends[from].events.push_back({&post, Status(), 0, {}});
  if (lost) {
    ++counts.lost;
    return;
  }
  Message message{.number = ++messages,
                  .from = from,
                  .due = ends[to].calls + dice(2) % uint64_t(faults.most_delay + 1),
                  .ready = Clock::now() + faults.latency + (is_device ? options.device_latency : faults.latency * 0),
                  .header = {post.header, post.header + post.header_bytes},
                  .copy = {},
                  .body = post.body,
                  .bytes = post.bytes,
                  .in_post = in_post,
                  .corrupt = is_device && befalls(7, faults.corrupt),
                  .unwritten = is_device && befalls(8, faults.unwritten)};
  if (in_post) {
    ends[from].open[message.number] = {&post, to};
  } else {
    message.copy.assign(post.body, post.body + post.bytes);
  }
  if (befalls(3, faults.truncate) && message.bytes != 0) {
    message.bytes = dice(4) % message.bytes;
    ++counts.truncated;
  }
  std::deque<Message>& inbox = ends[to].inbox;
  if (!in_post && befalls(5, faults.duplicate)) {
    inbox.push_back(message);
    ++counts.duplicated;
  }
  inbox.insert(befalls(6, faults.reorder) ? inbox.begin() : inbox.end(), std::move(message));
  ends[to].stirred.notify_all();
}

/// Ends the posts to a place, or all of them, that no receiver is reading just now.
void LoopbackNet::Shared::end_posts(End& end, std::optional<size_t> to, const std::string& why) {
  std::erase_if(end.open, [&](const auto& entry) {
    const OpenPost& open = entry.second;
    if (open.being_fetched || (to && (open.to != *to || end.killed))) return false;
    end.events.push_back({open.post, failure(why), 0, {}});
    return true;
  });
}

void LoopbackNet::Shared::lose(End& end, PeerId peer, const std::string& why) {
  if (end.peers[peer].state == Peer::kGone) return;
  end.peers[peer].state = Peer::kGone;
  end.events.push_back({nullptr, Status(), peer, why});
}

void LoopbackNet::Shared::cut(size_t here, size_t there, const std::string& why) {
  End& end = ends[here];
  if (end.silent()) return;
  for (PeerId peer = 0; peer < end.peers.size(); ++peer) {
    if (end.peers[peer].place == there) lose(end, peer, why);
  }
  end_posts(end, there, why);
  std::erase_if(end.inbox, [&](const Message& message) { return message.from == there; });
  end.stirred.notify_all();
}

void LoopbackNet::Shared::kill(size_t place) {
  for (size_t other = 0; other < ends.size(); ++other) {
    if (other != place) cut(other, place, "its process has ended");
  }
  ends[place].inbox.clear();
  ends[place].killed = true;
}

void LoopbackNet::Shared::leave(size_t place) {
  ends[place].closed = true;
  for (End& other : ends) {
    if (other.silent()) continue;
    end_posts(other, place, kClosedThere);
    for (Peer& peer : other.peers) {
      if (peer.place == place && peer.state == Peer::kKnown) peer.state = Peer::kLeaving;
    }
    other.stirred.notify_all();
  }
  end_posts(ends[place], std::nullopt, "the link was closed");
}

/// The first message that may come now, of those that had set out when this progress() began.
std::optional<Message> LoopbackNet::Shared::next_due(size_t place, uint64_t before) {
  End& end = ends[place];
  const auto now = Clock::now();
  for (auto it = end.inbox.begin(); it != end.inbox.end(); ++it) {
    if (it->due > end.calls || it->number > before || it->ready > now) continue;
    Direction& direction = this->direction(it->from, place);
    if (std::exchange(direction.call, end.calls) != end.calls) direction.taken = 0;
    if (direction.faults.bytes_per_progress != 0 && direction.taken >= direction.faults.bytes_per_progress) continue;
    direction.taken += it->bytes;
    Message message = std::move(*it);
    end.inbox.erase(it);
    return message;
  }
  return std::nullopt;
}

OpenPost* LoopbackNet::Shared::find_open(const Message& message) {
  std::map<uint64_t, OpenPost>& open = ends[message.from].open;
  const auto it = open.find(message.number);
  return it == open.end() ? nullptr : &it->second;
}

void LoopbackNet::Shared::end_fetch(const Message& message) {
  End& sender = ends[message.from];
  sender.events.push_back({find_open(message)->post, Status(), 0, {}});
  sender.open.erase(message.number);
  sender.stirred.notify_all();
  fetched.notify_all();
}

/// Those who have closed their links are lost when all that they had sent has been delivered.
void LoopbackNet::Shared::part_with_leavers(End& end) {
  for (PeerId peer = 0; peer < end.peers.size(); ++peer) {
    if (end.peers[peer].state != Peer::kLeaving) continue;
    const auto from_it = [&](const Message& message) { return message.from == end.peers[peer].place; };
    if (std::none_of(end.inbox.begin(), end.inbox.end(), from_it)) lose(end, peer, kClosedThere);
  }
}

class LoopbackNet::EndLink final : public Link {
 public:
  explicit EndLink(Shared& shared);
  ~EndLink() override { close(); }

  void listen(Receiver& receiver) override { receiver_ = &receiver; }
  void close() override;
  std::vector<std::byte> address() const override;
  PeerId add(std::span<const std::byte> address) override;
  void forget(PeerId peer) override;
  void post(Post& post) override;
  bool progress() override;
  bool arm() override;
  void sleep(std::chrono::microseconds span) override;
  void wake() override;
  size_t segment_bytes() const override { return shared_.options.segment_bytes; }
  std::string use_device_memory(std::span<const std::byte> range) override {
    MutexLock lock(shared_.mutex);
    shared_.on_device.push_back(range);
    return shared_.options.no_device_memory;
  }
  std::string describe() const override { return "loopback"; }

 private:
  bool report();
  void deliver(Message message);
  const std::byte* fetch(Message& message);

  Shared& shared_;
  Receiver* receiver_ = nullptr;
  size_t self_ = 0;
};

LoopbackNet::EndLink::EndLink(Shared& shared) : shared_(shared) {
  MutexLock lock(shared_.mutex);
  self_ = shared_.ends.size();
  shared_.ends.emplace_back();
}

void LoopbackNet::EndLink::close() {
  std::deque<Event> events;
  {
    MutexLock lock(shared_.mutex);
    End& end = shared_.ends[self_];
    if (end.closed) return;
    shared_.leave(self_);
    while (!end.open.empty()) lock.wait_for(shared_.fetched, std::chrono::milliseconds(100));
    events.swap(end.events);
    end.inbox.clear();
  }
  for (const Event& item : events) {
    if (item.post) receiver_->done(*item.post, item.status);
  }
}

std::vector<std::byte> LoopbackNet::EndLink::address() const {
  const Address address{Address::kMagic, reinterpret_cast<uintptr_t>(&shared_), self_};
  const auto bytes = std::as_bytes(std::span(&address, 1));
  return {bytes.begin(), bytes.end()};
}

PeerId LoopbackNet::EndLink::add(std::span<const std::byte> bytes) {
  Address address{};
  NVX_CHECK(bytes.size() == sizeof address, "a loopback address has another length");
  std::memcpy(&address, bytes.data(), sizeof address);
  MutexLock lock(shared_.mutex);
  NVX_CHECK(address.magic == Address::kMagic && address.net == reinterpret_cast<uintptr_t>(&shared_) &&
                address.place < shared_.ends.size(),
            "not the address of a link of this loopback net");
  std::vector<Peer>& peers = shared_.ends[self_].peers;
  peers.push_back({size_t(address.place)});
  return PeerId(peers.size() - 1);
}

void LoopbackNet::EndLink::forget(PeerId peer) {
  MutexLock lock(shared_.mutex);
  End& end = shared_.ends[self_];
  if (peer >= end.peers.size()) return;
  if (end.peers[peer].state != Peer::kGone) shared_.end_posts(end, end.peers[peer].place, "the peer was forgotten");
  end.peers[peer].state = Peer::kGone;
  std::erase_if(end.events, [&](const Event& item) { return !item.post && item.peer == peer; });
}

void LoopbackNet::EndLink::post(Post& post) {
  MutexLock lock(shared_.mutex);
  shared_.post(self_, post);
}

bool LoopbackNet::EndLink::progress() {
  uint64_t before = 0;
  {
    MutexLock lock(shared_.mutex);
    End& end = shared_.ends[self_];
    if (end.silent()) return false;
    ++end.calls;
    before = shared_.messages;
  }
  bool moved = report();
  for (;;) {
    std::optional<Message> message;
    {
      MutexLock lock(shared_.mutex);
      message = shared_.next_due(self_, before);
      if (!message) {
        shared_.part_with_leavers(shared_.ends[self_]);
        return moved;
      }
    }
    moved = true;
    deliver(std::move(*message));
  }
}

bool LoopbackNet::EndLink::report() {
  std::deque<Event> events;
  {
    MutexLock lock(shared_.mutex);
    events.swap(shared_.ends[self_].events);
  }
  for (const Event& item : events) {
    if (item.post) {
      receiver_->done(*item.post, item.status);
    } else {
      receiver_->lost(item.peer, item.why);
    }
  }
  return !events.empty();
}

void LoopbackNet::EndLink::deliver(Message message) {
  const std::byte* body = message.in_post ? fetch(message) : message.copy.data();
  if (message.in_post && !body) return;
  {
    MutexLock lock(shared_.mutex);
    ++shared_.counts.delivered;
    shared_.counts.bytes += message.bytes;
  }
  receiver_->arrived(message.header, {body, message.bytes});
}

/// Copies a body out of its sender's post; null if that has ended meanwhile. The sender's end waits for the copying.
const std::byte* LoopbackNet::EndLink::fetch(Message& message) {
  {
    MutexLock lock(shared_.mutex);
    if (!shared_.find_open(message)) return nullptr;
  }
  std::byte* placed = receiver_->place(message.header, message.bytes);
  if (!placed) message.copy.resize(std::max<size_t>(message.bytes, 1));
  std::byte* where = placed ? placed : message.copy.data();
  {
    MutexLock lock(shared_.mutex);
    OpenPost* open = shared_.find_open(message);
    if (open) {
      open->being_fetched = true;
    } else {
      where = nullptr;
    }
  }
  if (!where) {
    if (placed) receiver_->dropped(message.header, placed);
    return nullptr;
  }
  if (!message.unwritten) std::memcpy(where, message.body, message.bytes);
  if (message.corrupt) where[message.bytes / 2] ^= std::byte{1};
  MutexLock lock(shared_.mutex);
  const bool from_device = shared_.is_on_device(message.body), to_device = shared_.is_on_device(where);
  if (from_device && to_device) shared_.counts.device_bytes += message.bytes;
  if (from_device != to_device) ++shared_.counts.host_copies;
  shared_.end_fetch(message);
  return where;
}

bool LoopbackNet::EndLink::arm() {
  MutexLock lock(shared_.mutex);
  return !shared_.ends[self_].something_waits();
}

void LoopbackNet::EndLink::sleep(std::chrono::microseconds span) {
  MutexLock lock(shared_.mutex);
  End& end = shared_.ends[self_];
  if (std::exchange(end.wake_is_due, false)) return;
  const uint64_t wakes = end.wakes;
  const auto stop = Clock::now() + span;
  ++end.sleepers;
  while (wakes == end.wakes && !end.something_waits()) {
    const auto now = Clock::now();
    if (now >= stop) break;
    auto until = stop;
    for (const Message& message : end.inbox) until = std::min(until, std::max(now, message.ready));
    lock.wait_for(end.stirred, until - now);
  }
  --end.sleepers;
}

void LoopbackNet::EndLink::wake() {
  MutexLock lock(shared_.mutex);
  End& end = shared_.ends[self_];
  if (end.sleepers == 0) {
    end.wake_is_due = true;
  } else {
    ++end.wakes;
    end.stirred.notify_all();
  }
}

LoopbackNet::LoopbackNet() : LoopbackNet(Options()) {}
LoopbackNet::LoopbackNet(const Options& options) : shared_(std::make_unique<Shared>(options)) {}
LoopbackNet::~LoopbackNet() = default;

std::unique_ptr<Link> LoopbackNet::open() { return std::make_unique<EndLink>(*shared_); }

void LoopbackNet::set_faults(int from, int to, const Faults& faults) {
  MutexLock lock(shared_->mutex);
  shared_->direction(size_t(from), size_t(to)).faults = faults;
}

void LoopbackNet::cut(int a, int b) {
  MutexLock lock(shared_->mutex);
  shared_->cut(size_t(a), size_t(b), kBroken);
  shared_->cut(size_t(b), size_t(a), kBroken);
}

void LoopbackNet::kill(int link) {
  MutexLock lock(shared_->mutex);
  shared_->kill(size_t(link));
}

LoopbackNet::Counts LoopbackNet::counts() const {
  MutexLock lock(shared_->mutex);
  return shared_->counts;
}

}  // namespace nvx::net
