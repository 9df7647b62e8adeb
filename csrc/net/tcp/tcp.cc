#include "net/tcp/tcp.h"

#include <sys/epoll.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <thread>
#include <utility>

#include "base/config.h"
#include "base/contain.h"
#include "base/log.h"
#include "base/per_process.h"
#include "base/random.h"
#include "base/text.h"
#include "net/bell.h"
#include "net/descriptors.h"
#include "net/interfaces.h"
#include "net/link_events.h"
#include "net/tcp/tcp_incoming.h"
#include "net/tcp/tcp_listeners.h"
#include "net/tcp/tcp_outgoing.h"
#include "net/unreached.h"

namespace nvx::net {
namespace {

using std::chrono::milliseconds;

constexpr size_t kSegmentBytes = 64 << 10;
/// The part of a read that is copied once more: the part behind the body that is arriving.
constexpr size_t kScratchBytes = 16 << 10;
/// Bounds for connections that are not authenticated yet: their number besides one of each peer, how long they may
/// take, and how old the oldest must be before it gives way to another one.
constexpr size_t kMostPending = 128;
constexpr milliseconds kHandshake{5000}, kLeastHandshake{100};
constexpr int kMostAccepted = 16;  // in a call of progress()
constexpr milliseconds kBetweenTries{100}, kCheckInterval{50};
/// How long the peer's host may take to accept a connection. Then another one is tried, at the next address.
constexpr milliseconds kAttempt{1000};
/// How long messages that have left a peer may arrive after its death was noticed.
constexpr milliseconds kLastMessages{1000};

/// The epolls of this process's links, for forked children: one more than the descriptor; 0: none.
constexpr int kNoEpoll = -1;
std::array<std::atomic<int>, 64> epolls{};

void replace_epoll(int known, int by) {
  [[maybe_unused]] static const bool kRegistered = in_forked_children([] {
    for (std::atomic<int>& epoll : epolls) {
      if (const int place = epoll.exchange(0)) close_sockets(place - 1);
    }
  });
  for (std::atomic<int>& epoll : epolls) {
    int expected = known + 1;
    if (epoll.compare_exchange_strong(expected, by + 1)) return;
  }
}

Fd new_epoll() {
  Fd fd(epoll_create1(EPOLL_CLOEXEC));
  if (!fd) throw system_error("cannot make an epoll for connections to other hosts");
  return fd;
}

class TcpLink final : public Link {
 public:
  TcpLink(const JobKey& key, const std::string& store_host);
  ~TcpLink() override {
    close();
    if (fork_generation() != generation_) (void)sockets_.release();  // here their numbers may be those of other files
  }

  void listen(Receiver& receiver) override { receiver_ = &receiver; }
  void close() override;
  std::vector<std::byte> address() const override { return encode_address({self_, listening_at_}, key_); }
  PeerId add(std::span<const std::byte> address) override;
  void forget(PeerId peer) override;
  void admit(std::span<const AddressPrefix> addresses) override {
    if (usable()) sockets_->listeners.admit(addresses);
  }
  bool sent_by(PeerId peer) const override {
    return !reading_ || (peer < nonces_.size() && nonces_[peer] == reading_->from());
  }
  std::string obstacle(PeerId peer) override;
  void post(Post& post) override;
  void cancel(Post& post) override;
  bool progress() override;
  bool arm() override { return events_.empty() && !changed_; }
  void sleep(std::chrono::microseconds span) override;
  void wake() override { bell_.ring(); }
  size_t segment_bytes() const override { return kSegmentBytes; }
  /// progress() is a system call.
  std::chrono::nanoseconds poll_interval() const override { return std::chrono::nanoseconds(800); }
  std::string describe() const override;

 private:
  struct Peer {
    PeerId id;
    LinkNonce nonce;
    std::vector<HostAddress> listeners;
    std::unique_ptr<Outgoing> out{};
    size_t attempts = 0, refused = 0;  // the latter: in a row
    Clock::time_point give_up{}, next_try{};
    bool lost = false;
    std::string dying{};  // why, if it is lost as soon as its last messages have arrived
    Clock::time_point dies_at{};
  };
  /// A connection to a forgotten peer that still sends.
  struct Leaving {
    std::unique_ptr<Outgoing> out;
    Clock::time_point until;
    bool goes_on() const {
      const Outgoing::State state = out->state();
      const bool ended = state == Outgoing::State::kFailed || state == Outgoing::State::kLeft;
      return !ended && (state == Outgoing::State::kOpen || !out->idle()) && Clock::now() < until;
    }
  };
  struct Sockets {
    explicit Sockets(const std::string& store_host) : listeners(epoll.get(), store_host) {}
    Fd epoll = new_epoll();
    TcpListeners listeners;
    std::vector<std::unique_ptr<Incoming>> incoming;
    std::vector<std::unique_ptr<Peer>> peers;  // by PeerId; null: forgotten
    std::vector<Leaving> leaving;
  };

  bool usable() const { return !closed_ && fork_generation() == generation_; }
  Peer* find(PeerId peer) const { return peer < sockets_->peers.size() ? sockets_->peers[peer].get() : nullptr; }
  bool handle(const epoll_event& event);
  bool accept(Socket& listener);
  bool bound_unauthenticated();
  void connect(Peer& peer);
  void attempt(Peer& peer);
  void lose(Peer& peer, const std::string& why);
  void settle();
  void reap_incoming(Clock::time_point now);
  void note_end(const Incoming& incoming);
  void check_peer(Peer& peer, Clock::time_point now);
  bool has_connected(const Peer& peer) const;
  void retry(Peer& peer, Clock::time_point now);
  bool report() { return events_.report(receiver_, /*losses=*/!closed_); }
  void drain();

  const JobKey& key_;
  const LinkNonce self_ = random_value<LinkNonce>();
  const uint32_t generation_ = fork_generation();
  Bell bell_;
  Receiver* receiver_ = nullptr;
  std::atomic<bool> closed_{false};
  std::unique_ptr<Sockets> sockets_;
  const std::vector<HostAddress> listening_at_;
  std::vector<LinkNonce> nonces_;  // by PeerId, forgotten ones too
  std::array<std::byte, kScratchBytes> scratch_;
  const Incoming* reading_ = nullptr;
  Unplaced spare_;
  Unreached unreached_{config().liveness * 19 / 20};  // before the messenger's timeout, which does not know the reason
  std::vector<LinkNonce> forgotten_;                  // links whose places progress() is to give back
  LinkEvents events_;
  bool changed_ = false;  // a connection has ended or been opened
  Clock::time_point next_check_{};
  bool warned_of_unauthenticated_ = false;
};

TcpLink::TcpLink(const JobKey& key, const std::string& store_host)
    : key_(key), sockets_(std::make_unique<Sockets>(store_host)), listening_at_(sockets_->listeners.addresses()) {
  replace_epoll(kNoEpoll, sockets_->epoll.get());
  NVX_LOG(kInfo, "%s", describe().c_str());
  if (const std::vector<std::string> ports = rdma_ports(); !ports.empty()) {
    NVX_LOG(kWarn, "NVX_JOB_KEY is set, so this process uses TCP to other hosts, although there is RDMA (%s)",
            joined(ports).c_str());
  }
}

std::string TcpLink::describe() const {
  std::vector<std::string> at;
  for (const HostAddress& address : listening_at_)
    at.push_back(address.text() + " port " + std::to_string(address.port));
  return "TCP with a job key, at " + joined(at) + ", host memory";
}

PeerId TcpLink::add(std::span<const std::byte> bytes) {
  const std::optional<TcpAddress> address = decode_address(bytes, key_);
  if (!address) {
    throw Error(Code::kMismatch, "nvx: a peer's address is damaged, or no holder of this job's key has written it",
                "set NVX_JOB_KEY to the same key on all ranks, and have all ranks use the same nvx");
  }
  const auto id = PeerId(sockets_->peers.size());
  sockets_->peers.push_back(std::make_unique<Peer>(Peer{id, address->nonce, address->listeners}));
  nonces_.push_back(address->nonce);
  return id;
}

std::string TcpLink::obstacle(PeerId id) {
  const Peer* peer = usable() ? find(id) : nullptr;
  if (!peer) return "";
  const bool refused = peer->refused >= peer->listeners.size();  // a filter would not answer
  const bool unreached = peer->attempts != 0 && !refused && !(peer->out && peer->out->was_open());
  return why_not_admitted(unreached ? peer->listeners : std::vector<HostAddress>(), sockets_->listeners.dropped()) +
         sockets_->listeners.why_paused();
}

// --- connections to peers

void TcpLink::post(Post& post) {
  Peer* peer = usable() ? find(post.to) : nullptr;
  if (!usable()) {
    events_.end(post, {Code::kAborted, "nvx: the link is closed, or belongs to this process's parent"});
  } else if (!peer || peer->lost || !peer->dying.empty()) {
    events_.end(post);
  } else if (!peer->out && unreached_.holds(peer->id, peer->listeners)) {
    unreached_.keep(post);
  } else {
    if (!peer->out) connect(*peer);
    peer->out->post(post);
    changed_ |= peer->out->state() == Outgoing::State::kFailed;
  }
}

void TcpLink::cancel(Post& post) {
  Peer* peer = usable() ? find(post.to) : nullptr;
  if (unreached_.remove(post) || (peer && peer->out && peer->out->remove(post))) events_.end(post, cancelled());
}

void TcpLink::connect(Peer& peer) {
  peer.out = std::make_unique<Outgoing>(sockets_->epoll.get(), key_, self_, peer.nonce, events_);
  peer.give_up = Clock::now() + config().liveness * 19 / 20;
  attempt(peer);
}

void TcpLink::attempt(Peer& peer) {
  peer.next_try = Clock::now() + kBetweenTries;
  peer.out->connect(peer.listeners[peer.attempts++ % peer.listeners.size()]);
  changed_ |= peer.out->state() == Outgoing::State::kFailed;
}

void TcpLink::check_peer(Peer& peer, Clock::time_point now) {
  if (peer.out) {
    const Outgoing::State state = peer.out->state();
    const bool in_handshake = state == Outgoing::State::kHelloSent || state == Outgoing::State::kProved;
    if ((in_handshake || state == Outgoing::State::kConnecting) &&
        (now > peer.give_up || now - peer.out->begun() > (in_handshake ? kHandshake : kAttempt)))
      peer.out->fail(in_handshake ? "its process does not take part in the handshake" : "no answer");
    if (peer.out->state() == Outgoing::State::kFailed && peer.dying.empty()) {
      if (!peer.out->was_open())
        retry(peer, now);
      else
        peer.dying = "its process has ended, or the network to it has failed (" + peer.out->why() + ")";
      peer.dies_at = now + kLastMessages;
      if (!peer.dying.empty()) events_.end(peer.out->take_posts());
    }
  }
  if (peer.dying.empty()) return;
  if (!has_connected(peer) || now > peer.dies_at) lose(peer, peer.dying);
}

/// Whether the peer has a connection to this rank, and so may still send.
bool TcpLink::has_connected(const Peer& peer) const {
  return std::ranges::any_of(sockets_->incoming, [&](const auto& incoming) {
    return incoming->authenticated() && incoming->from() == peer.nonce;
  });
}

/// No message has been sent on a connection that failed before it was authenticated, so another one may replace it.
void TcpLink::retry(Peer& peer, Clock::time_point now) {
  const size_t addresses = peer.listeners.size();
  const std::string why = peer.out->why();
  const bool wrong_key = peer.out->failure() == Outgoing::Failure::kWrongKey;
  const size_t refused = wrong_key || peer.out->failure() == Outgoing::Failure::kRefused ? peer.refused + 1 : 0;
  if (refused >= addresses) {
    peer.refused = refused;
    if (wrong_key) return lose(peer, why);
    return void(peer.dying = "its process has ended, or a firewall rejects connections to it (" + why + ")");
  }
  if (now < peer.next_try && peer.attempts % addresses == 0) return;
  peer.refused = refused;
  if (now < peer.give_up) return attempt(peer);
  const std::string way = has_connected(peer) ? describe_route(peer.listeners) : "";  // otherwise obstacle() adds it
  lose(peer, "cannot be connected to (" + why + ")" +
                 (way.empty() ? "" : ", " + way + ": a firewall there may drop packets to the ports of ranks"));
}

void TcpLink::lose(Peer& peer, const std::string& why) {
  if (peer.lost) return;
  peer.lost = true;
  events_.lose(peer.id, why);
  events_.end(unreached_.take(peer.id));
  if (peer.out && peer.out->was_open()) sockets_->listeners.connection_lost();
  if (peer.out) events_.end(peer.out->take_posts());
  peer.out.reset();
}

void TcpLink::forget(PeerId id) {
  if (!usable()) return;
  Peer* peer = find(id);
  if (!peer) return;
  events_.end(unreached_.take(id));
  if (peer->out) {
    peer->out->leave(Frame::kLeave);
    const milliseconds timeout = peer->out->idle() ? kFlushTimeout : kOpenTimeout;
    sockets_->leaving.push_back({std::move(peer->out), Clock::now() + timeout});
  }
  events_.forget(id);
  const LinkNonce nonce = peer->nonce;
  sockets_->peers[id].reset();
  const auto same = [&](const auto& other) { return other && other->nonce == nonce; };
  if (std::ranges::none_of(sockets_->peers, same)) forgotten_.push_back(nonce);
  changed_ = true;
}

// --- connections of peers

bool TcpLink::accept(Socket& listener) {
  for (int i = 0; i < kMostAccepted; ++i) {
    if (!bound_unauthenticated()) return sockets_->listeners.pause(listener), i != 0;
    std::string from;
    Fd fd = sockets_->listeners.accept(listener, from);
    if (!fd) return i != 0;
    contain("accepting a connection", [&] {
      sockets_->incoming.push_back(
          std::make_unique<Incoming>(sockets_->epoll.get(), std::move(fd), from, key_, self_, spare_));
    });
  }
  return true;
}

/// Bounds the connections that are not authenticated: at the limit, closes the oldest one, preferably one that has not
/// sent its hello. Returns false if that one is so new that the next connection should wait in the kernel's queue.
bool TcpLink::bound_unauthenticated() {
  size_t pending = 0;
  Incoming* oldest = nullptr;
  for (const auto& incoming : sockets_->incoming) {
    if (incoming->authenticated() || incoming->ended() != Incoming::End::kNone) continue;
    if (pending++ == 0 || (oldest->has_hello() && !incoming->has_hello())) oldest = incoming.get();
  }
  if (pending < kMostPending + sockets_->peers.size()) return true;
  if (Clock::now() - oldest->since() < kLeastHandshake) return false;
  oldest->end(Incoming::End::kBroken, "it was replaced by another connection");
  changed_ = true;
  return true;
}

void TcpLink::reap_incoming(Clock::time_point now) {
  std::erase_if(sockets_->incoming, [&](const std::unique_ptr<Incoming>& incoming) {
    if (!incoming->authenticated() && now - incoming->since() > kHandshake)
      incoming->end(Incoming::End::kBroken, "it did not complete the handshake");
    if (incoming->ended() == Incoming::End::kNone) return false;
    incoming->drop(*receiver_);
    note_end(*incoming);
    return true;
  });
}

/// A connection that is cut may be one whose message a living peer has given up, so connecting to that peer decides.
void TcpLink::note_end(const Incoming& incoming) {
  if (!incoming.authenticated()) {
    if (incoming.why().empty() || std::exchange(warned_of_unauthenticated_, true)) return;
    NVX_LOG(kWarn,
            "closed a connection from %s that was not authenticated with the job's key (NVX_JOB_KEY): %s. It has no "
            "effect on this job. Further ones are not reported",
            incoming.at().c_str(), incoming.why().c_str());
    return;
  }
  for (const std::unique_ptr<Peer>& peer : sockets_->peers) {
    if (!peer || peer->lost || peer->nonce != incoming.from()) continue;
    if (incoming.ended() == Incoming::End::kLost) lose(*peer, incoming.why());
    if (incoming.ended() == Incoming::End::kBroken && !peer->out) connect(*peer);
  }
}

// --- progress

bool TcpLink::handle(const epoll_event& event) {
  auto* const socket = static_cast<Socket*>(event.data.ptr);
  if (socket->kind() == Socket::Kind::kListener) return accept(*socket);
  bool moved = false;
  if (socket->kind() == Socket::Kind::kOutgoing) {
    auto& outgoing = *static_cast<Outgoing*>(socket);
    const Outgoing::State before = outgoing.state();
    moved = outgoing.advance(event.events);
    changed_ |= outgoing.state() != before;
    return moved;
  }
  auto& incoming = *static_cast<Incoming*>(socket);
  reading_ = &incoming;
  contain_and([&] { moved = incoming.read(*receiver_, scratch_); },
              [&](const std::exception* error) {
                incoming.end(Incoming::End::kLost, error ? error->what() : "an exception of an unknown type");
              });
  reading_ = nullptr;
  changed_ |= incoming.ended() != Incoming::End::kNone;
  return moved;
}

bool TcpLink::progress() {
  if (!usable()) return report();
  const bool reported = report();  // ends of posts are reported before the answers to these posts arrive
  for (const LinkNonce& nonce : forgotten_) {
    for (const auto& incoming : sockets_->incoming) {
      if (incoming->authenticated() && incoming->from() == nonce) incoming->discard(*receiver_);
    }
  }
  forgotten_.clear();
  std::array<epoll_event, 32> events;
  bool moved = false;
  const int n = epoll_wait(sockets_->epoll.get(), events.data(), int(events.size()), 0);
  for (int i = 0; i < n; ++i) moved |= handle(events[size_t(i)]);
  settle();
  return report() || reported || moved;
}

/// Does the work that no event announces, and ends connections, which events of one epoll_wait() may name.
void TcpLink::settle() {
  const auto now = Clock::now();
  if (!std::exchange(changed_, false) && now < next_check_) return;
  next_check_ = now + kCheckInterval;
  reap_incoming(now);
  for (const std::unique_ptr<Peer>& peer : sockets_->peers) {
    if (peer && !peer->lost) check_peer(*peer, now);
  }
  std::erase_if(sockets_->leaving, [&](const Leaving& leaving) {
    if (leaving.goes_on()) return false;
    events_.end(leaving.out->take_posts());
    return true;
  });
  sockets_->listeners.resume();
  for (const Unreached::Result& item : unreached_.recheck()) {
    Peer* peer = find(item.peer);
    if (peer && !item.why.empty()) lose(*peer, item.why);
    for (Post* post : item.posts) this->post(*post);
  }
}

void TcpLink::sleep(std::chrono::microseconds span) {
  if (usable() && sockets_->listeners.paused()) span = std::min<std::chrono::microseconds>(span, kCheckInterval);
  usable() ? bell_.sleep(sockets_->epoll.get(), span) : std::this_thread::sleep_for(span);
}

/// Sends the remaining messages and the last frame, for a bounded time. The kernel sends on after that.
void TcpLink::drain() {
  const auto give_up = Clock::now() + kCloseTimeout;
  for (const std::unique_ptr<Peer>& peer : sockets_->peers) {
    if (!peer || !peer->out) continue;
    peer->out->leave(Frame::kClose);
    sockets_->leaving.push_back({std::move(peer->out), give_up});
  }
  while (Clock::now() < give_up && std::ranges::any_of(sockets_->leaving, &Leaving::goes_on)) {
    for (const Leaving& leaving : sockets_->leaving) leaving.out->advance(0);
    std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
}

void TcpLink::close() {
  if (closed_.exchange(true)) return;
  if (fork_generation() != generation_) return;
  drain();
  const Status aborted(Code::kAborted, "nvx: the link was closed");
  for (const Leaving& leaving : sockets_->leaving) events_.end(leaving.out->take_posts(), aborted);
  events_.end(unreached_.take_all(), aborted);
  if (receiver_) {
    for (const auto& incoming : sockets_->incoming) incoming->drop(*receiver_);
    for (int rounds = 0; rounds < 2 && report(); ++rounds) continue;  // callbacks may post, which fails
  }
  replace_epoll(sockets_->epoll.get(), kNoEpoll);
  sockets_->listeners.close();
  sockets_->incoming.clear();
  sockets_->leaving.clear();
  sockets_->peers.clear();
}

}  // namespace

std::unique_ptr<Link> open_tcp(const JobKey& key, const std::string& store_host) {
  return std::make_unique<TcpLink>(key, store_host);
}

}  // namespace nvx::net
