#pragma once

#include <chrono>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "base/handle.h"
#include "memory/gpu/device_share.h"

/// How the processes of a part meet: each has one end of a socket pair, and who started them has the others.
namespace nvx::gpu {

/// What one of them has said.
struct Said {
  uint32_t member;
  std::vector<std::byte> what;
};

/// The end of a process.
class Member : public Exchange {
 public:
  /// number: its own, which it keeps though others go; members: so many there are.
  Member(Fd fd, uint32_t number, uint32_t members) : fd_(std::move(fd)), number_(number), members_(members) {}

  /// Each says one thing and hears all, in the order of their numbers. Throws Error where one has gone.
  std::vector<std::vector<std::byte>> all_gather(std::span<const std::byte> mine) override;
  void barrier() { (void)all_gather({}); }
  /// Returns when the victim, which is one of them, has been killed; the others are as many fewer. Does not return in
  /// the victim.
  void await_killing();
  /// Tells whoever started this one.
  void say(const std::string& text);

  uint32_t members() const { return members_; }
  uint32_t number() const { return number_; }

 private:
  std::vector<Said> gather(uint32_t kind, std::span<const std::byte> mine);

  Fd fd_;
  uint32_t number_;
  uint32_t members_;
};

/// The end of who started them.
class Hub {
 public:
  explicit Hub(uint32_t members);

  /// For the member's process: to be handed over, then closed here.
  Fd take(uint32_t member) { return std::move(far_[member]); }

  struct Rules {
    std::function<void(uint32_t member, const std::string& text)> hear;
    /// Which one is killed when all have come to await_killing(), and how.
    uint32_t victim = 0;
    std::function<void()> kill;
  };
  /// Serves them until each has gone. False: not in time.
  bool serve(const Rules& rules, const Deadline& deadline);

 private:
  void read_from(uint32_t member, const Rules& rules);
  void answer_if_all_said(const Rules& rules);

  std::vector<Fd> near_, far_;
  struct Pending {
    uint32_t kind;
    std::vector<std::byte> what;
  };
  std::vector<std::optional<Pending>> said_;
};

}  // namespace nvx::gpu
