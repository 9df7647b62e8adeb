#include "net/messenger.h"

#include <algorithm>
#include <cstring>
#include <system_error>
#include <utility>

#include "base/config.h"
#include "base/contain.h"
#include "base/interrupt.h"
#include "base/log.h"
#include "base/per_process.h"
#include "base/random.h"
#include "base/text.h"
#include "base/thread_state.h"
#include "net/group_port.h"
#include "net/tcp/tcp.h"
#include "net/ucx/ucx.h"

namespace nvx::net {
namespace {

constexpr std::chrono::milliseconds kIdleInterval{1000};  ///< the interval of the progress thread when nothing happens
constexpr std::chrono::milliseconds kMostForReports{200};
constexpr std::chrono::milliseconds kActiveFor{20};      ///< the time after the last activity during which it polls
constexpr std::chrono::milliseconds kActiveInterval{1};  ///< its polling interval then

int64_t now_ns() { return Clock::now().time_since_epoch().count(); }

/// Lives until the process ends, because peers may ping this process between two groups.
struct Home {
  Mutex mutex;
  std::shared_ptr<Messenger> messenger GUARDED_BY(mutex);
};

Home& home() { return of_this_process<Home>(); }

std::unique_ptr<Link> open_link(const std::string& store_host) {
  const JobKey* const key = JobKey::instance();
  return key ? open_tcp(*key, store_host) : open_ucx(store_host);
}

}  // namespace

std::shared_ptr<Messenger> Messenger::instance(const std::string& store_host) {
  Home& h = home();
  MutexLock lock(h.mutex);
  if (!h.messenger) h.messenger = std::make_shared<Messenger>(open_link(store_host), config().liveness);
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
      poll_interval_(link_->poll_interval()),
      process_(random_value<ProcessId>()),
      liveness_(*this, silence) {
  link_->listen(*this);
  try {
    progress_thread_ = std::thread([this] { run_progress_thread(); });
  } catch (const std::system_error& error) {
    throw system_error("cannot start a thread for the link to other hosts", error.code().value());
  }
}

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

std::string Messenger::use_device_memory(std::span<const std::byte> range) {
  MutexLock lock(mutex_);
  return link_->use_device_memory(range);
}

void Messenger::remove_port(uint64_t group, int rank, const GroupPort& port) {
  const auto it = ports_.find({group, uint32_t(rank)});
  if (it != ports_.end() && it->second == &port) ports_.erase(it);
}

PeerId Messenger::connect(std::span<const std::byte> address) {
  // Before it adds the same process again.
  for (const PeerId peer : std::exchange(to_forget_, {})) link_->forget(peer);
  ProcessId process = 0;
  if (address.size() <= sizeof process) throw Error(Code::kMismatch, "nvx: the network address of a rank is damaged");
  std::memcpy(&process, address.data(), sizeof process);
  const auto it = by_process_.find(process);
  if (it != by_process_.end() && peers_[it->second].lost.empty()) return liveness_.joined(it->second), it->second;
  const std::span<const std::byte> of_link = address.subspan(sizeof process);
  // If send_to_lost() opened a connection to this process, reuse it.
  const std::optional<PeerId> spare =
      it == by_process_.end() ? std::nullopt : std::exchange(peers_[it->second].spare, {});
  const PeerId id = spare ? *spare : link_->add(of_link);
  peers_.resize(std::max<size_t>(peers_.size(), id + 1));
  peers_[id] = {.process = process, .address = {of_link.begin(), of_link.end()}};
  liveness_.joined(id);
  by_process_[process] = id;
  return id;
}

void Messenger::send(PeerId to, const MessageHeader& header, std::span<const std::byte> behind,
                     std::span<const std::byte> body, Sender* sender, uint64_t cookie) {
  if (closed_ || !peers_[to].lost.empty()) {
    if (sender) sender->sent(cookie, Status(Code::kPeerDied, peers_[to].lost));
    return;
  }
  peers_[to].has_sent = true;
  Outgoing& out = outgoing(to, header, behind);
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

Messenger::Outgoing& Messenger::outgoing(PeerId to, const MessageHeader& header, std::span<const std::byte> behind) {
  if (free_.empty()) {
    outgoing_.emplace_back();
    free_.push_back(&outgoing_.back());
  }
  Outgoing& out = *free_.back();
  free_.pop_back();
  if (header.kind == Kind::kPoison) out.report_ends = Clock::now() + kMostForReports;
  out.post.to = to;
  out.post.owner = &out;
  std::memcpy(out.post.header, &header, sizeof header);
  if (!behind.empty()) std::memcpy(out.post.header + sizeof header, behind.data(), behind.size());
  out.post.header_bytes = uint8_t(sizeof header + behind.size());
  return out;
}

void Messenger::done(Post& post, const Status& status) {
  Outgoing* out = static_cast<Outgoing*>(post.owner);
  out->report_ends = {};
  if (Sender* sender = std::exchange(out->sender, nullptr)) sender->sent(out->cookie, status);
  free_.push_back(out);
}

void Messenger::flush_reports() {
  MutexLock lock(mutex_);
  const auto waits = [](const Outgoing& out) { return out.report_ends > Clock::now(); };
  while (!closed_ && std::ranges::any_of(outgoing_, waits)) drive_or_pause();
}

bool Messenger::progress() {
  driven_ns_.store(now_ns(), std::memory_order_relaxed);
  if (closed_) return false;
  const bool moved = link_->progress();
  for (const PeerId peer : std::exchange(to_forget_, {})) link_->forget(peer);
  liveness_.settle();
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

bool Messenger::await_end(const std::function<int()>& open, const std::function<void()>& disconnect) {
  constexpr std::chrono::milliseconds kTimeout{200}, kMost{3000}, kAfterDisconnect{2000};
  auto end = Clock::now() + kMost, idle_end = Clock::now() + kTimeout;
  // A slow link is not a dead one: the wait goes on while the number decreases.
  for (int left = open(); left != 0 && Clock::now() < std::min(idle_end, end);) {
    drive_or_pause();
    const int now = open();
    if (now < left) idle_end = Clock::now() + kTimeout;
    left = now;
  }
  if (open() == 0) return true;
  disconnect();
  end = Clock::now() + kAfterDisconnect;
  while (open() != 0 && Clock::now() < end) drive_or_pause();
  return open() == 0;
}

bool Messenger::progress_all() {
  constexpr int kMostMoves = 64;
  bool moved = false;
  for (int i = 0; i < kMostMoves && progress(); ++i) moved = true;
  return moved;
}

bool Messenger::try_progress() {
  if (!mutex_.try_lock()) return false;
  const MutexLock lock(mutex_, std::adopt_lock);
  return progress_all();
}

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

/// The port that a message is for. None if the message names another process's rank as its sender.
GroupPort* Messenger::port_of(const MessageHeader& header) {
  const auto it = ports_.find({header.group, header.to});
  if (it == ports_.end()) return nullptr;
  it->second->mutex().held_by_caller();
  const auto from = it->second->process_of(int(header.from));
  return from && !link_->sent_by(*from) ? nullptr : it->second;
}

std::byte* Messenger::place(std::span<const std::byte> bytes, size_t size) {
  const auto header = read_header(bytes);
  GroupPort* port = header ? port_of(*header) : nullptr;
  if (!port) return nullptr;
  port->mutex().held_by_caller();
  const auto from = port->process_of(int(header->from));
  if (from && !lost_because(*from).empty()) return nullptr;  // disconnect() could not take the place back
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
  if (header->kind == Kind::kPing || header->kind == Kind::kPong) return liveness_.answer(*header, whole, body);
  GroupPort* port = port_of(*header);
  if (!port) return;  // its group is gone here
  port->mutex().held_by_caller();
  port->arrived(*header, whole, body);
  if (const auto from = port->process_of(int(header->from))) liveness_.received(*from, *header, !body.empty());
}

void Messenger::send_to_lost(PeerId id, const MessageHeader& header, std::span<const std::byte> behind) {
  Peer& peer = peers_[id];
  peer.spare = link_->add(peer.address);
  peers_.resize(std::max<size_t>(peers_.size(), *peer.spare + 1));
  peers_[*peer.spare].spare_of = id;
  Outgoing& out = outgoing(*peer.spare, header, behind);
  out.post.body = out.copied.data();
  out.post.bytes = std::min(peer.lost.size(), kMostCopied);
  std::memcpy(out.copied.data(), peer.lost.data(), out.post.bytes);
  link_->post(out.post);
}

void Messenger::finish() {
  constexpr std::chrono::seconds kMostSilence{5}, kMost{300}, kLogAfter{1};
  constexpr std::chrono::milliseconds kSleepFor{10};
  const auto began = Clock::now();
  const auto timeout = std::min<Clock::duration>(liveness_.silence(), kMostSilence);
  MutexLock lock(mutex_);
  liveness_.send_last_pings();
  bool logged = false;
  for (;;) {
    const auto open = liveness_.open_peer(began, timeout);
    if (closed_ || Clock::now() - began >= kMost || !open) return;
    if (!logged && Clock::now() - began > kLogAfter) {
      logged = true;
      NVX_LOG(kInfo, "this process ends when %s has received everything, or after %.0f s without a sign of life",
              liveness_.name_of(*open).c_str(), std::chrono::duration<double>(timeout).count());
    }
    const uint64_t seen = events_;
    const bool moved = progress();
    lock.unlock();
    if (!moved) sleep(kSleepFor, seen);
    if (stop_requested()) return;
    lock.lock();
  }
}

// --- failure

std::string Messenger::obstacle(PeerId id) { return liveness_.has_received(id) || closed_ ? "" : link_->obstacle(id); }

void Messenger::lost(PeerId id, const std::string& why) {
  if (id >= peers_.size()) return;
  const std::optional<PeerId> owner = peers_[id].spare_of;
  if (!owner) return disconnect(id, why);
  peers_[*owner].spare.reset();
  to_forget_.push_back(id);
}

void Messenger::disconnect(PeerId id, const std::string& why, bool may_live) {
  Peer& peer = peers_[id];
  if (!peer.lost.empty()) return;
  peer.may_live = may_live;
  peer.lost = (why.empty() ? "is lost" : why) + obstacle(id);
  // Traced only: a thread that waits for the peer reports the loss, and otherwise the peer may have left in good order.
  NVX_LOG(kTrace, "the connection to a process on another host has ended: %s", peer.lost.c_str());
  to_forget_.push_back(id);  // this may be a callback of the link
  wake_sleepers();
}

// --- the progress thread

/// A thread that waits drives the link, and this thread stays away from the lock. Otherwise this thread answers pings
/// and sends the data that the last operation left in the link: every millisecond shortly after an operation, later
/// when the link has events.
void Messenger::run_progress_thread() {
  begin_own_thread("nvx-messenger");
  while (!closing_.load(std::memory_order_acquire)) {
    const auto idle = std::chrono::nanoseconds(now_ns() - driven_ns_.load(std::memory_order_relaxed));
    auto pause = kIdleInterval;  // after an exception: of a lack of memory, for example
    contain("driving the connections to other hosts", [&] {
      const bool slept = idle >= kActiveInterval && progress_while_idle(idle < kActiveFor);
      pause = slept ? std::chrono::milliseconds(0) : kActiveInterval;
    });
    std::this_thread::sleep_for(pause);
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
