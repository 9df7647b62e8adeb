#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "group/p2p/mailbox.h"

namespace nvx {

/// Memory of every rank of a group that the others write to and signal. The owner need not call anything.
///
/// A window uses the group's mailbox, so it works for any memory, within a host and between hosts, and no peer maps it.
/// A write is a note and its data, which the owner's mailbox writes to the window; a signal is a note, and so is the
/// end. Each rank has a standing receive for the next note of each peer, and executes a note before it receives the
/// next. So a signal arrives after all earlier writes of its sender are in place. A wait for a signal is a wait for a
/// message.
///
/// Open as long as its group, unless it is closed. The standing receives keep it alive, since peers write without
/// asking. It must not be called after the group has gone.
class Window : public std::enable_shared_from_this<Window> {
 public:
  /// The memory of one rank, as the others know it. `type`: ranks compare it; only the opener interprets it.
  struct Share {
    uint64_t elements = 0;
    uint32_t element_bytes = 1;
    uint32_t type = 0;
  };
  struct Memory {
    std::byte* data = nullptr;
    Share share;
    std::shared_ptr<const void> owner;  ///< released when no peer writes to `data` any more
  };

  /// The parts of a group that a window uses. `execute`: runs a collective; called only while the window is opened.
  struct Parts {
    Core& core;
    Mailbox& mailbox;
    std::function<Status(Operation&)> execute;
  };

  /// All ranks of the group call it. A rank without memory to offer calls it too, so that no rank waits for it. Then no
  /// rank gets a window: this throws Error(kInvalid), which names the ranks without memory.
  static std::shared_ptr<Window> open(const Parts& group, const std::optional<Memory>& mine);
  /// All ranks call it. Returns when all writes to this rank are in place and no more can come.
  Status close();

  const Share& share(int rank) const { return shares_[size_t(rank)]; }

  /// These create messages: the caller sends the first two and receives the last one. They throw Error(kInvalid). The
  /// data must stay valid until the message is done.
  std::shared_ptr<Message> put(int rank, uint64_t offset, const std::byte* data, uint64_t elements) const;
  std::shared_ptr<Message> signal(int rank) const;
  /// Done when that rank has signalled once more than it was waited for.
  std::shared_ptr<Message> wait_signal(int rank) const;

 private:
  enum class Kind : uint32_t { kPut = 1, kSignal, kClose };
  struct Note {
    Kind kind;
    uint32_t unused = 0;
    uint64_t offset = 0;  // in bytes
    uint64_t bytes = 0;
  };
  static_assert(sizeof(Note) == 24);
  enum class Channel { kNotes, kSignals, kEnds, kCount };
  /// The ranks exchange this when they open the window.
  struct Info {
    uint64_t number;
    Share share;
    uint64_t offered;
  };

  Window(const Parts& group, const std::optional<Memory>& mine);
  void exchange_infos(const Parts& group, bool offered);
  int64_t tag(Channel channel) const;
  size_t bytes_of(int rank) const {
    return size_t(shares_[size_t(rank)].elements) * shares_[size_t(rank)].element_bytes;
  }
  void check_rank(int rank) const;
  std::shared_ptr<Message> note_to(int rank, Note note, const char* call_name) const;
  std::shared_ptr<Message> message_of(int rank, Channel channel, const char* call_name) const;
  void expect_note(int rank);
  void expect_data(int rank, const Note& note);
  void follow(int rank, const Note& note);

  Core& core_;
  const Members& members_;
  Mailbox& mailbox_;
  Memory mine_;
  std::vector<Share> shares_;  // by rank
  uint64_t number_ = 0;        // of the operation that opened it, on rank 0; unique among the windows of the group
};

}  // namespace nvx
