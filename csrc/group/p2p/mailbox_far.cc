// Mail with ranks of other hosts, through the port.

#include <utility>

#include "group/p2p/mailbox.h"

namespace nvx {
namespace {

constexpr uint32_t kFarEnvelopes = 64;  // the most announcements that another host has not read

}  // namespace

bool Mailbox::announce_far(int rank) {
  Peer& peer = peers_[size_t(rank)];
  if (peer.unannounced.empty()) return false;
  MutexLock lock(core_.port->mutex());
  bool moved = false;
  while (!peer.unannounced.empty() && uint32_t(peer.announced) - peer.there.count < kFarEnvelopes) {
    const std::shared_ptr<Message> message = peer.unannounced.front();
    peer.unannounced.pop_front();
    net::MailHead head{};
    head.tag = message->tag;
    head.bytes = message->bytes;
    head.number = ++peer.announced;
    head.dtype = uint8_t(message->dtype);
    head.carries_data = carries(message->bytes, net::Messenger::kMostCopied, peer.there.full());
    core_.port->mail().announce(rank, head, {message->data, head.carries_data ? message->bytes : 0});
    if (head.carries_data) {
      finish(message, {});
    } else {
      peer.ungranted[peer.announced] = message;
    }
    moved = true;
  }
  return moved;
}

bool Mailbox::grant_far(int rank) {
  auto& waiting = to_grant_[size_t(rank)];
  if (waiting.empty()) return false;
  MutexLock lock(core_.port->mutex());
  for (const auto& [message, number] : waiting) {
    peers_[size_t(rank)].transfers_in[number] = message;
    core_.port->mail().grant(rank, number, message->data, message->bytes);
  }
  waiting.clear();
  return true;
}

bool Mailbox::read_port() {
  bool moved = false;
  for (;;) {
    std::optional<net::Mail::Letter> letter;
    std::optional<std::pair<int, uint64_t>> sent, received;
    {
      MutexLock lock(core_.port->mutex());
      letter = core_.port->mail().next_letter();
      sent = core_.port->mail().next_sent();
      received = core_.port->mail().next_received();
    }
    if (!letter && !sent && !received) return moved;
    moved = true;
    if (letter) read_letter(std::move(*letter));
    if (sent) {
      if (const auto found = peers_[size_t(sent->first)].transfers_out.extract(sent->second))
        finish(found.mapped(), {});
    }
    if (received) {
      const auto found = peers_[size_t(received->first)].transfers_in.extract(received->second);
      if (found) finish(found.mapped(), {});
    }
  }
}

/// Takes announcements in the order of sending, each once, even if the link reorders or repeats them.
void Mailbox::read_mail(net::Mail::Letter&& letter) {
  Peer& peer = peers_[size_t(letter.from)];
  const net::MailHead& head = letter.head;
  if (head.number <= peer.taken || head.number > peer.taken + kFarEnvelopes) return;
  const DType dtype = head.dtype < kernel::kDTypeCount ? DType(head.dtype) : DType::kBytes;
  peer.ahead.try_emplace(head.number, Early{letter.from, head.number, head.tag, dtype, size_t(head.bytes),
                                            head.carries_data != 0, std::move(letter.body)});
  while (!peer.ahead.empty() && peer.ahead.begin()->first == peer.taken + 1) {
    ++peer.taken;
    come(std::move(peer.ahead.extract(peer.ahead.begin()).mapped()));
  }
  if (uint32_t(peer.taken) - peer.told.count >= kFarEnvelopes / 2) tell_taken(letter.from);
}

void Mailbox::tell_taken(int rank) {
  Peer& peer = peers_[size_t(rank)];
  peer.told.count = uint32_t(peer.taken);
  MutexLock lock(core_.port->mutex());
  core_.port->send(rank, {net::Kind::kTaken, peer.told.value()});
}

void Mailbox::read_letter(net::Mail::Letter&& letter) {
  if (!far(letter.from)) return;
  Peer& peer = peers_[size_t(letter.from)];
  switch (letter.kind) {
    case net::Kind::kMail: return read_mail(std::move(letter));
    case net::Kind::kTaken: return peer.there.learn(net::Taken::of(letter.value));
    case net::Kind::kGrant: {
      const auto found = peer.ungranted.extract(letter.value);
      if (!found) return;
      const std::shared_ptr<Message> message = found.mapped();
      peer.transfers_out[letter.value] = message;
      MutexLock lock(core_.port->mutex());
      core_.port->mail().send(letter.from, letter.value, message->data, message->bytes);
      return;
    }
    default: return;
  }
}

/// The fate of a rank of another host, or of any (-1). Requests a sign of life from these ranks.
std::optional<net::GroupPort::Fate> Mailbox::fate(int peer) {
  if (!core_.port) return std::nullopt;
  MutexLock lock(core_.port->mutex());
  std::optional<net::GroupPort::Fate> left;
  bool somebody = false;
  for (int s = 0; s < members_.local_ranks(); ++s) somebody |= s != members_.local_rank() && !members_.gone(s);
  for (int rank = 0; rank < members_.size(); ++rank) {
    if (!far(rank) || (peer >= 0 && peer != rank)) continue;
    core_.port->ask(rank);
    const auto fate = core_.port->fate(rank);
    if (fate && (peer == rank || !fate->left())) return fate;
    if (fate) left = fate;
    somebody |= !fate;
  }
  return somebody ? std::nullopt : left;  // cache policies; null before the first stream
}

}  // namespace nvx
