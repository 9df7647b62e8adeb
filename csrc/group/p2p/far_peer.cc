// Mail with ranks of other hosts, through the port.

#include "group/p2p/mailbox.h"

namespace nvx {
namespace {

constexpr uint32_t kFarEnvelopes = 64;  // the most announcements that another host has not read

}  // namespace

bool FarPeer::move() {
  const bool moved = announce();
  return grant() || moved;
}

bool FarPeer::announce() {
  if (unannounced_.empty()) return false;
  MutexLock lock(core_.port->mutex());
  bool moved = false;
  while (!unannounced_.empty() && uint32_t(announced_) - there_.count < kFarEnvelopes) {
    const std::shared_ptr<Message> message = unannounced_.front();
    unannounced_.pop_front();
    net::MailHead head{};
    head.tag = message->tag;
    head.bytes = message->bytes;
    head.number = ++announced_;
    head.dtype = uint8_t(message->dtype);
    head.carries_data = carries(message->bytes, net::Messenger::kMostCopied, there_.full());
    core_.port->mail().announce(rank_, head, {message->data, head.carries_data ? message->bytes : 0});
    if (head.carries_data) {
      finish(message, {});
    } else {
      ungranted_[announced_] = message;
    }
    moved = true;
  }
  return moved;
}

bool FarPeer::grant() {
  if (to_grant_.empty()) return false;
  MutexLock lock(core_.port->mutex());
  for (const auto& [message, number] : to_grant_)
    core_.port->mail().grant(rank_, number, message->data, message->bytes, message);
  to_grant_.clear();
  return true;
}

/// Takes announcements in the order of sending, each once, even if the link reorders or repeats them.
void FarPeer::take(net::Mail::Letter&& letter) {
  const net::MailHead& head = letter.head;
  if (head.number <= taken_ || head.number > taken_ + kFarEnvelopes) return;
  const DType dtype = head.dtype < kernel::kDTypeCount ? DType(head.dtype) : DType::kBytes;
  ahead_.try_emplace(head.number, Early{rank_, head.number, head.tag, dtype, size_t(head.bytes), head.carries_data != 0,
                                        std::move(letter.body)});
  while (!ahead_.empty() && ahead_.begin()->first == taken_ + 1) {
    ++taken_;
    come(std::move(ahead_.extract(ahead_.begin()).mapped()));
  }
  if (uint32_t(taken_) - reported_.count >= kFarEnvelopes / 2) send_taken();
}

void FarPeer::send_full(bool) {
  ++reported_.turns;
  send_taken();
}

void FarPeer::send_taken() {
  reported_.count = uint32_t(taken_);
  MutexLock lock(core_.port->mutex());
  core_.port->send(rank_, {net::Kind::kTaken, reported_.value()});
}

void FarPeer::read(net::Mail::Letter&& letter) {
  switch (letter.kind) {
    case net::Kind::kMail: return take(std::move(letter));
    case net::Kind::kTaken: return there_.learn(net::Taken::of(letter.value));
    case net::Kind::kGrant: {
      const auto found = ungranted_.extract(letter.value);
      if (!found) return;
      const std::shared_ptr<Message>& message = found.mapped();
      MutexLock lock(core_.port->mutex());
      return core_.port->mail().send(rank_, letter.value, message->data, message->bytes, message);
    }
    default: return;
  }
}

}  // namespace nvx
