#pragma once

#include <compare>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <vector>

#include "net/header.h"

namespace nvx::net {

class GroupPort;
class ScheduleRun;

/// The cost of a segment that is kept, beside its body. It bounds the number of segments too.
inline constexpr uint64_t kSegmentCost = 1 << 10;

/// Flow control between this rank and the others of its group: credits, and the segments that arrived before their step
/// had begun. The messenger's lock guards all of it, and the caller holds that lock.
class SegmentFlow {
 public:
  SegmentFlow(GroupPort& port, int ranks) : port_(port), ranks_(size_t(ranks)) {}

  /// Whether a segment of this size may be sent to a rank now; if so, it counts as sent. Unacknowledged cost is bounded
  /// by 4 MiB; each segment costs 1 KiB beside its bytes. While less than a quarter of that is unacknowledged, one
  /// segment of any length may go. `is_oldest`: no earlier run of this rank is under way. It has 2 MiB more, since its
  /// receiver may take the segments of later runs only after those of this one.
  bool take_credit(int rank, size_t bytes, bool is_oldest);
  void credit(uint32_t rank, uint64_t cost);
  /// Acknowledges a segment of this size, which this rank has processed.
  void acknowledge(int rank, size_t bytes);

  /// Keeps a segment for a step that has not begun. Disconnects a sender that has exceeded its credit.
  void keep(const MessageHeader& header, const std::optional<First>& first, std::span<const std::byte> body);
  /// Notes that a rank is ready for a message to a device. Disconnects a rank that announces it too often.
  void note_ready(const MessageHeader& header);
  /// Whether a rank is ready for a message; forgets it.
  bool take_ready(const ScheduleRun& run, int to, uint16_t message);
  void offer(ScheduleRun& run, int from, uint16_t message);
  /// Compares the fingerprints of all kept segments of a run with the run's.
  void compare(ScheduleRun& run);
  /// Drops the segments for these operations, which have ended.
  void drop(uint32_t first_op, uint32_t last_op);
  void clear() { early_.clear(), ready_.clear(); }

 private:
  struct Rank {
    uint64_t unacknowledged = 0;  // cost that was sent to it and not acknowledged
    uint64_t to_acknowledge = 0;  // cost that was received from it and is not acknowledged yet
    uint64_t kept = 0;            // cost of its early segments
  };
  struct Message {
    uint32_t op;
    uint16_t run;
    uint32_t from;
    uint16_t number;
    auto operator<=>(const Message&) const = default;
  };
  struct Early {
    MessageHeader header;
    std::optional<First> first;
    std::vector<std::byte> body;
  };
  void forget(const Early& early);

  GroupPort& port_;
  std::vector<Rank> ranks_;
  std::set<Message> ready_;                      // `from`: the rank that is ready
  std::map<Message, std::vector<Early>> early_;  // with many receivers or slow ranks, thousands of segments
};

}  // namespace nvx::net
