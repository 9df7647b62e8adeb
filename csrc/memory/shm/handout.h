#pragma once

#include <chrono>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/handle.h"
#include "memory/shm/process_watch.h"
#include "memory/shm/unix_socket.h"

namespace nvx {

/// How a rank introduces itself to a handout, and a handout to its guests. Fixed layout; comes from peers.
struct Card {
  static constexpr uint32_t kMagic = 0x6378766e;  // "nvxc"
  uint32_t magic = kMagic;
  int32_t rank = -1;
  char who[120] = {};  ///< describes the rank in errors

  static Card of(int rank, const std::string& who);
};

/// A rank of this host, and its process.
struct Acquaintance {
  Card card;
  ProcessWatch process;
};

/// The first rank of a host to come watches the others, and passes to them data that it has read elsewhere, so that not
/// each of them reads it from there. The data consists of sheets, which all ranks receive in the same order.
class Handout {
 public:
  explicit Handout(const Card& own);
  const std::string& name() const { return name_; }
  /// Readable when a process has connected.
  int fd() const { return listener_.get(); }

  /// Adds the next sheet. Throws Error if there is no memory for it.
  void give(std::span<const uint8_t> sheet);
  /// Adds the last sheet: the reason why no other will come.
  void give_up(std::span<const uint8_t> reason);
  /// Accepts new connections, a bounded number, and sends all guests the sheets that exist. Never blocks.
  void serve();
  /// The ranks that have come, also those that have gone away.
  const std::vector<Acquaintance>& guests() const { return known_; }
  bool has_lost_guests() { return std::exchange(lost_, false); }

 private:
  struct Guest {
    LocalSocket socket;
    size_t given = 0;
    bool known = false;  // its card has come
  };
  struct Sheet {
    Fd file;
    bool is_reason;
  };
  void add(std::span<const uint8_t> sheet, bool is_reason);
  bool attend(Guest& guest);

  const Card own_;
  std::string name_;
  LocalSocket listener_;
  std::vector<Sheet> sheets_;
  std::vector<Guest> guests_;
  std::vector<Acquaintance> known_;
  bool lost_ = false;
};

class Receipt {
 public:
  Receipt(const std::string& name, const Card& own);
  /// False once its handout is gone: no further sheets will come.
  bool open() const { return open_; }
  /// The next sheet; nothing if none comes within the span.
  std::optional<std::vector<uint8_t>> next(std::chrono::milliseconds span);
  /// The reason that the handout gave when it gave up.
  const std::optional<std::vector<uint8_t>>& reason() const { return reason_; }
  bool met() const { return met_; }
  /// The process of the handout, once this one has connected.
  const ProcessWatch& process() const { return process_; }

 private:
  void connect();
  std::optional<std::vector<uint8_t>> take();

  const std::string name_;
  const Card own_;
  bool open_ = false;
  bool met_ = false;    // the handout has introduced itself
  LocalSocket socket_;  // none while the handout's backlog is full
  ProcessWatch process_;
  std::optional<std::vector<uint8_t>> reason_;
};

}  // namespace nvx
