#pragma once

#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "base/handle.h"
#include "memory/gpu/peer_mappings.h"

/// The meeting point of a part's processes: each has one end of a socket pair, and their parent has the others.
namespace nvx::gpu {

/// The contribution of one member.
struct Contribution {
  uint32_t member;
  std::vector<std::byte> what;
};

/// The end that a member process holds.
class Member : public Bootstrap {
 public:
  /// `number` is the member's own and stays the same when others end. `members` is the count at the start.
  Member(Fd fd, uint32_t number, uint32_t members) : fd_(std::move(fd)), number_(number), members_(members) {}

  /// Each member sends one message and receives all, in the order of their numbers. Throws Error if a member has gone.
  std::vector<std::vector<std::byte>> all_gather(std::span<const std::byte> mine) override;
  void barrier() { (void)all_gather({}); }
  /// Returns after one of the members, the victim, has been killed; the others then count one fewer. It does not return
  /// in the victim.
  void await_killing();
  /// Sends a text to the parent process.
  void send(const std::string& text);

  uint32_t members() const { return members_; }
  uint32_t number() const { return number_; }

 private:
  std::vector<Contribution> gather(uint32_t kind, std::span<const std::byte> mine);

  Fd fd_;
  uint32_t number_;
  uint32_t members_;
};

/// The end that the parent process holds.
class Hub {
 public:
  explicit Hub(uint32_t members);

  /// The descriptor for the member's process, to be inherited and then closed here.
  Fd take(uint32_t member) { return std::move(far_[member]); }

  struct Rules {
    std::function<void(uint32_t member, const std::string& text)> receive;
    /// The member that is killed when all have reached await_killing(), and how.
    uint32_t victim = 0;
    std::function<void()> kill;
  };
  /// Serves the members until each has gone. False: the deadline passed first.
  bool serve(const Rules& rules, const Deadline& deadline);

 private:
  void read_from(uint32_t member, const Rules& rules);
  void answer_if_all_arrived(const Rules& rules);

  std::vector<Fd> near_, far_;
  struct Pending {
    uint32_t kind;
    std::vector<std::byte> what;
  };
  std::vector<std::optional<Pending>> pending_;
};

}  // namespace nvx::gpu
