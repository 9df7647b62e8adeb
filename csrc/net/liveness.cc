#include "net/liveness.h"

#include <algorithm>

#include "base/contain.h"
#include "base/log.h"
#include "base/text.h"
#include "net/group_port.h"
#include "net/messenger.h"

namespace nvx::net {
namespace {

constexpr std::chrono::milliseconds kPingInterval{1000};

/// The content of a ping or a pong: its sender, so that the answer can be routed.
struct PingBody {
  ProcessId process;
};

double in_seconds(Clock::duration span) { return std::chrono::duration<double>(span).count(); }

MessageHeader header_of(Kind kind, uint64_t value, uint64_t group, uint32_t from, uint32_t to) {
  MessageHeader header(kind, value);
  header.group = group;
  header.from = from;
  header.to = to;
  return header;
}

MessageHeader pong_to(const MessageHeader& header, Liveness::Answer value) {
  MessageHeader pong = header_of(Kind::kPong, value, header.group, header.to, header.from);
  if (header.kind == Kind::kPing) pong.op = header.op;
  return pong;
}

}  // namespace

void Liveness::send(PeerId peer, const MessageHeader& header) {
  messenger_.mutex().held_by_caller();
  const PingBody mine{messenger_.process_};
  messenger_.send(peer, header, std::as_bytes(std::span(&mine, 1)));
}

void Liveness::joined(PeerId peer) {
  signs_.resize(std::max<size_t>(signs_.size(), peer + 1));
  Signs& signs = signs_[peer];
  signs.earlier_pings = pings_;
  signs.waits_for_pong = signs.warned = false;  // it has joined the new group since
}

void Liveness::note_sign_of_life(PeerId peer) {
  Signs& signs = signs_[peer];
  if (signs.warned) {
    NVX_LOG(kWarn, "%s, which gave no sign of life for %.1f s, is back", name_of(peer).c_str(),
            in_seconds(Clock::now() - signs.pinged_first));
  }
  signs.waits_for_pong = signs.warned = false;
  signs.received = Clock::now();
}

/// Confirms to a peer that sends much that its data arrives: the answer to its ping would come after all of that data.
void Liveness::received(PeerId peer, const MessageHeader& header, bool has_body) {
  note_sign_of_life(peer);
  Signs& signs = signs_[peer];
  if (!has_body || signs.received - signs.confirmed < kPingInterval) return;
  signs.confirmed = signs.received;
  send(peer, pong_to(header, kGroupAlive));
}

/// Answers a ping with whether its group still exists here. A process that this one has declared lost, but that is
/// still alive, is sent the reason, once: otherwise it would wait, and finally report this process as lost.
void Liveness::answer(const MessageHeader& header, std::span<const std::byte> whole, std::span<const std::byte> body) {
  messenger_.mutex().held_by_caller();
  const auto sign = read_behind_header<PingBody>(whole);
  if (!sign) return;
  const auto it = messenger_.by_process_.find(sign->process);
  if (it == messenger_.by_process_.end()) return;
  const PeerId from = it->second;
  if (!messenger_.link_->sent_by(from)) return;
  GroupPort* const port = messenger_.port_of(header);
  if (header.kind == Kind::kPing && !messenger_.lost_because(from).empty()) {
    if (port && (port->mutex().held_by_caller(), !port->process_of(int(header.from))))
      return;  // a new group, which is about to connect to it
    const auto same = [&](const auto& entry) { return entry.second == from; };
    const bool notified = messenger_.peers_[from].spare || std::ranges::any_of(to_notify_, same);
    if (!notified) to_notify_.emplace_back(header, from);  // this is a callback of the link
    return;
  }
  note_sign_of_life(from);
  if (header.kind == Kind::kPong) return take_answer(header, from, body);
  send(from, pong_to(header, port ? kGroupAlive : kGroupGone));
  if (!port) return;
  port->mutex().held_by_caller();
  port->pinged_by(header.from, from);
}

void Liveness::take_answer(const MessageHeader& header, PeerId peer, std::span<const std::byte> body) {
  messenger_.mutex().held_by_caller();
  Signs& signs = signs_[peer];
  if (header.op != 0 && header.op == signs.last_ping) signs.last_ping = 0;
  if (header.value == kDeclaredLost) {
    const std::string text(reinterpret_cast<const char*>(body.data()), std::min(body.size(), Messenger::kMostCopied));
    const std::string why = "has declared this process lost: " + printable(text);
    // If a newer group has connected to it since, only the group of the ping has lost it.
    if (int32_t(header.op - signs.earlier_pings) <= 0) return note_departure(header, why);
    signs.has_declared_this_lost |= messenger_.lost_because(peer).empty();
    return messenger_.disconnect(peer, why, /*may_live=*/true);
  }
  if (header.value == kGroupGone) note_departure(header);
}

void Liveness::note_departure(const MessageHeader& pong, const std::string& why) {
  using Cause = GroupPort::Departure::Cause;
  messenger_.mutex().held_by_caller();
  GroupPort* port = messenger_.port_of(pong);
  if (!port) return;
  port->mutex().held_by_caller();
  port->note_departure({int(pong.from), why.empty() ? Cause::kLeft : Cause::kDeclaredThisLost, why});
}

void Liveness::settle() {
  for (const auto& [ping, peer] : std::exchange(to_notify_, {})) {
    contain("notifying a process that it is considered lost", [&, &ping = ping, peer = peer] {
      messenger_.mutex().held_by_caller();
      const PingBody mine{messenger_.process_};
      messenger_.send_to_lost(peer, pong_to(ping, kDeclaredLost), std::as_bytes(std::span(&mine, 1)));
    });
  }
}

void Liveness::ping(PeerId peer, uint64_t group, int from, int to, Clock::time_point* last) {
  messenger_.mutex().held_by_caller();
  Signs& signs = signs_[peer];
  const auto now = Clock::now();
  if (!messenger_.lost_because(peer).empty()) return;
  if (now - signs.pinged > 3 * kPingInterval)
    signs.waits_for_pong = signs.warned = false;  // no thread has pinged since
  if (signs.waits_for_pong) {
    const auto silent = now - signs.pinged_first;
    if (silent > silence_) {
      const auto s = std::chrono::duration_cast<std::chrono::seconds>(silent).count();
      return messenger_.disconnect(peer, "it did not answer pings for " + std::to_string(s) + " s");
    }
    if (silent > silence_ * 3 / 10 && !signs.warned) {
      signs.warned = true;
      NVX_LOG(
          kWarn,
          "%s gives no sign of life for %.1f s; it counts as lost after %.0f s (NVX_LIVENESS_S). Check whether it is "
          "stopped or its host is down",
          name_of(peer, of_rank(to)).c_str(), in_seconds(silent), in_seconds(silence_));
    }
  }
  if (now - (last ? *last : signs.pinged) < kPingInterval) return;
  if (!signs.waits_for_pong) signs.pinged_first = now;
  signs.pinged = now;
  if (last) *last = now;
  signs.waits_for_pong = true;
  MessageHeader header = header_of(Kind::kPing, 0, group, uint32_t(from), uint32_t(to));
  header.op = ++pings_;
  send(peer, header);
}

void Liveness::announce_left(PeerId peer, uint64_t group, int from, int to) {
  messenger_.mutex().held_by_caller();
  if (!messenger_.lost_because(peer).empty()) return;
  send(peer, header_of(Kind::kPong, kGroupGone, group, uint32_t(from), uint32_t(to)));
}

PeerId Liveness::reconnect(PeerId peer) {
  messenger_.mutex().held_by_caller();
  const Messenger::Peer& known = messenger_.peers_[peer];
  const auto process = std::as_bytes(std::span(&known.process, 1));
  std::vector<std::byte> address(process.begin(), process.end());
  address.insert(address.end(), known.address.begin(), known.address.end());
  return messenger_.connect(address);
}

Clock::duration Liveness::silence_of(PeerId peer) const {
  const Signs& signs = signs_[peer];
  const auto now = Clock::now();
  const bool pinged = signs.waits_for_pong && now - signs.pinged <= 3 * kPingInterval;
  return pinged ? now - signs.pinged_first : Clock::duration(0);
}

/// All messages to a peer use one TCP connection (with UCX, if it uses one network device), so the answer to this last
/// ping proves that everything before it has arrived.
void Liveness::send_last_pings() {
  messenger_.mutex().held_by_caller();
  for (PeerId peer = 0; peer < signs_.size(); ++peer) {
    const Messenger::Peer& there = messenger_.peers_[peer];
    if (!there.has_sent || !there.lost.empty() || signs_[peer].warned) continue;
    MessageHeader header(Kind::kPing);
    header.op = signs_[peer].last_ping = ++pings_;
    send(peer, header);
  }
}

std::optional<PeerId> Liveness::open_peer(Clock::time_point began, Clock::duration timeout) const {
  messenger_.mutex().held_by_caller();
  for (PeerId peer = 0; peer < signs_.size(); ++peer) {
    const bool silent = Clock::now() - std::max(began, signs_[peer].received) > timeout;
    if (signs_[peer].last_ping != 0 && !silent && messenger_.lost_because(peer).empty()) return peer;
  }
  return std::nullopt;
}

// --- ranks of the whole job

void Liveness::note_rank(uint64_t global_rank, PeerId peer, std::weak_ptr<void> membership, std::string description,
                         std::function<bool()> has_left_job) {
  std::vector<NotedRank>& noted = ranks_[global_rank];
  std::erase_if(noted, [&](const NotedRank& m) {
    messenger_.mutex().held_by_caller();  // a rank whose process differs was replaced
    return m.membership.expired() || messenger_.peers_[m.peer].process != messenger_.peers_[peer].process;
  });
  noted.push_back({peer, std::move(membership), std::move(description), std::move(has_left_job)});
}

bool Liveness::has_left_job(uint64_t global_rank) const {
  const auto it = ranks_.find(global_rank);
  return it != ranks_.end() && std::ranges::any_of(it->second, [](const NotedRank& m) {
           const auto membership = m.membership.lock();
           return membership && m.has_left_job && m.has_left_job();
         });
}

std::string Liveness::how_lost(uint64_t global_rank) {
  messenger_.mutex().held_by_caller();
  const auto it = ranks_.find(global_rank);
  if (it == ranks_.end()) return "";
  std::erase_if(it->second, [](const NotedRank& m) { return m.membership.expired(); });
  if (it->second.empty()) return "";
  const NotedRank& noted = it->second.back();
  ping(noted.peer, /*group=*/0, /*from=*/0, int(global_rank));
  messenger_.progress();
  const Messenger::Peer& peer = messenger_.peers_[noted.peer];
  return peer.lost.empty() || peer.may_live ? "" : noted.description + " is lost: " + peer.lost;
}

std::string Liveness::location(uint64_t global_rank) const {
  const auto it = ranks_.find(global_rank);
  if (it == ranks_.end()) return "";
  const auto is_member = [](const NotedRank& m) { return !m.membership.expired(); };
  const auto last = std::find_if(it->second.rbegin(), it->second.rend(), is_member);
  return last == it->second.rend() ? "" : last->description;
}

std::string Liveness::name_of(PeerId peer, const std::string& otherwise) const {
  for (const auto& [rank, noted] : ranks_) {
    for (const NotedRank& m : noted) {
      if (m.peer == peer) return "global rank " + std::to_string(rank) + " " + m.description;
    }
  }
  return otherwise;
}

}  // namespace nvx::net
