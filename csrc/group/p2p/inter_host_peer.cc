// Messages with ranks of other hosts, through the port.

#include "group/p2p/mailbox.h"

namespace nvx {
namespace {

constexpr uint32_t kMostUnread = 64;  // the most announcements that another host has not read

}  // namespace

bool InterHostPeer::move() {
  const bool moved = announce();
  return grant() || moved;
}

bool InterHostPeer::announce() {
  if (unannounced_.empty()) return false;
  MutexLock lock(core_.port->mutex());
  bool moved = false;
  while (!unannounced_.empty() && uint32_t(announced_) - peer_taken_.count < kMostUnread) {
    const std::shared_ptr<Message> message = unannounced_.front();
    unannounced_.pop_front();
    net::Envelope envelope{};
    envelope.tag = message->tag;
    envelope.bytes = message->bytes;
    envelope.number = ++announced_;
    envelope.dtype = uint8_t(message->dtype);
    envelope.carries_data = carries(message->bytes, net::PointToPoint::kMostEager, peer_taken_.full());
    const bool copied = envelope.carries_data && message->bytes <= net::Messenger::kMostCopied;
    core_.port->p2p().announce(rank_, envelope, {message->data, envelope.carries_data ? message->bytes : 0},
                               envelope.carries_data && !copied ? message : nullptr);
    if (copied) finish(message, {});
    if (!envelope.carries_data)
      core_.port->p2p().send(rank_, announced_, message->data, message->bytes, peer_taken_.full(), message);
    moved = true;
  }
  return moved;
}

bool InterHostPeer::grant() {
  if (to_grant_.empty()) return false;
  MutexLock lock(core_.port->mutex());
  for (const auto& [message, number] : to_grant_)
    core_.port->p2p().grant(rank_, number, message->data, message->bytes, message);
  to_grant_.clear();
  return true;
}

/// Takes announcements in the order of sending, each once, even if the link reorders or repeats them.
void InterHostPeer::take(net::PointToPoint::Control&& control) {
  const net::Envelope& envelope = control.envelope;
  if (envelope.number <= taken_ || envelope.number > taken_ + kMostUnread) return;
  const DType dtype = envelope.dtype < kernel::kDTypeCount ? DType(envelope.dtype) : DType::kBytes;
  ahead_.try_emplace(envelope.number, Unexpected{rank_, envelope.number, envelope.tag, dtype, size_t(envelope.bytes),
                                                 envelope.carries_data != 0, std::move(control.body)});
  while (!ahead_.empty() && ahead_.begin()->first == taken_ + 1) {
    ++taken_;
    arrive(std::move(ahead_.extract(ahead_.begin()).mapped()));
  }
  if (uint32_t(taken_) - own_taken_.count >= kMostUnread / 2) send_taken();
}

void InterHostPeer::send_full(bool) {
  ++own_taken_.turns;
  send_taken();
}

void InterHostPeer::send_taken() {
  own_taken_.count = uint32_t(taken_);
  MutexLock lock(core_.port->mutex());
  core_.port->send(rank_, {net::Kind::kTaken, own_taken_.value()});
}

void InterHostPeer::read(net::PointToPoint::Control&& control) {
  if (control.kind == net::Kind::kEnvelope) return take(std::move(control));
  peer_taken_.update(net::Taken::of(control.value));
}

}  // namespace nvx
