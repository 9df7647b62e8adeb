#include "net/ucx/ucx.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <deque>
#include <map>
#include <thread>
#include <utility>

#include "base/config.h"
#include "base/contain.h"
#include "base/deadline.h"
#include "base/log.h"
#include "base/random.h"
#include "net/bell.h"
#include "net/link_events.h"
#include "net/ucx/ucx_fetches.h"
#include "net/ucx/ucx_worker.h"
#include "net/unreached.h"

namespace nvx::net {
namespace {

using std::chrono::milliseconds;

/// With its header, the largest message that UCX receives over TCP without reassembly. In measurements it is 1.5 times
/// as fast as one of 256 KiB.
constexpr size_t kSegmentBytes = 63 << 10;
/// Remembered links that connected before add(). Only a post to it notices the loss of any further link.
constexpr size_t kMostUnknownLinks = 65536;
/// How long posts to a peer may stay open after the peer is lost or closed.
constexpr milliseconds kLostTimeout{1000};
/// Each claim looks at all sockets of the worker, of which each peer has two.
constexpr milliseconds kClaimInterval{100};

enum MessageId : unsigned { kMessage, kControl };

class UcxLink;

/// A post or a control message that UCX is sending. Lives until UCX's callback, even if the post has ended before.
struct Sent {
  UcxLink* link;
  Post* post;
  PeerId peer;
  ControlMessage control;
  ucp_ep_h closes;  // if set: the endpoint to close when this has ended
  size_t slot;      // index in open_
};

class UcxLink final : public Link {
 public:
  explicit UcxLink(const std::string& store_host);
  ~UcxLink() override { close(); }

  void listen(Receiver& receiver) override { receiver_ = &receiver; }
  void close() override;
  /// Every group that spans hosts calls this, so a second libucp is noticed here.
  std::vector<std::byte> address() const override { return warn_of_second_ucx(ucx_), address_; }
  PeerId add(std::span<const std::byte> address) override;
  void admit(std::span<const AddressPrefix> addresses) override {
    if (usable()) worker_->listeners().admit(addresses);
  }
  std::string obstacle(PeerId peer) override;
  void forget(PeerId peer) override;
  void post(Post& post) override;
  void cancel(Post& post) override;
  bool progress() override;
  bool arm() override;
  void sleep(std::chrono::microseconds span) override;
  void wake() override {
    if (worker_->mine()) bell_.ring();
  }
  size_t segment_bytes() const override { return kSegmentBytes; }
  /// Over TCP, progress() is a system call on the socket that receives the peer's segment.
  std::chrono::nanoseconds poll_interval() const override {
    return std::chrono::nanoseconds(worker_->has_rdma() ? 0 : 800);
  }
  std::string use_device_memory(std::span<const std::byte> range) override { return worker_->use_device_memory(range); }
  std::string describe() const override { return worker_->describe(); }

 private:
  struct Peer {
    PeerId id;
    LinkNonce nonce;
    std::vector<std::byte> worker_address;
    std::vector<HostAddress> reached_at;  // its TCP addresses, if TCP is needed
    ucp_ep_h endpoint = nullptr;
    uint32_t turn = 0;          // of the endpoint made last; 0: none
    uint32_t their_turn = 0;    // of the other side's latest hello
    bool greeted = false;       // the other side's hello has come
    bool ever_reached = false;  // also of an endpoint that was replaced
    bool reached = false;       // the connection stands: a send has completed, or the other side's hello has come
    bool lost = false;
    ucs_status_t broken = UCS_OK;  // an error that UCX reported in a callback; handled when UCX may be called again
    std::vector<Post*> held{};     // posts, until it is reached
    void set_reached(UcxLink& link) {
      ever_reached = true;
      if (std::exchange(reached, true)) return;
      link.unclaimed_ = true;
      release_posts(link.waiting_);
    }
    void release_posts(std::vector<Post*>& again) {
      again.insert(again.end(), held.begin(), held.end());
      held.clear();
    }
  };
  bool usable() const { return !closed_ && worker_->mine(); }
  Peer* find(PeerId peer) const { return peer < peers_.size() ? peers_[peer].get() : nullptr; }

  bool connect(Peer& peer);
  Sent& take(Post* post, PeerId peer);
  void release(Sent& sent);
  void send(Peer& peer, Post& post);
  void send_control(const Peer& peer, ucp_ep_h endpoint, ControlMessage::Kind kind, ucp_ep_h closes = nullptr);
  bool begin(Sent& sent, ucp_ep_h endpoint, unsigned id, const void* header, size_t header_bytes, const void* body,
             size_t bytes);
  void end_overdue_posts();
  void lose(Peer& peer, const std::string& why);
  void leave(Peer& peer, ControlMessage::Kind last, milliseconds timeout);
  void drop(Peer& peer);
  void settle();
  void handle(const ControlMessage& control);
  void connect_back(Peer& peer);
  bool report() { return events_.report(receiver_, /*losses=*/!closed_); }
  std::string why(const Peer& peer, ucs_status_t status) const;

  static ucs_status_t on_message(void* link, const void* header, size_t header_bytes, void* data, size_t bytes,
                                 const ucp_am_recv_param_t* param) noexcept;
  static ucs_status_t on_control(void* link, const void* header, size_t header_bytes, void* data, size_t bytes,
                                 const ucp_am_recv_param_t* param) noexcept;
  static void on_sent(void* request, ucs_status_t status, void* sent) noexcept;

  const LinkNonce nonce_ = random_value<LinkNonce>();
  const std::unique_ptr<UcxWorker> worker_;
  const UcxLibrary& ucx_;
  const std::vector<std::byte> address_;

  Bell bell_;
  Receiver* receiver_ = nullptr;
  std::atomic<bool> closed_{false};  // sleep() reads it without the user's lock
  bool calling_ = false;             // a UCX call is on the stack, so endpoints cannot be made
  bool breakage_ = false;
  uint32_t turns_ = 0;      // endpoints made so far
  bool unclaimed_ = false;  // a connection stands whose sockets the worker has not claimed
  Clock::time_point next_claim_{};
  std::atomic<int> quiet_{0};  // calls of progress() since the last sleep, or since UCX last made progress

  std::vector<std::unique_ptr<Peer>> peers_;  // by PeerId; null: forgotten
  std::multimap<LinkNonce, PeerId> by_nonce_;
  std::map<LinkNonce, uint32_t> unknown_links_;  // and the turn of the latest hello
  /// Forgotten peers that had not accepted their endpoint, which must not be closed (see post()).
  std::map<LinkNonce, std::unique_ptr<Peer>> parked_;
  std::deque<Sent> sent_;  // the sends under way, and ended ones, whose memory is reused
  std::vector<Sent*> free_, open_;
  std::map<PeerId, Clock::time_point> overdue_;  // when open posts to a lost or forgotten peer end at the latest
  UcxFetches fetches_{*worker_};
  std::vector<Post*> waiting_;                        // to be posted again by settle()
  Unreached unreached_{config().liveness * 19 / 20};  // before the messenger's timeout, which does not know the reason
  std::vector<PeerId> to_connect_back_;
  std::vector<ControlMessage> controls_;
  LinkEvents events_;
};

UcxLink::UcxLink(const std::string& store_host)
    : worker_(std::make_unique<UcxWorker>(store_host)),
      ucx_(worker_->ucx()),
      address_(encode_address({ucx_.version, nonce_, worker_->address(), worker_->reached_at()})) {
  const auto set_handler = [&](unsigned id, ucp_am_recv_callback_t callback) {
    ucp_am_handler_param_t param{};
    param.field_mask = UCP_AM_HANDLER_PARAM_FIELD_ID | UCP_AM_HANDLER_PARAM_FIELD_CB | UCP_AM_HANDLER_PARAM_FIELD_ARG |
                       UCP_AM_HANDLER_PARAM_FIELD_FLAGS;
    param.id = id;
    param.flags = UCP_AM_FLAG_WHOLE_MSG;
    param.cb = callback;
    param.arg = this;
    if (ucx_.worker_set_am_recv_handler(worker_->get(), &param) != UCS_OK)
      throw Error(Code::kSystem, "nvx: UCX refuses a handler for active messages");
  };
  set_handler(kMessage, on_message);
  set_handler(kControl, on_control);
  NVX_LOG(kInfo, "%s", worker_->describe().c_str());
}

PeerId UcxLink::add(std::span<const std::byte> bytes) {
  const std::optional<UcxAddress> address = decode_address(bytes);
  NVX_CHECK(address, "a peer's address is damaged, or of another version of nvx: have all ranks use the same nvx");
  const std::string refusal = why_not_together(ucx_.version, address->version);
  NVX_CHECK(refusal.empty(), refusal);
  const auto id = PeerId(peers_.size());
  peers_.push_back(std::make_unique<Peer>());
  Peer& peer = *peers_.back();
  peer.id = id;
  peer.nonce = address->nonce;
  peer.worker_address.assign(address->worker.begin(), address->worker.end());
  if (!worker_->has_rdma()) peer.reached_at = address->reached_at;
  by_nonce_.emplace(peer.nonce, id);
  if (auto parked = parked_.extract(peer.nonce); parked && parked.mapped()->broken != UCS_OK) {
    drop(*parked.mapped());
  } else if (parked) {
    peer.endpoint = parked.mapped()->endpoint;
    peer.turn = parked.mapped()->turn;
    if (usable()) send_control(peer, peer.endpoint, ControlMessage::kHello);
  }
  if (const auto early = unknown_links_.extract(peer.nonce))
    peer.their_turn = early.mapped(), to_connect_back_.push_back(id);
  return id;
}

std::string UcxLink::obstacle(PeerId id) {
  const Peer* peer = find(id);
  if (!usable() || !peer || peer->their_turn != 0) return "";
  const bool unreached = peer->turn != 0 && !peer->ever_reached;
  return why_not_admitted(unreached ? peer->reached_at : std::vector<HostAddress>(), worker_->listeners().dropped()) +
         worker_->listeners().why_closed();
}

void UcxLink::forget(PeerId id) {
  Peer* peer = find(id);
  if (!peer) return;
  const bool waits = peer->endpoint && !peer->reached && peer->broken == UCS_OK;
  const bool parks = usable() && waits && !parked_.contains(peer->nonce);
  if (usable() && peer->endpoint && !parks) {
    const bool open =
        fetches_.under_way() || std::ranges::any_of(open_, [&](const Sent* s) { return s->peer == id && s->post; });
    const milliseconds timeout = open ? kOpenTimeout : kFlushTimeout;
    leave(*peer, ControlMessage::kLeave, timeout);
    overdue_[id] = Clock::now() + timeout + kLostTimeout;
  }
  events_.end(unreached_.take(id));
  peer->release_posts(waiting_);
  events_.forget(id);
  const auto [first, last] = by_nonce_.equal_range(peer->nonce);
  by_nonce_.erase(std::find_if(first, last, [id](const auto& entry) { return entry.second == id; }));
  if (parks) parked_[peer->nonce] = std::move(peers_[id]);
  peers_[id].reset();
}

bool UcxLink::connect(Peer& peer) {
  ucp_ep_params_t params{};
  params.field_mask =
      UCP_EP_PARAM_FIELD_REMOTE_ADDRESS | UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE | UCP_EP_PARAM_FIELD_ERR_HANDLER;
  params.address = reinterpret_cast<const ucp_address_t*>(peer.worker_address.data());
  params.err_mode = UCP_ERR_HANDLING_MODE_PEER;
  params.err_handler.cb = [](void* argument, ucp_ep_h endpoint, ucs_status_t status) noexcept {
    UcxLink& link = *static_cast<UcxLink*>(argument);
    for (const std::unique_ptr<Peer>& peer : link.peers_) {
      if (peer && peer->endpoint == endpoint && peer->broken == UCS_OK) link.breakage_ = true, peer->broken = status;
    }
    for (const auto& [nonce, peer] : link.parked_) {
      if (peer->endpoint == endpoint && peer->broken == UCS_OK) link.breakage_ = true, peer->broken = status;
    }
  };
  params.err_handler.arg = this;
  const ucs_status_t status = ucx_.ep_create(worker_->get(), &params, &peer.endpoint);
  if (status != UCS_OK) {
    peer.endpoint = nullptr;
    lose(peer, why(peer, status));
    return false;
  }
  peer.turn = ++turns_;
  return true;
}

void UcxLink::post(Post& post) {
  Peer* peer = find(post.to);
  if (!usable()) {
    events_.end(post, Status(Code::kAborted, "nvx: the link is closed, or belongs to this process's parent"));
  } else if (!peer || peer->lost || peer->broken != UCS_OK) {
    events_.end(post);
  } else if (!peer->endpoint && calling_) {
    waiting_.push_back(&post);
  } else if (!peer->endpoint && unreached_.holds(peer->id, peer->reached_at)) {
    unreached_.keep(post);
  } else {
    if (!peer->endpoint && connect(*peer)) send_control(*peer, peer->endpoint, ControlMessage::kHello);
    if (peer->reached || peer->lost) {
      send(*peer, post);
    } else {
      // Not to UCX yet: to release the post's body this side would have to close an endpoint of which the peer does not
      // know. UCX numbers the endpoints between two processes and pairs equal numbers, so all later ones would be
      // paired wrongly: with closed ones, or with the connection of another.
      peer->held.push_back(&post);
    }
  }
}

void UcxLink::cancel(Post& post) {
  Peer* peer = find(post.to);
  if (std::erase(waiting_, &post) != 0 || (peer && std::erase(peer->held, &post) != 0) || unreached_.remove(post))
    events_.end(post, cancelled());
}

void UcxLink::send(Peer& peer, Post& post) {
  if (peer.lost) return events_.end(post);
  Sent& sent = take(&post, peer.id);
  if (begin(sent, peer.endpoint, kMessage, post.header, post.header_bytes, post.body, post.bytes)) return;
  if (peer.broken == UCS_OK) peer.broken = UCS_ERR_IO_ERROR;
  breakage_ = true;
}

void UcxLink::send_control(const Peer& peer, ucp_ep_h endpoint, ControlMessage::Kind kind, ucp_ep_h closes) {
  Sent& sent = take(nullptr, peer.id);
  sent.control = {kind, peer.turn, nonce_};
  sent.closes = closes;
  begin(sent, endpoint, kControl, &sent.control, sizeof sent.control, nullptr, 0);
}

/// Returns false if UCX refuses; the post has then ended. It has also ended if UCX sent all of it at once.
bool UcxLink::begin(Sent& sent, ucp_ep_h endpoint, unsigned id, const void* header, size_t header_bytes,
                    const void* body, size_t bytes) {
  ucp_request_param_t param{};
  param.op_attr_mask = UCP_OP_ATTR_FIELD_CALLBACK | UCP_OP_ATTR_FIELD_USER_DATA | UCP_OP_ATTR_FIELD_FLAGS |
                       UCP_OP_ATTR_FIELD_MEMORY_TYPE;
  param.cb.send = on_sent;
  param.user_data = &sent;
  param.memory_type = body ? worker_->memory_type_of(body) : UCS_MEMORY_TYPE_HOST;
  // Over TCP a rendezvous costs a round trip and gains nothing. With RDMA, UCX knows the size from which it pays.
  // Device memory must not pass through UCX's buffers, which are host memory.
  if (bytes > kSegmentBytes || param.memory_type != UCS_MEMORY_TYPE_HOST) {
    param.flags = UCP_AM_SEND_FLAG_RNDV;
  } else if (!worker_->has_rdma()) {
    param.flags = UCP_AM_SEND_FLAG_EAGER;
  }
  void* request = ucx_.am_send_nbx(endpoint, id, header, header_bytes, body, bytes, &param);
  if (UCS_PTR_IS_PTR(request)) return true;
  const ucs_status_t status = UCS_PTR_RAW_STATUS(request);
  if (Peer* peer = find(sent.peer); peer && status == UCS_OK && peer->endpoint == endpoint) peer->set_reached(*this);
  if (sent.post)
    events_.end(*sent.post, status == UCS_OK ? Status() : Status(Code::kPeerDied, "nvx: " + ucx_.explain(status)));
  release(sent);
  return status == UCS_OK;
}

Sent& UcxLink::take(Post* post, PeerId peer) {
  if (free_.empty()) free_.push_back(&sent_.emplace_back());
  Sent& sent = *free_.back();
  free_.pop_back();
  sent = {this, post, peer, {}, nullptr, open_.size()};
  open_.push_back(&sent);
  return sent;
}

void UcxLink::release(Sent& sent) {
  if (sent.closes) worker_->ready_to_close(sent.closes);
  open_.back()->slot = sent.slot;
  std::swap(open_[sent.slot], open_.back());
  open_.pop_back();
  free_.push_back(&sent);
}

void UcxLink::on_sent(void* request, ucs_status_t status, void* argument) noexcept {
  Sent& sent = *static_cast<Sent*>(argument);
  UcxLink& link = *sent.link;
  link.ucx_.request_free(request);
  if (sent.post)
    link.events_.end(*sent.post,
                     status == UCS_OK ? Status() : Status(Code::kPeerDied, "nvx: " + link.ucx_.explain(status)));
  // UCX cancels posts of an endpoint that this side has closed. Any other failure means that data was lost.
  Peer* peer = link.find(sent.peer);
  if (peer && status == UCS_OK) peer->set_reached(link);
  if (status != UCS_OK && status != UCS_ERR_CANCELED && peer && peer->broken == UCS_OK) {
    peer->broken = status;
    link.breakage_ = true;
  }
  link.release(sent);
}

ucs_status_t UcxLink::on_message(void* argument, const void* header, size_t header_bytes, void* data, size_t bytes,
                                 const ucp_am_recv_param_t* param) noexcept {
  UcxLink& link = *static_cast<UcxLink*>(argument);
  const bool large = param->recv_attr & UCP_AM_RECV_ATTR_FLAG_RNDV;
  if (link.closed_ || header_bytes > kMostHeader) return large ? UCS_ERR_REJECTED : UCS_OK;
  const std::span message_header(static_cast<const std::byte*>(header), header_bytes);
  ucs_status_t status = large ? UCS_ERR_NO_MEMORY : UCS_OK;
  const auto take = [&] {
    if (large) return void(status = link.fetches_.begin(*link.receiver_, message_header, data, bytes));
    link.receiver_->arrived(message_header, {static_cast<const std::byte*>(data), bytes});
  };
  contain_and(take, [&](const std::exception*) {  // the sender is not known
    for (const std::unique_ptr<Peer>& peer : link.peers_) {
      if (peer && peer->broken == UCS_OK) link.breakage_ = true, peer->broken = UCS_ERR_NO_MEMORY;
    }
  });
  return status;
}

ucs_status_t UcxLink::on_control(void* argument, const void* header, size_t header_bytes, void*, size_t,
                                 const ucp_am_recv_param_t*) noexcept {
  UcxLink& link = *static_cast<UcxLink*>(argument);
  ControlMessage control;
  if (link.closed_ || header_bytes != sizeof control) return UCS_OK;
  std::memcpy(&control, header, sizeof control);
  link.controls_.push_back(control);
  return UCS_OK;
}

void UcxLink::handle(const ControlMessage& control) {
  if (control.kind == ControlMessage::kFlush) return;
  const auto [first, last] = by_nonce_.equal_range(control.from);
  if (first == last) {
    if (control.kind != ControlMessage::kHello) {
      std::erase_if(unknown_links_, [&](const auto& l) { return l.first == control.from && l.second <= control.turn; });
      if (auto parked = parked_.extract(control.from)) drop(*parked.mapped());
    } else if (unknown_links_.size() < kMostUnknownLinks || unknown_links_.contains(control.from)) {
      unknown_links_[control.from] = std::max(unknown_links_[control.from], control.turn);
    }
    return;
  }
  for (auto it = first; it != last; ++it) {
    Peer& peer = *peers_[it->second];
    if (peer.lost) continue;
    peer.their_turn = std::max(peer.their_turn, control.turn);
    if (control.kind == ControlMessage::kHello) return connect_back(peer);  // one connection, one peer
    if (control.kind == ControlMessage::kClose) lose(peer, "its process has closed its link");
    if (control.kind != ControlMessage::kLeave) continue;
    drop(peer);
    if (peer.their_turn > control.turn) connect_back(peer);
  }
}

std::string UcxLink::why(const Peer& peer, ucs_status_t status) const {
  const std::string way =
      peer.their_turn == 0 && (peer.ever_reached || peer.turn == 0) ? describe_route(peer.reached_at) : "";
  return ucx_.explain(status) + (way.empty() ? "" : ", " + way);
}

/// With an endpoint of its own, this side is also notified when the connection breaks.
void UcxLink::connect_back(Peer& peer) {
  peer.greeted = true;
  if (!peer.endpoint && !peer.lost && !unreached_.holds(peer.id, peer.reached_at)) connect(peer);
  if (peer.endpoint) peer.set_reached(*this);
}

void UcxLink::lose(Peer& peer, const std::string& why) {
  if (peer.lost) return;
  peer.lost = true;
  events_.lose(peer.id, why);
  events_.end(unreached_.take(peer.id));
  drop(peer);
  overdue_[peer.id] = Clock::now() + kLostTimeout;
}

void UcxLink::drop(Peer& peer) {
  if (std::exchange(peer.reached, false)) worker_->listeners().connection_lost();
  peer.release_posts(waiting_);
  if (peer.endpoint) worker_->close_later(std::exchange(peer.endpoint, nullptr), milliseconds(0));
}

/// The same with a last control message, behind all earlier sends, and one without effect: UCX holds back at most one
/// small message per connection, so once the second is sent, everything before it has left this process.
void UcxLink::leave(Peer& peer, ControlMessage::Kind last, milliseconds timeout) {
  if (peer.broken != UCS_OK || !peer.endpoint) {
    drop(peer);
    return;
  }
  ucp_ep_h endpoint = std::exchange(peer.endpoint, nullptr);
  worker_->close_later(endpoint, timeout);
  send_control(peer, endpoint, last);
  send_control(peer, endpoint, ControlMessage::kFlush, /*closes=*/endpoint);
}

/// Ends posts that UCX should have ended by now. UCX has closed their endpoints, so it no longer reads the posts.
void UcxLink::end_overdue_posts() {
  const auto now = Clock::now();
  std::erase_if(overdue_, [&](const auto& entry) {
    bool any = false;
    for (Sent* sent : open_) {
      if (sent->peer != entry.first || !sent->post) continue;
      any = true;
      if (now < entry.second) return false;
      events_.end(*std::exchange(sent->post, nullptr));
    }
    return !any || now >= entry.second;
  });
}

/// Does the work that had to wait until no UCX call was on the stack.
void UcxLink::settle() {
  for (const ControlMessage& control : std::exchange(controls_, {})) handle(control);
  if (std::exchange(breakage_, false)) {
    for (const std::unique_ptr<Peer>& peer : peers_) {
      if (peer && peer->broken != UCS_OK && !peer->lost) lose(*peer, why(*peer, peer->broken));
    }
    std::erase_if(parked_, [this](const auto& entry) {
      if (entry.second->broken == UCS_OK) return false;
      return drop(*entry.second), true;
    });
  }
  for (const PeerId id : std::exchange(to_connect_back_, {})) {
    if (Peer* peer = find(id)) connect_back(*peer);
  }
  for (Post* waiting : std::exchange(waiting_, {})) post(*waiting);
  for (const Unreached::Result& item : unreached_.recheck()) {
    Peer* peer = find(item.peer);
    if (peer && !item.why.empty()) lose(*peer, item.why);
    if (peer && peer->greeted) connect_back(*peer);
    for (Post* post : item.posts) this->post(*post);
  }
  if (unclaimed_ && Clock::now() >= next_claim_) {  // by now the sockets of both directions exist
    unclaimed_ = false;
    worker_->claim_sockets();
    next_claim_ = Clock::now() + kClaimInterval;
  }
  worker_->advance_closing();
  if (!overdue_.empty()) end_overdue_posts();
}

bool UcxLink::progress() {
  if (!usable()) return report();
  const bool reported = report();  // ends of posts are reported before the answers to these posts arrive
  calling_ = true;
  const bool moved = ucx_.worker_progress(worker_->get()) != 0;
  calling_ = false;
  quiet_.store(moved ? 0 : quiet_.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
  settle();
  const bool fetched = fetches_.fetched();
  if (fetched) fetches_.report(*receiver_);
  return report() || reported || fetched || moved;
}

/// UCX handles a broken connection in the calls after the one that noticed it. That call does not count as progress,
/// and the remaining work does not end a sleep.
bool UcxLink::arm() {
  worker_->listeners().warn_once();
  if (!events_.empty() || fetches_.fetched() || !waiting_.empty() || !to_connect_back_.empty() || breakage_)
    return false;
  if (!usable()) return true;
  return quiet_.load(std::memory_order_relaxed) >= 3 && ucx_.worker_arm(worker_->get()) != UCS_ERR_BUSY;
}

void UcxLink::sleep(std::chrono::microseconds span) {
  if (!closed_ && worker_->mine()) {
    bell_.sleep(worker_->fd(), span);
    quiet_.store(0, std::memory_order_relaxed);
  } else {
    std::this_thread::sleep_for(span);
  }
}

/// Sends the remaining messages, closes all endpoints and waits, for a bounded time.
void UcxLink::close() {
  if (closed_) return;
  closed_ = true;
  if (worker_->mine()) {
    for (const std::unique_ptr<Peer>& peer : peers_) {
      if (peer) leave(*peer, ControlMessage::kClose, kCloseTimeout);
    }
    for (const auto& [nonce, peer] : parked_) leave(*peer, ControlMessage::kClose, kCloseTimeout);
    worker_->limit_closing(kCloseTimeout);
    const auto give_up = Clock::now() + kCloseTimeout + kLostTimeout;
    while (Clock::now() < give_up) {
      const bool moved = ucx_.worker_progress(worker_->get()) != 0, all_closed = worker_->advance_closing();
      if (all_closed && !fetches_.under_way() && std::ranges::all_of(open_, [](const Sent* s) { return !s->post; }))
        break;
      if (!moved && ucx_.worker_arm(worker_->get()) == UCS_OK) bell_.sleep(worker_->fd(), milliseconds(1));
    }
  }
  worker_->close();
  for (Sent* sent : open_) {
    if (sent->post) events_.end(*sent->post, Status(Code::kAborted, "nvx: the link was closed"));
  }
  for (Post* post : unreached_.take_all()) waiting_.push_back(post);
  for (const std::unique_ptr<Peer>& peer : peers_) {
    if (peer) peer->release_posts(waiting_);
  }
  events_.end(waiting_, Status(Code::kAborted, "nvx: the link was closed"));
  if (receiver_) fetches_.drop(*receiver_);
  report();
}

}  // namespace

std::unique_ptr<Link> open_ucx(const std::string& store_host) { return std::make_unique<UcxLink>(store_host); }

bool built_with_ucx() { return true; }

}  // namespace nvx::net
