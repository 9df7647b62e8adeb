#pragma once

#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <thread>
#include <unordered_set>
#include <vector>

#include "base/error.h"
#include "base/flag.h"
#include "base/mutex.h"
#include "group/core/core.h"
#include "group/core/thread_pool.h"
#include "group/p2p/message_peer.h"

namespace nvx {

constexpr int kAnySource = -1;
/// The size of a note, which is sent for each message that a delegate moves. It is unusual, so that the error of a
/// mismatch can distinguish notes from other messages.
constexpr size_t kNoteBytes = 41;
/// The first tag of nvx's own messages. Torch's tags are ints, so they are lower.
constexpr int64_t kOwnTags = int64_t(1) << 32;

/// One send or receive. Its memory must stay valid until it is done.
struct Message {
  int peer = kAnySource;  ///< a receive from any source sets it to the sender
  int64_t tag = 0;
  DType dtype = DType::kBytes;
  std::byte* data = nullptr;
  size_t bytes = 0;
  std::chrono::milliseconds timeout{0};
  /// Whether the timeout counts from the first wait for the message and not from its post: the program may post it long
  /// before its peer does.
  bool timed_from_wait = false;
  /// The address of the data in the memory of the group's GPU; 0: it is elsewhere, or copy engines do not reach the
  /// peer. If not 0, `data` is a stand-in in pinned host memory, for a peer whose data is elsewhere.
  DevicePtr at = 0;
  std::shared_ptr<const void> memory;  ///< owns `data` and the memory at `at`; copies that have begun keep it
  /// Whether the device has reached the call. Nothing is written to `at` before. Call `Mailbox::push()` after setting
  /// it.
  std::atomic<bool> reached{true};
  /// Of a done receive: whether its data went to `at` and not to `data`.
  bool by_copies = false;
  /// Of a note: the size of the delegated message. 0: this is no note.
  size_t noted_bytes = 0;
  /// The name of the user's call if it is neither send nor recv.
  const char* call_name = nullptr;
  /// A standing receive: its message may never come, so it has no timeout, and the end of its peer is no failure. It
  /// has a specific peer.
  bool is_standing = false;
  /// A message to the same peer that is sent directly before this one, with this one's timeout.
  std::shared_ptr<Message> ahead;
  /// Called once when the message is done, with no lock held, on any thread. May wait for other messages, and for this
  /// one. Its exceptions are logged and dropped.
  std::function<void(const Message&)> finished;
  /// Whether `finished()` may wait, or run the user's code. If not, the call is cheaper. Empty: it may.
  std::function<bool()> may_block;

  bool done() const { return done_.load(std::memory_order_acquire); }
  const Status& status() const { return status_; }  ///< once done
  std::string describe() const;                     ///< "recv(f32, 1000 elements, from rank 1, tag 7)"

 private:
  friend class Mailbox;
  friend class IntraHostPeer;
  /// Whether a wait for it may return: `finished()` has returned, or this thread runs it and would wait for itself.
  bool over() const;
  void call_finished();
  /// In a forked child, in which a thread of the parent may hold the mailbox's lock, and never release it.
  void refuse(const Status& why);

  std::atomic<bool> done_{false};
  std::atomic<bool> delivered_{false};        // `finished()` has returned
  std::atomic<std::thread::id> deliverer_{};  // the thread that calls `finished()`, or has called it
  Status status_;
  bool receives_ = false;
  size_t moved_ = 0;       // bytes streamed so far
  uint64_t place_ = 0;     // of a send: 1 + its offset in this rank's pool
  bool in_place_ = false;  // the receiver fetches it from there
  bool staged_ = false;    // its data has been copied to `data`
  Deadline deadline_;
  Clock::time_point timed_since_{};  // when its timeout began: perhaps long after `deadline_.start`, its call
};

/// The sends and receives of one rank. They are independent of the collectives, in order per pair and tag, and matched
/// as they arrive.
/// A sender announces each message in an envelope. A small message travels with the envelope, and its send is done
/// at once; between hosts, above `Messenger::kMostCopied`, when the link has read it. A large one waits until the
/// receiver has a matching receive and grants it; then the sender streams it through leased staging. The granted
/// messages of a pair are streamed one by one, in the order of the grants, so none waits for a message without a
/// receive. Between hosts segments need no staging, and the first ones go ahead of the grant. A receiver that holds too
/// much unexpected data reports to the sender that it is full; then the sender treats small messages like large ones.
/// `MessagePeer` has the protocol with each rank. Large messages between GPUs of a host are granted when the receiver's
/// device has reached the receive. Then the copy engines move the data, through slots in the sender's arena or from its
/// pool; see `DeviceCopies`.
class Mailbox : public LeaseHolder {
 public:
  explicit Mailbox(Core& core);
  ~Mailbox() override;

  /// These post a message and do the work that is possible at once. The rest happens during waits, or on a pool thread.
  void send(const std::shared_ptr<Message>& message, Runner runner) EXCLUDES(mutex_);
  void receive(const std::shared_ptr<Message>& message, Runner runner) EXCLUDES(mutex_);
  /// `send()` in two halves: `post()` puts the message behind earlier ones; `push()` does the work that is possible at
  /// once, and calls `finished()` of done messages.
  void post(const std::shared_ptr<Message>& message) EXCLUDES(mutex_);
  void push(Runner runner) EXCLUDES(mutex_);
  /// The first half of `receive()`: posts the receive. Inside a message's `finished()` no `push()` need follow: the
  /// caller of `finished()` does that work.
  void expect(const std::shared_ptr<Message>& message) EXCLUDES(mutex_);
  /// Acts as if an empty message with this tag arrived from this peer now. For a message's `finished()`.
  void receive_empty(int peer, int64_t tag) EXCLUDES(mutex_);
  /// The address for `Message::at`, if copy engines may move a message of this device's memory; otherwise 0.
  DevicePtr reach(const void* at, size_t bytes, int device, int peer) const;
  /// Drops unexpected messages with this tag. No rank may send more of them.
  void forget(int64_t tag) EXCLUDES(mutex_);

  /// Progresses all messages until the message is done and its `finished()` has returned. Returns the message's status.
  /// Returns at once on the thread that runs this `finished()`.
  Status wait(Message& message) EXCLUDES(mutex_);

  /// Begins the timeout of a message that is timed from its wait, if it has not begun; without a message, of all.
  void begin_timeout(Message* message = nullptr) EXCLUDES(mutex_);

  /// Ends all open messages. Afterwards it accesses no memory of a peer.
  void close() EXCLUDES(mutex_);

  /// Progresses all messages until only standing receives are open, for at most this long.
  void settle(std::chrono::milliseconds span) EXCLUDES(mutex_);

  bool has_waiters() EXCLUDES(mutex_);

  /// The staging for a peer to which nothing is in flight.
  Span release_idle() override EXCLUDES(mutex_);

 private:
  friend class MessagePeer;
  /// Those with one tag in their order. No tag has an empty queue.
  template <class T>
  using ByTag = std::map<int64_t, std::deque<T>>;
  /// The role of a thread that progresses the messages. The progress thread does so while no thread waits for a
  /// message.
  enum class Role { kNeither, kWaiter, kProgressThread };
  struct Progress {
    Role role;
    Runner runner;
    Clock::time_point began = Clock::now(), next_check = began + kWatchInterval;
  };

  void enter(const std::shared_ptr<Message>& message) REQUIRES(mutex_);
  void begin_timeout_of(Message& message) REQUIRES(mutex_);
  void start_progress(Runner runner) REQUIRES(mutex_);
  bool move(Clock::time_point until) REQUIRES(mutex_);
  bool advance() REQUIRES(mutex_);
  bool read_port() REQUIRES(mutex_);
  void arrive(Unexpected&& unexpected) REQUIRES(mutex_);
  bool match_unexpected(const std::shared_ptr<Message>& receive) REQUIRES(mutex_);
  void accept(const std::shared_ptr<Message>& receive, Unexpected&& unexpected) REQUIRES(mutex_);
  void finish(const std::shared_ptr<Message>& message, Status status) REQUIRES(mutex_);
  void fail_all(const Status& status) REQUIRES(mutex_);
  MessagePeer& peer(int rank) REQUIRES(mutex_) { return *peers_[size_t(rank)]; }
  bool is_remote(int rank) const { return rank >= 0 && members_.local_rank_of(rank) < 0; }

  std::optional<net::GroupPort::Departure> departure(int peer) EXCLUDES(mutex_);
  std::string describe_wait(const Message& message) REQUIRES(mutex_);
  void check_times() EXCLUDES(mutex_);
  void wake() const { nvx::wake(members_, members_.rank); }  ///< wakes the threads of this rank
  void deliver(Progress& progress) REQUIRES(mutex_);
  void deliver_one(Message& message, Progress& progress) EXCLUDES(mutex_);
  void release_role(Progress& progress) EXCLUDES(mutex_);
  bool ensure_progress_thread() REQUIRES(mutex_);
  void run_progress_thread() EXCLUDES(mutex_);
  void progress_once(Message* message, Progress& progress) EXCLUDES(mutex_);

  Core& core_;
  const Members& members_;
  FailureState& failures_;
  Mutex mutex_;
  std::vector<std::unique_ptr<MessagePeer>> peers_ GUARDED_BY(mutex_);    // by rank: IntraHostPeer or InterHostPeer
  std::unordered_set<std::shared_ptr<Message>> open_ GUARDED_BY(mutex_);  // every message not done
  ByTag<std::shared_ptr<Message>> receives_ GUARDED_BY(mutex_);           // not matched
  ByTag<Unexpected> unexpected_ GUARDED_BY(mutex_);
  std::deque<std::shared_ptr<Message>> finished_ GUARDED_BY(mutex_);          // done, `finished()` not called yet
  std::atomic<Clock::time_point> next_check_{Clock::now() + kWatchInterval};  // many short waits add up
  int waiters_ GUARDED_BY(mutex_) = 0;
  bool has_progress_thread_ GUARDED_BY(mutex_) = false;
  int progress_threads_ GUARDED_BY(mutex_) = 0;  // of tasks that have not returned, started or not
  std::condition_variable waiters_gone_;
};

}  // namespace nvx
