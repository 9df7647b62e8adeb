#include "net/messenger.h"

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <system_error>
#include <utility>

#include "base/config.h"
#include "base/contain.h"
#include "base/interrupt.h"
#include "base/log.h"
#include "base/own_thread.h"
#include "base/per_process.h"
#include "base/random.h"
#include "base/words.h"
#include "net/group_port.h"
#include "net/ucx/ucx.h"

namespace nvx::net {
namespace {

constexpr std::chrono::milliseconds kIdleInterval{1000};  ///< the interval of the progress thread when nothing happens
constexpr std::chrono::milliseconds kActiveFor{20};       ///< the time after the last activity during which it polls
constexpr std::chrono::milliseconds kActiveInterval{1};   ///< its polling interval then
constexpr std::chrono::milliseconds kAskInterval{1000};

int64_t now_ns() { return Clock::now().time_since_epoch().count(); }

/// The content of a ping or a pong: its sender, so that the answer can be routed.
struct PingBody {
  ProcessId process;
};

}  // namespace

namespace {

/// Lives until the process ends, because peers may ping this process between two groups.
struct Home {
  Mutex mutex;
  std::shared_ptr<Messenger> messenger GUARDED_BY(mutex);
};

Home& home() { return of_this_process<Home>(); }

}  // namespace

std::shared_ptr<Messenger> Messenger::here(const std::string& met_at) {
  Home& h = home();
  MutexLock lock(h.mutex);
  if (!h.messenger) h.messenger = std::make_shared<Messenger>(open_ucx(met_at), config().liveness);
  return h.messenger;
}

std::shared_ptr<Messenger> Messenger::opened() {
  Home& h = home();
  MutexLock lock(h.mutex);
  return h.messenger;
}

Messenger::Messenger(std::unique_ptr<Link> link, std::chrono::milliseconds silence)
    : link_(std::move(link)),
      segment_bytes_(link_->segment_bytes()),
      between_looks_(link_->between_looks()),
      silence_(silence),
      process_(random_value<ProcessId>()) {
  link_->listen(*this);
  try {
    progress_thread_ = std::thread([this] { run_progress_thread(); });
  } catch (const std::system_error& error) {
    errno = error.code().value();
    throw system_error("cannot start a thread for the link to other hosts");
  }
}

Messenger::~Messenger() { close(); }

void Messenger::close() {
  {
    MutexLock lock(mutex_);
    if (closed_) return;
    closed_ = true;
    closing_.store(true, std::memory_order_release);
    link_->wake();
    event_.notify_all();
  }
  progress_thread_.join();
  MutexLock lock(mutex_);
  link_->close();
}

std::vector<std::byte> Messenger::address() {
  MutexLock lock(mutex_);
  std::vector<std::byte> address(sizeof process_);
  std::memcpy(address.data(), &process_, sizeof process_);
  const std::vector<std::byte> of_link = link_->address();
  address.insert(address.end(), of_link.begin(), of_link.end());
  return address;
}

void Messenger::admit(std::span<const AddressPrefix> addresses) {
  MutexLock lock(mutex_);
  link_->admit(addresses);
}

std::string Messenger::describe() {
  MutexLock lock(mutex_);
  return link_->describe();
}

void Messenger::add_port(uint64_t group, int rank, GroupPort& port) { ports_[{group, uint32_t(rank)}] = &port; }

void Messenger::remove_port(uint64_t group, int rank, const GroupPort& port) {
  const auto it = ports_.find({group, uint32_t(rank)});
  if (it != ports_.end() && it->second == &port) ports_.erase(it);
}

PeerId Messenger::connect(std::span<const std::byte> address) {
  ProcessId process = 0;
  if (address.size() <= sizeof process) throw Error(Code::kMismatch, "nvx: a rank's network address is too short");
  std::memcpy(&process, address.data(), sizeof process);
  const auto it = by_process_.find(process);
  if (it != by_process_.end() && peers_[it->second].lost.empty()) {
    peers_[it->second].joined = Clock::now();
    return it->second;
  }
  const PeerId id = PeerId(peers_.size());
  peers_.emplace_back();
  const std::span<const std::byte> of_link = address.subspan(sizeof process);
  peers_.back().process = process;
  peers_.back().joined = Clock::now();
  peers_.back().address.assign(of_link.begin(), of_link.end());
  // If send_given_up() opened a connection to this process, reuse it.
  const std::optional<PeerId> spare =
      it == by_process_.end() ? std::nullopt : std::exchange(peers_[it->second].spare, {});
  peers_.back().link = spare ? *spare : link_->add(of_link);
  by_process_[process] = id;
  by_link_.resize(std::max<size_t>(by_link_.size(), peers_.back().link + 1));
  by_link_[peers_.back().link] = id;
  return id;
}

void Messenger::send(PeerId to, const MessageHeader& header, std::span<const std::byte> behind,
                     std::span<const std::byte> body, Sender* sender, uint64_t cookie) {
  if (closed_ || !peers_[to].lost.empty()) {
    if (sender) sender->sent(cookie, Status(Code::kPeerDied, peers_[to].lost));
    return;
  }
  peers_[to].has_sent = true;
  Outgoing& out = outgoing(peers_[to].link, header, behind);
  out.sender = sender;
  out.cookie = cookie;
  out.post.body = body.data();
  out.post.bytes = body.size();
  if (!sender && !body.empty()) {
    std::memcpy(out.copied.data(), body.data(), body.size());
    out.post.body = out.copied.data();
  }
  link_->post(out.post);
}

Messenger::Outgoing& Messenger::outgoing(PeerId link, const MessageHeader& header, std::span<const std::byte> behind) {
  if (free_.empty()) {
    outgoing_.emplace_back();
    free_.push_back(&outgoing_.back());
  }
  Outgoing& out = *free_.back();
  free_.pop_back();
  out.post.to = link;
  out.post.owner = &out;
  std::memcpy(out.post.header, &header, sizeof header);
  if (!behind.empty()) std::memcpy(out.post.header + sizeof header, behind.data(), behind.size());
  out.post.header_bytes = uint8_t(sizeof header + behind.size());
  return out;
}

void Messenger::done(Post& post, const Status& status) {
  Outgoing* out = static_cast<Outgoing*>(post.owner);
  if (Sender* sender = std::exchange(out->sender, nullptr)) sender->sent(out->cookie, status);
  free_.push_back(out);
}

void Messenger::detach(const Sender* sender) {
  for (Outgoing& out : outgoing_) {
    if (out.sender == sender) out.sender = nullptr;
  }
}

bool Messenger::progress() {
  driven_ns_.store(now_ns(), std::memory_order_relaxed);
  if (closed_) return false;
  const bool moved = link_->progress();
  for (const PeerId peer : std::exchange(to_forget_, {})) link_->forget(peer);
  for (const auto& [ping, peer] : std::exchange(given_up_, {})) send_given_up(ping, peer);
  if (moved) wake_sleepers();
  return moved;
}

void Messenger::drive_or_pause() {
  constexpr std::chrono::microseconds kPause{50};
  if (progress()) return;
  mutex_.unlock();
  std::this_thread::sleep_for(kPause);
  mutex_.lock();
}

void Messenger::await_progress(const std::function<int()>& open) {
  constexpr std::chrono::milliseconds kPatience{200}, kMost{3000};
  const auto bound = Clock::now() + kMost;
  auto patient = Clock::now() + kPatience;
  for (int left = open(); left != 0 && Clock::now() < std::min(patient, bound);) {
    drive_or_pause();
    const int now = open();
    if (now < left) patient = Clock::now() + kPatience;
    left = now;
  }
}

bool Messenger::await_end(const std::function<int()>& open, const std::function<void()>& disconnect) {
  constexpr std::chrono::seconds kAfterSevering{2};
  await_progress(open);
  if (open() == 0) return true;
  disconnect();
  const auto bound = Clock::now() + kAfterSevering;
  while (open() != 0 && Clock::now() < bound) drive_or_pause();
  return open() == 0;
}

/// Processes everything that has arrived, within bounds.
bool Messenger::progress_all() {
  constexpr int kMostMoves = 64;
  bool moved = false;
  for (int i = 0; i < kMostMoves && progress(); ++i) moved = true;
  return moved;
}

bool Messenger::try_progress() {
  if (!mutex_.try_lock()) return false;
  const bool moved = progress_all();
  mutex_.unlock();
  return moved;
}

/// Wakes the sleepers, because something has moved.
void Messenger::wake_sleepers() {
  ++events_;
  if (sleepers_ == 0) return;
  event_.notify_all();
  if (sleeper_in_link_) link_->wake();
}

void Messenger::sleep(std::chrono::microseconds span, std::optional<uint64_t> seen) {
  MutexLock lock(mutex_);
  if (closed_ || (seen && events_ != *seen)) return;
  ++sleepers_;
  if (sleeper_in_link_) {
    lock.wait_for(event_, span);
  } else if (link_->arm()) {
    sleeper_in_link_ = true;
    lock.unlock();
    link_->sleep(span);
    lock.lock();
    sleeper_in_link_ = false;
  }
  --sleepers_;
}

// --- incoming messages

GroupPort* Messenger::port_of(const MessageHeader& header) {
  const auto it = ports_.find({header.group, header.to});
  return it == ports_.end() ? nullptr : it->second;
}

std::byte* Messenger::place(std::span<const std::byte> bytes, size_t size) {
  const auto header = read_header(bytes);
  GroupPort* port = header ? port_of(*header) : nullptr;
  if (!port) return nullptr;
  port->mutex().held_by_caller();
  return port->place(*header, size);
}

void Messenger::dropped(std::span<const std::byte> bytes, std::byte* where) {
  const auto header = read_header(bytes);
  GroupPort* port = header ? port_of(*header) : nullptr;
  if (!port) return;
  port->mutex().held_by_caller();
  port->dropped(*header, where);
}

void Messenger::arrived(std::span<const std::byte> whole, std::span<const std::byte> body) {
  const auto header = read_header(whole);
  if (!header) return;
  if (header->kind == Kind::kPing || header->kind == Kind::kPong) return answer(*header, whole, body);
  GroupPort* port = port_of(*header);
  if (!port) return;  // its group is gone here
  port->mutex().held_by_caller();
  port->arrived(*header, whole, body);
  const std::optional<PeerId> from = port->process_of(int(header->from));
  if (!from) return;
  note_sign_of_life(*from);
  if (!body.empty()) confirm_receipt(*from, *header);
}

void Messenger::note_sign_of_life(PeerId id) {
  Peer& peer = peers_[id];
  if (peer.warned) {
    NVX_LOG(kWarn, "%s, which gave no sign of life for %.1f s, is back", name_of(id).c_str(),
            std::chrono::duration<double>(Clock::now() - peer.asked_first).count());
  }
  peer.waits_for_pong = peer.warned = false;
  peer.heard = Clock::now();
}

/// Tells a peer that sends much that its data arrives, however slowly. The answer to its ping would arrive only after
/// all of that data.
void Messenger::confirm_receipt(PeerId id, const MessageHeader& heard) {
  Peer& peer = peers_[id];
  if (peer.heard - peer.confirmed < kAskInterval) return;
  peer.confirmed = peer.heard;
  const PingBody mine{process_};
  send(id, pong_to(heard, kGroupStands), std::as_bytes(std::span(&mine, 1)), {}, nullptr, 0);
}

MessageHeader Messenger::pong_to(const MessageHeader& heard, Answer value) const {
  MessageHeader pong;
  pong.kind = Kind::kPong;
  pong.group = heard.group;
  pong.from = heard.to;
  pong.to = heard.from;
  if (heard.kind == Kind::kPing) pong.op = heard.op;
  pong.value = value;
  return pong;
}

/// Answers a ping with whether its group still exists here. Handles a pong.
void Messenger::answer(const MessageHeader& header, std::span<const std::byte> whole, std::span<const std::byte> body) {
  const auto sign = read_behind_header<PingBody>(whole);
  if (!sign) return;
  const auto it = by_process_.find(sign->process);
  if (it == by_process_.end()) return;
  if (header.kind == Kind::kPing && !peers_[it->second].lost.empty()) return answer_given_up(header, it->second);
  note_sign_of_life(it->second);
  if (header.kind == Kind::kPong) return take_answer(header, it->second, body);
  const PingBody mine{process_};
  GroupPort* const port = port_of(header);
  send(it->second, pong_to(header, port ? kGroupStands : kGroupGone), std::as_bytes(std::span(&mine, 1)), {}, nullptr,
       0);
  if (!port) return;
  port->mutex().held_by_caller();
  port->pinged_by(header.from, it->second);
}

void Messenger::take_answer(const MessageHeader& header, PeerId id, std::span<const std::byte> body) {
  Peer& peer = peers_[id];
  if (header.op != 0 && header.op == peer.last_asked) peer.last_asked = 0;
  if (header.value == kGivenUp) {
    if (peer.asked < peer.joined) return note_left(header);  // a newer group has connected to it since
    const std::string why(reinterpret_cast<const char*>(body.data()), std::min(body.size(), kMostCopied));
    if (peer.lost.empty()) peer.has_given_up_this = true;
    return lose(id, "considers this process lost: " + printable(why));
  }
  if (header.value == kGroupGone) note_left(header);
}

void Messenger::note_left(const MessageHeader& heard) {
  GroupPort* port = port_of(heard);
  if (!port) return;
  port->mutex().held_by_caller();
  port->note_left(heard.from);
}

/// Answers a ping of a process that this one has given up but that is still alive. It is told the reason, once.
/// Otherwise it would wait in vain and finally report this process as lost.
void Messenger::answer_given_up(const MessageHeader& ping, PeerId id) {
  const auto same = [id](const auto& told) { return told.second == id; };
  if (peers_[id].spare || std::any_of(given_up_.begin(), given_up_.end(), same)) return;
  given_up_.emplace_back(ping, id);  // this is a callback of the link
}

void Messenger::send_given_up(const MessageHeader& ping, PeerId id) {
  Peer& peer = peers_[id];
  contain("telling a process that it is considered lost", [&] {
    mutex_.held_by_caller();
    const PeerId link = link_->add(peer.address);
    by_link_.resize(std::max<size_t>(by_link_.size(), link + 1));
    by_link_[link] = id;
    peer.spare = link;
    const PingBody mine{process_};
    Outgoing& out = outgoing(link, pong_to(ping, kGivenUp), std::as_bytes(std::span(&mine, 1)));
    out.post.body = out.copied.data();
    out.post.bytes = std::min(peer.lost.size(), kMostCopied);
    std::memcpy(out.copied.data(), peer.lost.data(), out.post.bytes);
    link_->post(out.post);
  });
}

void Messenger::send_ping(PeerId id, uint64_t group, uint32_t from, uint32_t to, uint32_t number) {
  MessageHeader ping;
  ping.kind = Kind::kPing;
  ping.group = group;
  ping.from = from;
  ping.to = to;
  ping.op = number;
  const PingBody mine{process_};
  send(id, ping, std::as_bytes(std::span(&mine, 1)), {}, nullptr, 0);
}

void Messenger::finish() {
  constexpr std::chrono::seconds kMostSilence{5}, kMost{300}, kSayAfter{1};
  constexpr std::chrono::milliseconds kNap{10};
  const auto began = Clock::now();
  const auto silence = std::min<Clock::duration>(silence_, kMostSilence);
  MutexLock lock(mutex_);
  // UCX makes a single TCP connection to a peer with one network device. On it, the answer to this last ping proves
  // that everything before it has arrived.
  for (PeerId id = 0; id < peers_.size(); ++id) {
    Peer& peer = peers_[id];
    if (!peer.has_sent || !peer.lost.empty() || peer.warned) continue;
    peer.last_asked = ++questions_;
    send_ping(id, /*group=*/0, 0, 0, peer.last_asked);
  }
  const auto is_open = [&](const Peer& peer) {
    const bool silent = Clock::now() - std::max(began, peer.heard) > silence;
    return peer.last_asked != 0 && peer.lost.empty() && !silent;
  };
  bool said = false;
  for (;;) {
    const auto open = std::find_if(peers_.begin(), peers_.end(), is_open);
    if (closed_ || Clock::now() - began >= kMost || open == peers_.end()) return;
    if (!said && Clock::now() - began > kSayAfter) {
      said = true;
      NVX_LOG(kInfo,
              "this process ends when %s has received everything, or after %.0f s without a "
              "sign of life",
              name_of(PeerId(open - peers_.begin())).c_str(), std::chrono::duration<double>(silence).count());
    }
    const uint64_t seen = events_;
    const bool moved = progress();
    lock.unlock();
    if (!moved) sleep(kNap, seen);
    if (stop_wanted()) return;
    lock.lock();
  }
}

/// The name of a peer, if a group has recorded one; that group may be gone.
std::string Messenger::name_of(PeerId peer, const std::string& otherwise) {
  for (const auto& [rank, met] : met_) {
    for (const Met& m : met) {
      if (m.peer == peer) return "global rank " + std::to_string(rank) + " " + m.known_as;
    }
  }
  return otherwise;
}

void Messenger::ask(PeerId id, uint64_t group, int from, int to) {
  Peer& peer = peers_[id];
  const auto now = Clock::now();
  if (!peer.lost.empty()) return;
  if (now - peer.asked > 3 * kAskInterval) peer.waits_for_pong = peer.warned = false;  // no thread has asked since
  if (peer.waits_for_pong) {
    const auto silent = now - peer.asked_first;
    if (silent > silence_) {
      const auto s = std::chrono::duration_cast<std::chrono::seconds>(silent).count();
      return lose(id, "has given no sign of life for " + std::to_string(s) + " s");
    }
    if (silent > silence_ * 3 / 10 && !peer.warned) {
      peer.warned = true;
      NVX_LOG(
          kWarn,
          "%s gives no sign of life for %.1f s; it counts as lost after %.0f s (NVX_LIVENESS_S). Check whether it is "
          "stopped or its host is down",
          name_of(id, "rank " + std::to_string(to)).c_str(), std::chrono::duration<double>(silent).count(),
          std::chrono::duration<double>(silence_).count());
    }
  }
  if (now - peer.asked < kAskInterval) return;
  if (!peer.waits_for_pong) peer.asked_first = now;
  peer.asked = now;
  peer.waits_for_pong = true;
  send_ping(id, group, uint32_t(from), uint32_t(to), /*number=*/0);
}

// --- failure

void Messenger::meet(uint64_t global_rank, PeerId peer, std::weak_ptr<void> standing, std::string known_as) {
  std::vector<Met>& met = met_[global_rank];
  const ProcessId process = peers_[peer].process;  // a rank whose process differs was replaced
  std::erase_if(met, [&](const Met& m) {
    mutex_.held_by_caller();
    return m.standing.expired() || peers_[m.peer].process != process;
  });
  met.push_back({peer, std::move(standing), std::move(known_as)});
}

std::string Messenger::fate(uint64_t global_rank) {
  const auto it = met_.find(global_rank);
  if (it == met_.end()) return "";
  std::erase_if(it->second, [](const Met& m) { return m.standing.expired(); });
  if (it->second.empty()) return "";
  const Met& met = it->second.back();
  ask(met.peer, /*group=*/0, /*from=*/0, int(global_rank));
  progress();
  const std::string& lost = peers_[met.peer].lost;
  return lost.empty() ? "" : met.known_as + " is lost: " + lost;
}

const std::string& Messenger::lost_because(PeerId peer) { return peers_[peer].lost; }

std::string Messenger::unheard(PeerId id) {
  const Peer& peer = peers_[id];
  return peer.heard == Clock::time_point() && !closed_ ? link_->why_unheard(peer.link) : "";
}

bool Messenger::has_given_up_this(PeerId peer) { return peers_[peer].has_given_up_this; }

Clock::duration Messenger::silence_of(PeerId id) const {
  const Peer& peer = peers_[id];
  const auto now = Clock::now();
  const bool asked = peer.waits_for_pong && now - peer.asked <= 3 * kAskInterval;
  return asked ? now - peer.asked_first : Clock::duration(0);
}

void Messenger::lost(PeerId link, const std::string& why) {
  if (link >= by_link_.size()) return;
  Peer& peer = peers_[by_link_[link]];
  if (peer.spare != link) return lose(by_link_[link], why);
  peer.spare.reset();
  to_forget_.push_back(link);
}

void Messenger::disconnect(PeerId peer, const std::string& why) { lose(peer, why); }

void Messenger::lose(PeerId id, const std::string& why) {
  Peer& peer = peers_[id];
  if (!peer.lost.empty()) return;
  peer.lost = (why.empty() ? "is lost" : why) + unheard(id);
  // Traced only: a thread that waits for the peer reports the loss, and otherwise the peer may have left in good order.
  NVX_LOG(kTrace, "the connection to a process on another host has ended: %s", peer.lost.c_str());
  to_forget_.push_back(peer.link);  // this may be a callback of the link
  wake_sleepers();
}

// --- the progress thread

/// A thread that waits drives the link, and this thread stays away from the lock. Otherwise this thread answers pings
/// and sends what the last operation left in the link: every millisecond shortly after an operation, later when the
/// link has events.
void Messenger::run_progress_thread() {
  begin_own_thread("nvx-messenger");
  while (!closing_.load(std::memory_order_acquire)) {
    const auto idle = std::chrono::nanoseconds(now_ns() - driven_ns_.load(std::memory_order_relaxed));
    if (idle < kActiveInterval || !progress_while_idle(idle < kActiveFor)) std::this_thread::sleep_for(kActiveInterval);
  }
}

/// Returns true if it has slept.
bool Messenger::progress_while_idle(bool active) {
  MutexLock lock(mutex_);
  if (closed_ || sleeper_in_link_) return false;
  const int64_t driven = driven_ns_.load(std::memory_order_relaxed);
  if (!progress_all()) driven_ns_.store(driven, std::memory_order_relaxed);  // this check does not count as activity
  if (active || !link_->arm()) return false;
  lock.unlock();
  link_->sleep(kIdleInterval);  // not counted as `sleeper_in_link_`: the link itself must wake a thread that waits
  return true;
}

}  // namespace nvx::net
