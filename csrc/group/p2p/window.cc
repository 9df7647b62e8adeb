#include "group/p2p/window.h"

#include <cstring>

#include "base/text.h"
#include "group/p2p/gather.h"

namespace nvx {

Window::Window(const Parts& group, const std::optional<Memory>& mine)
    : core_(group.core),
      members_(core_.members),
      mailbox_(group.mailbox),
      mine_(mine.value_or(Memory())),
      shares_(size_t(members_.size())) {}

std::shared_ptr<Window> Window::open(const Parts& group, const std::optional<Memory>& mine) {
  const std::shared_ptr<Window> window(new Window(group, mine));
  window->exchange_infos(group, mine.has_value());
  for (int rank = 0; rank < window->members_.size(); ++rank) window->expect_note(rank);
  group.mailbox.push(Runner::kPool);  // for notes that have arrived already
  return window;
}

void Window::exchange_infos(const Parts& group, bool offered) {
  const auto ranks = size_t(members_.size());
  const Info info{core_.next_number(), mine_.share, offered};
  const std::vector<Info> infos = gather(core_, group.execute, info.number, "window", info);
  std::vector<std::string> without;
  for (size_t r = 0; r < ranks; ++r) {
    const Share& share = infos[r].share;
    const bool possible = share.element_bytes != 0 && share.elements <= SIZE_MAX / share.element_bytes;
    if (!infos[r].offered || !possible) without.push_back(members_.topology.describe(int(r)));
    shares_[r] = share;
  }
  NVX_CHECK(without.empty(), "no window was created in group " + members_.name + ", because a tensor was refused on " +
                                 joined(without) +
                                 ". Next: see the error there, and call tensor_register again on all ranks");
  number_ = infos[0].number;
}

int64_t Window::tag(Channel channel) const {
  return kOwnTags + int64_t(number_) * int64_t(Channel::kCount) + int64_t(channel);
}

void Window::check_rank(int rank) const {
  NVX_CHECK(rank >= 0 && rank < members_.size(),
            "invalid rank " + std::to_string(rank) + " in a group of " + std::to_string(members_.size()));
}

std::shared_ptr<Message> Window::put(int rank, uint64_t offset, const std::byte* data, uint64_t elements) const {
  check_rank(rank);
  const Share& there = share(rank);
  NVX_CHECK(offset <= there.elements && elements <= there.elements - offset,
            "put of " + std::to_string(elements) + " elements at offset " + std::to_string(offset) +
                " does not fit into the " + std::to_string(there.elements) + " elements that rank " +
                std::to_string(rank) + " has registered");
  const size_t bytes = size_t(elements) * there.element_bytes;
  std::shared_ptr<Message> note = note_to(rank, {Kind::kPut, 0, offset * there.element_bytes, bytes}, "put");
  if (bytes == 0) return note;
  std::shared_ptr<Message> message = message_of(rank, Channel::kNotes, "put");
  message->data = const_cast<std::byte*>(data);  // a sent message is only read
  message->bytes = bytes;
  message->ahead = std::move(note);
  return message;
}

std::shared_ptr<Message> Window::signal(int rank) const {
  check_rank(rank);
  return note_to(rank, {Kind::kSignal}, "signal");
}

std::shared_ptr<Message> Window::wait_signal(int rank) const {
  check_rank(rank);
  return message_of(rank, Channel::kSignals, "wait_signal");
}

/// The message owns its note.
std::shared_ptr<Message> Window::note_to(int rank, Note note, const char* call_name) const {
  struct Noted : Message {
    Note note;
  };
  auto noted = std::make_shared<Noted>();
  noted->note = note;
  noted->call_name = call_name;
  noted->peer = rank;
  noted->tag = tag(Channel::kNotes);
  noted->data = reinterpret_cast<std::byte*>(&noted->note);
  noted->bytes = sizeof(Note);
  return noted;
}

std::shared_ptr<Message> Window::message_of(int rank, Channel channel, const char* call_name) const {
  auto message = std::make_shared<Message>();
  message->call_name = call_name;
  message->peer = rank;
  message->tag = tag(channel);
  return message;
}

/// Executes notes in order: posts the receive of the next note after this one has been executed.
void Window::expect_note(int rank) {
  const std::shared_ptr<Message> message = note_to(rank, {}, "window");
  message->is_standing = true;
  message->may_block = [] { return false; };
  message->finished = [self = shared_from_this(), rank](const Message& received) {
    if (!received.status().ok()) return;  // the group has ended
    Note note;
    std::memcpy(&note, received.data, sizeof note);
    self->follow(rank, note);
  };
  mailbox_.expect(message);
}

void Window::expect_data(int rank, const Note& note) {
  const std::shared_ptr<Message> message = message_of(rank, Channel::kNotes, "window");
  message->data = mine_.data + note.offset;
  message->bytes = size_t(note.bytes);
  message->is_standing = true;
  message->may_block = [] { return false; };
  message->finished = [self = shared_from_this(), rank](const Message& received) {
    if (received.status().ok()) self->expect_note(rank);
  };
  mailbox_.expect(message);
}

void Window::follow(int rank, const Note& note) {
  const size_t most = bytes_of(members_.rank);
  const bool fits = note.offset <= most && note.bytes <= most - note.offset;
  if (note.kind == Kind::kPut && fits && note.bytes != 0) return expect_data(rank, note);
  switch (note.kind) {
    case Kind::kPut:
      if (fits) return expect_note(rank);
      break;
    case Kind::kSignal: mailbox_.receive_empty(rank, tag(Channel::kSignals)); return expect_note(rank);
    case Kind::kClose: return mailbox_.receive_empty(rank, tag(Channel::kEnds));
  }
  const std::string cause = members_.topology.describe(rank) + " writes outside the window";
  (void)core_.failures.fail({.code = Code::kMismatch, .cause = cause, .context = "in a window"});
}

/// The end note of a rank comes after all its writes. A rank that has received all ends has no standing receive left.
Status Window::close() {
  std::vector<std::shared_ptr<Message>> ends;
  for (int rank = 0; rank < members_.size(); ++rank) {
    const auto end = note_to(rank, {Kind::kClose}, "tensor_deregister");
    const auto their_end = message_of(rank, Channel::kEnds, "tensor_deregister");
    mailbox_.receive(their_end, Runner::kPool);
    mailbox_.send(end, Runner::kPool);
    ends.insert(ends.end(), {their_end, end});
  }
  Status status;
  for (const auto& end : ends) {
    const Status how = mailbox_.wait(*end);
    if (status.ok()) status = how;
  }
  mailbox_.forget(tag(Channel::kSignals));
  return status;
}

}  // namespace nvx
