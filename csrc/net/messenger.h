#pragma once

#include <array>
#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "base/flag.h"
#include "base/mutex.h"
#include "net/header.h"
#include "net/link.h"

namespace nvx::net {

class GroupPort;

/// Told when the link has read a body for the last time. With the messenger's lock held.
class Sender {
 public:
  virtual ~Sender() = default;
  virtual void sent(uint64_t cookie, const Status& status) = 0;
};

/// A process's name on the wire, before its link's address.
using ProcessId = uint64_t;

/// What this process has to do with others over a link: one link, one lock, one thread that looks after it while nobody
/// waits, shared by the ports of all groups. Whoever waits drives the link; of several that sleep one sleeps in the
/// link and wakes the rest.
class Messenger final : private Receiver {
 public:
  /// This process's, opened when first asked for and kept until the process ends. Throws Error. met_at: as for
  /// open_ucx().
  static std::shared_ptr<Messenger> here(const std::string& met_at);
  /// The same if it has been opened; else null.
  static std::shared_ptr<Messenger> opened();

  Messenger(std::unique_ptr<Link> link, std::chrono::milliseconds silence);
  ~Messenger() override;
  /// Ends the thread and the link, in bounded time. Nothing moves any more afterwards.
  void close() EXCLUDES(mutex_);

  /// Held by whoever touches a port or a run.
  Mutex& mutex() RETURN_CAPABILITY(mutex_) { return mutex_; }
  std::vector<std::byte> address() EXCLUDES(mutex_);
  std::string describe() EXCLUDES(mutex_);
  size_t segment_bytes() const { return segment_bytes_; }

  /// Lets processes at these addresses connect to this one. Throws Error.
  void admit(std::span<const AddressPrefix> addresses) EXCLUDES(mutex_);

  /// Has what comes for a rank of a group go to its port, until that is dismissed.
  void enrol(uint64_t group, int rank, GroupPort& port) REQUIRES(mutex_);
  void dismiss(uint64_t group, int rank, const GroupPort& port) REQUIRES(mutex_);

  /// The process at that address. Throws Error if the link could never reach it.
  PeerId connect(std::span<const std::byte> address) REQUIRES(mutex_);

  /// Sends a header, what follows it, and a body. Without a sender, who would be told when the body has been read, the
  /// body is copied and must be of at most kMostCopied bytes. If the peer is lost nothing is sent, and the sender is
  /// told so.
  void send(PeerId to, const MessageHeader& header, std::span<const std::byte> behind, std::span<const std::byte> body,
            Sender* sender, uint64_t cookie) REQUIRES(mutex_);
  static constexpr size_t kMostCopied = 1024;
  /// Closes the connection to a peer, which counts as lost from then on.
  void sever(PeerId peer, const std::string& why) REQUIRES(mutex_);

  /// Moves what can be moved now. True if anything did, so that calling it again may pay.
  bool progress() REQUIRES(mutex_);
  /// For what is given up while the link may still read or write its memory: returns when the link does neither any
  /// more, in bounded time. open() counts what the link still has of it. What does not end by itself is ended by
  /// sever(), which closes the connections that have it; and at last these senders are told nothing any more. Lets
  /// others have the lock in between. Not from inside a call of the link's.
  template <class Senders>
  void let_go_of(const Senders& senders, const std::function<int()>& open, const std::function<void()>& sever)
      REQUIRES(mutex_) {
    if (await_end(open, sever)) return;
    for (const Sender* sender : senders) disown(sender);
  }
  /// Moves what has come, within bounds, unless somebody else has the lock.
  bool glance() EXCLUDES(mutex_);

  /// Returns when ready() does, which is asked with the lock held, when the deadline has passed, or the watch alarms;
  /// the link is driven meanwhile. look(), with the lock held, is called about fifty times a second by a sleeper.
  template <class Ready, class Look>
  Waited wait(Ready ready, Look look, int peer, const WaitRules& rules) EXCLUDES(mutex_);

  /// Sleeps in the link for at most this long, or until somebody else who drives it has found something. Returns at
  /// once if stirs_ has moved since `seen` was read.
  void nap(std::chrono::microseconds span, std::optional<uint64_t> seen = std::nullopt) EXCLUDES(mutex_);

  /// For the end of the process: returns when what was sent has come to its peers, as far as they give signs of life.
  /// Once the process has gone, the system throws away what it has not delivered as soon as the peer sends something.
  void finish() EXCLUDES(mutex_);

  /// Asks a peer for a sign of life if it has given none lately, and counts it as lost if none has come for too long.
  void ask(PeerId peer, uint64_t group, int from, int to) REQUIRES(mutex_);

  /// Notes that this process is that rank of the whole job, as a group has shown, for as long as that group stands;
  /// known_as is what tells it from others.
  void meet(uint64_t global_rank, PeerId peer, std::weak_ptr<void> standing, std::string known_as) REQUIRES(mutex_);
  /// Asks a rank that has been met for a sign of life. Returns who it is and what has become of it if it is lost, else
  /// an empty text.
  std::string fate(uint64_t global_rank) REQUIRES(mutex_);

  /// Empty while the peer can be talked to; else what has become of it.
  const std::string& lost_because(PeerId peer) REQUIRES(mutex_);
  /// If nothing has ever come from a peer: what may keep it away, and what to set, in words; else empty.
  std::string unheard(PeerId peer) REQUIRES(mutex_);
  /// Whether that is because it takes this process for lost.
  bool has_given_up_this(PeerId peer) REQUIRES(mutex_);
  /// For how long it has been asked for a sign of life in vain; 0 where it has not.
  Clock::duration silence_of(PeerId peer) const REQUIRES(mutex_);

 private:
  struct Peer {
    ProcessId process = 0;
    PeerId link = 0;
    std::vector<std::byte> address;  // on the link
    std::string lost;                // why, once it is
    bool has_given_up_this = false;  // it is lost as it takes this process for lost
    std::optional<PeerId> spare;     // a second number of the link's for it, by which it was told that it is lost
    bool has_sent = false;           // whether anything was sent to it
    uint32_t last_asked = 0;         // the number of finish()'s question, while the answer has yet to come
    Clock::time_point joined{};      // when a group last came to it
    Clock::time_point heard{};       // when something last came from it
    Clock::time_point nodded{};      // when it was last told, unasked, that what it sends comes
    Clock::time_point asked{};
    Clock::time_point asked_first{};  // of the questions that wait for an answer
    bool waits_for_sign = false;
    bool warned = false;
  };
  /// A message on its way out, with room for what is copied.
  struct Outgoing {
    Post post;
    Sender* sender = nullptr;
    uint64_t cookie = 0;
    std::array<std::byte, kMostCopied> copied;
  };
  using GroupPortKey = std::pair<uint64_t, uint32_t>;  // group, rank here

  std::byte* place(std::span<const std::byte> header, size_t bytes) override REQUIRES(mutex_);
  void arrived(std::span<const std::byte> header, std::span<const std::byte> body) override REQUIRES(mutex_);
  void dropped(std::span<const std::byte> header, std::byte* where) override REQUIRES(mutex_);
  void done(Post& post, const Status& status) override REQUIRES(mutex_);
  void lost(PeerId peer, const std::string& why) override REQUIRES(mutex_);

  bool await_end(const std::function<int()>& open, const std::function<void()>& sever) REQUIRES(mutex_);
  /// Drives the link until open(), which counts what somebody gives up and the link still has, is 0, or has not become
  /// less for a while: a slow link is not a dead one. Takes a bounded time. Lets others have the lock in between.
  void await_flow(const std::function<int()>& open) REQUIRES(mutex_);
  /// Drives the link, and where nothing moves lets others have the lock for a moment. Not from inside a call of the
  /// link's.
  void drive_or_pause() REQUIRES(mutex_);
  /// This sender is not told any more of what it has sent.
  void disown(const Sender* sender) REQUIRES(mutex_);

  enum Answer : uint64_t { kGroupGone, kGroupStands, kGivenUp };
  Outgoing& outgoing(PeerId link, const MessageHeader& header, std::span<const std::byte> behind) REQUIRES(mutex_);
  void question(PeerId peer, uint64_t group, uint32_t from, uint32_t to, uint32_t number) REQUIRES(mutex_);
  void answer(const MessageHeader& header, std::span<const std::byte> whole, std::span<const std::byte> body)
      REQUIRES(mutex_);
  void take_answer(const MessageHeader& header, PeerId peer, std::span<const std::byte> body) REQUIRES(mutex_);
  void answer_lost(const MessageHeader& question, PeerId peer) REQUIRES(mutex_);
  void tell_lost(const MessageHeader& question, PeerId peer) REQUIRES(mutex_);
  MessageHeader pong_to(const MessageHeader& heard, Answer value) const;
  void hear(PeerId peer) REQUIRES(mutex_);
  std::string who(PeerId peer, const std::string& otherwise = "a process on another host") REQUIRES(mutex_);
  void note_left(const MessageHeader& heard) REQUIRES(mutex_);
  void nod(PeerId peer, const MessageHeader& heard) REQUIRES(mutex_);
  void lose(PeerId peer, const std::string& why) REQUIRES(mutex_);
  GroupPort* port_of(const MessageHeader& header) REQUIRES(mutex_);
  bool sweep() REQUIRES(mutex_);
  void stir() REQUIRES(mutex_);
  void attend() EXCLUDES(mutex_);
  bool attend_once(bool afterglow) EXCLUDES(mutex_);

  Mutex mutex_;
  std::unique_ptr<Link> link_;
  const size_t segment_bytes_;
  const std::chrono::nanoseconds between_looks_;
  const std::chrono::milliseconds silence_;
  const ProcessId process_;
  std::deque<Peer> peers_ GUARDED_BY(mutex_);  // by PeerId
  std::unordered_map<ProcessId, PeerId> by_process_ GUARDED_BY(mutex_);
  struct Met {
    PeerId peer;
    std::weak_ptr<void> standing;
    std::string known_as;
  };
  std::unordered_map<uint64_t, std::vector<Met>> met_ GUARDED_BY(mutex_);  // in the order of their groups
  std::vector<PeerId> by_link_ GUARDED_BY(mutex_);                         // the link has numbers of its own
  std::map<GroupPortKey, GroupPort*> ports_ GUARDED_BY(mutex_);
  std::deque<Outgoing> outgoing_ GUARDED_BY(mutex_);
  std::vector<Outgoing*> free_ GUARDED_BY(mutex_);
  std::vector<PeerId> to_forget_ GUARDED_BY(mutex_);                          // by the link's numbers
  std::vector<std::pair<MessageHeader, PeerId>> to_tell_ GUARDED_BY(mutex_);  // that they are lost
  uint32_t questions_ GUARDED_BY(mutex_) = 0;                                 // of finish()
  std::condition_variable stirred_;
  uint64_t stirs_ GUARDED_BY(mutex_) = 0;  // moves with whatever has come or gone
  int sleepers_ GUARDED_BY(mutex_) = 0;
  bool lookout_ GUARDED_BY(mutex_) = false;  // somebody sleeps in the link
  bool closed_ GUARDED_BY(mutex_) = false;
  std::atomic<int64_t> driven_ns_{0};  // when somebody last drove the link
  std::atomic<bool> closing_{false};
  std::thread attendant_;
};

/// How long a sleep in the link may take while an operation waits: an event that was missed costs this much.
inline constexpr std::chrono::microseconds kMostNap{1000};
/// The least that a waiter with any patience spins. Spinning for less than an exchange takes would never pay, and so
/// patience that was once halved would never be doubled again.
inline constexpr std::chrono::microseconds kLeastSpin{50};

template <class Ready, class Look>
Waited Messenger::wait(Ready ready, Look look, int peer, const WaitRules& rules) {
  uint64_t seen = 0;
  bool moved = false;
  const auto attempt = [&] {
    MutexLock lock(mutex_);
    moved = progress();
    seen = stirs_;
    return ready();
  };
  if (attempt()) return Waited::kReached;
  if (rules.patience) {
    const auto stop = Clock::now() + std::max<std::chrono::nanoseconds>(rules.patience->span(), kLeastSpin);
    do {
      if (attempt()) return rules.patience->paid(), Waited::kReached;
      const auto next = Clock::now() + (moved ? std::chrono::nanoseconds(0) : between_looks_);
      do relax();
      while (Clock::now() < next);
    } while (Clock::now() < stop);
    rules.patience->in_vain();
  }
  auto next_look = Clock::now() + kWatchInterval;
  for (;;) {
    nap(kMostNap, seen);
    if (attempt()) return Waited::kReached;
    const auto now = Clock::now();
    if (rules.deadline.passed(now)) return Waited::kTimedOut;
    if (now < next_look) continue;
    next_look = now + kWatchInterval;
    {
      MutexLock lock(mutex_);
      look();
    }
    if (rules.watch && rules.watch->alarmed(peer)) {
      if (attempt()) return Waited::kReached;
      rules.watch->alarm(peer);
      return Waited::kAlarmed;
    }
  }
}

}  // namespace nvx::net
