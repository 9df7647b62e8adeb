#pragma once

#include <deque>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/deadline.h"
#include "net/header.h"
#include "net/link.h"

namespace nvx::net {

class Messenger;

/// Whether a messenger's peers are alive: pings and their answers, the peers that count as lost, and the ranks of the
/// whole job that this process has noted. The messenger's lock guards all of it, and the caller holds that lock.
class Liveness {
 public:
  enum Answer : uint64_t { kGroupGone, kGroupAlive, kDeclaredLost };

  /// `silence`: how long a peer may leave pings without an answer until it counts as lost.
  Liveness(Messenger& messenger, std::chrono::milliseconds silence) : messenger_(messenger), silence_(silence) {}

  /// A group has connected to the peer, which may be a new one.
  void joined(PeerId peer);
  /// A message of a group has arrived from the peer.
  void received(PeerId peer, const MessageHeader& header, bool has_body);
  void answer(const MessageHeader& header, std::span<const std::byte> whole, std::span<const std::byte> body);
  /// Sends the answers that a callback of the link could not send.
  void settle();

  /// Pings a peer at most once a second, and counts it as lost if it has not answered for too long. The answer says
  /// whether the rank `to` has left the group, so each group has its own second, since `last`. Null: since any ping.
  void ping(PeerId peer, uint64_t group, int from, int to, Clock::time_point* last = nullptr);
  /// The peer of the same process: a new one if this one is lost, as its process may live.
  PeerId reconnect(PeerId peer);
  std::chrono::milliseconds silence() const { return silence_; }
  bool has_received(PeerId peer) const { return signs_[peer].received != Clock::time_point(); }
  /// How long it has not answered pings; 0 if it was not pinged.
  Clock::duration silence_of(PeerId peer) const;
  /// Whether the peer is lost because it considers this process lost.
  bool has_declared_this_lost(PeerId peer) const { return signs_[peer].has_declared_this_lost; }
  /// Sends a peer an unsolicited pong: the rank `from` has left the group.
  void announce_left(PeerId peer, uint64_t group, int from, int to);
  /// For the end of the process: pings the peers to which anything was sent, and names one that has not answered and
  /// has given a sign of life within `timeout`.
  void send_last_pings();
  std::optional<PeerId> open_peer(Clock::time_point began, Clock::duration timeout) const;

  /// Records that a peer is this rank of the whole job, as long as `membership`, of a group, exists. `description`
  /// describes the peer in messages. `has_left_job`, for the group of the whole job: queries whether the rank has
  /// destroyed it.
  void note_rank(uint64_t global_rank, PeerId peer, std::weak_ptr<void> membership, std::string description,
                 std::function<bool()> has_left_job = {});
  /// Whether the rank has destroyed the group of the whole job, which exists here, as of its last answer.
  bool has_left_job(uint64_t global_rank) const;
  /// Pings a rank that has been noted. Returns a text that describes the rank and its loss if it is lost, otherwise an
  /// empty text: also if its connection was given up, because its process connects anew.
  std::string how_lost(uint64_t global_rank);
  /// Where a rank that has been noted runs: "(pid 4711, host a01)". Empty if it has not been noted.
  std::string location(uint64_t global_rank) const;
  /// The name of a peer, if a group has recorded one; that group may be gone.
  std::string name_of(PeerId peer, const std::string& otherwise = "a process on another host") const;

 private:
  struct Signs {
    bool has_declared_this_lost = false;  // it is lost because it considers this process lost
    uint32_t last_ping = 0;               // the number of send_last_pings()'s unanswered ping
    uint32_t earlier_pings = 0;           // the pings to all peers before a group last connected to it
    Clock::time_point received{};         // when a message last arrived from it
    Clock::time_point confirmed{};        // when it last received an unsolicited pong
    Clock::time_point pinged{};
    Clock::time_point pinged_first{};  // the first unanswered ping
    bool waits_for_pong = false;
    bool warned = false;
  };
  struct NotedRank {
    PeerId peer;
    std::weak_ptr<void> membership;
    std::string description;
    std::function<bool()> has_left_job;
  };

  void send(PeerId peer, const MessageHeader& header);
  void note_sign_of_life(PeerId peer);
  void take_answer(const MessageHeader& header, PeerId peer, std::span<const std::byte> body);
  /// Tells the group that the rank has left it or, if `why` is not empty, that it considers this process lost.
  void note_departure(const MessageHeader& pong, const std::string& why = "");

  Messenger& messenger_;
  const std::chrono::milliseconds silence_;
  std::deque<Signs> signs_;                                     // by PeerId
  std::vector<std::pair<MessageHeader, PeerId>> to_notify_;     // the lost peers to notify, and their pings
  uint32_t pings_ = 0;                                          // to all peers
  std::unordered_map<uint64_t, std::vector<NotedRank>> ranks_;  // in the order of their groups
};

}  // namespace nvx::net
