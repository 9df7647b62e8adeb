#include "gpu/hub.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>

#include "base/error.h"

namespace nvx::gpu {
namespace {

enum Kind : uint32_t { kGather = 1, kKill, kText };

struct Header {
  uint32_t kind;
  uint32_t member;
  uint32_t bytes;
};
constexpr uint32_t kMost = 1 << 20;
constexpr std::chrono::milliseconds kSilence{90'000};  // after which a member gives up on the hub

bool send_all(int fd, const void* data, size_t bytes) {
  const auto* at = static_cast<const char*>(data);
  while (bytes != 0) {
    const ssize_t n = ::send(fd, at, bytes, MSG_NOSIGNAL);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    at += n, bytes -= size_t(n);
  }
  return true;
}

bool receive_all(int fd, void* data, size_t bytes) {
  auto* at = static_cast<char*>(data);
  while (bytes != 0) {
    pollfd one{fd, POLLIN, 0};
    const int ready = ::poll(&one, 1, int(kSilence.count()));
    if (ready < 0 && errno == EINTR) continue;
    if (ready <= 0) return false;
    const ssize_t n = ::recv(fd, at, bytes, 0);
    if (n < 0 && errno == EINTR) continue;
    if (n <= 0) return false;
    at += n, bytes -= size_t(n);
  }
  return true;
}

bool send_frame(int fd, uint32_t kind, uint32_t member, const void* data, size_t bytes) {
  const Header header{kind, member, uint32_t(bytes)};
  return send_all(fd, &header, sizeof header) && send_all(fd, data, bytes);
}

bool receive_frame(int fd, Header* header, std::vector<std::byte>* what) {
  if (!receive_all(fd, header, sizeof *header) || header->bytes > kMost) return false;
  what->resize(header->bytes);
  return receive_all(fd, what->data(), what->size());
}

}  // namespace

std::vector<Contribution> Member::gather(uint32_t kind, std::span<const std::byte> mine) {
  const auto lost = [&] { return Error(Code::kPeerDied, "nvx: rank " + std::to_string(number_) + " lost the hub"); };
  if (!send_frame(fd_.get(), kind, number_, mine.data(), mine.size())) throw lost();
  Header header{};
  std::vector<std::byte> count;
  if (!receive_frame(fd_.get(), &header, &count)) throw lost();
  std::vector<Contribution> all(header.member);  // the header of the first frame holds the number of frames
  for (Contribution& contribution : all) {
    if (!receive_frame(fd_.get(), &header, &contribution.what)) throw lost();
    contribution.member = header.member;
  }
  return all;
}

std::vector<std::vector<std::byte>> Member::all_gather(std::span<const std::byte> mine) {
  std::vector<std::vector<std::byte>> all;
  for (Contribution& contribution : gather(kGather, mine)) all.push_back(std::move(contribution.what));
  if (all.size() != members_) throw Error(Code::kPeerDied, "nvx: a rank has gone too early");
  return all;
}

void Member::await_killing() { members_ = uint32_t(gather(kKill, {}).size()); }

void Member::send(const std::string& text) {
  if (!send_frame(fd_.get(), kText, number_, text.data(), text.size()))
    throw Error(Code::kPeerDied, "nvx: the parent process has closed the connection");
}

Hub::Hub(uint32_t members) : pending_(members) {
  for (uint32_t m = 0; m < members; ++m) {
    int ends[2];
    if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) throw system_error("socketpair failed");
    near_.emplace_back(ends[0]);
    far_.emplace_back(ends[1]);
  }
}

void Hub::read_from(uint32_t member, const Rules& rules) {
  Header header{};
  std::vector<std::byte> what;
  if (!receive_frame(near_[member].get(), &header, &what)) {
    near_[member].reset();
  } else if (header.kind == kText) {
    rules.receive(member, {reinterpret_cast<const char*>(what.data()), what.size()});
  } else {
    pending_[member] = Pending{header.kind, std::move(what)};
  }
}

/// Sends all members that remain the contributions of all. Members that have ended are left out, so the others notice.
void Hub::answer_if_all_arrived(const Rules& rules) {
  std::vector<uint32_t> there;
  for (uint32_t m = 0; m < near_.size(); ++m) {
    if (near_[m]) there.push_back(m);
    if (near_[m] && !pending_[m]) return;
  }
  const bool kills = std::any_of(there.begin(), there.end(), [&](uint32_t m) { return pending_[m]->kind == kKill; });
  if (kills && near_[rules.victim]) {
    rules.kill();
    near_[rules.victim].reset();
    std::erase(there, rules.victim);
  }
  for (const uint32_t to : there) {
    bool well = send_frame(near_[to].get(), kGather, uint32_t(there.size()), nullptr, 0);
    for (const uint32_t m : there) {
      well = well && send_frame(near_[to].get(), kGather, m, pending_[m]->what.data(), pending_[m]->what.size());
    }
    if (!well) near_[to].reset();
  }
  for (auto& contribution : pending_) contribution.reset();
}

bool Hub::serve(const Rules& rules, const Deadline& deadline) {
  for (;;) {
    std::vector<pollfd> wanted;
    std::vector<uint32_t> members;
    for (uint32_t m = 0; m < near_.size(); ++m) {
      if (!near_[m]) continue;
      wanted.push_back({near_[m].get(), short(pending_[m] ? 0 : POLLIN), 0});
      members.push_back(m);
    }
    if (wanted.empty()) return true;
    if (deadline.passed(Clock::now())) return false;
    if (::poll(wanted.data(), wanted.size(), 50) <= 0) continue;
    for (size_t i = 0; i < wanted.size(); ++i) {
      if (wanted[i].revents & POLLIN) {
        read_from(members[i], rules);
      } else if (wanted[i].revents & (POLLHUP | POLLERR)) {
        near_[members[i]].reset();
      }
    }
    answer_if_all_arrived(rules);
  }
}

}  // namespace nvx::gpu
