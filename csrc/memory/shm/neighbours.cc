#include "memory/shm/neighbours.h"

#include <poll.h>
#include <signal.h>
#include <sys/ioctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <optional>

#include "base/config.h"
#include "base/error.h"
#include "base/interrupt.h"
#include "base/log.h"
#include "memory/shm/handout.h"

namespace nvx {
namespace {

/// The message that passes through a doorway, with the two descriptors.
struct Introduction {
  static constexpr uint32_t kMagic = 0x4e565831;  // "NVX1"
  uint32_t magic;
  uint32_t has_pidfd;
  ArenaId id;
};

struct Home {
  Mutex mutex;
  std::weak_ptr<Neighbours> neighbours GUARDED_BY(mutex);
};

/// The state of a process and the following fields of its `/proc/<pid>/stat`, such as "S 1 4711 ..."; empty if the
/// process is not visible (0).
std::string stat_of(pid_t pid) {
  if (pid == 0) return "";
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string stat;
  std::getline(file, stat, '\0');  // as an iterator does not, it catches the error of a process that ends meanwhile
  const size_t name_end = stat.rfind(')');
  return name_end == std::string::npos || name_end + 2 >= stat.size() ? "" : stat.substr(name_end + 2);
}

/// A process that its parent has not reaped yet still has its wait status in /proc, as the last field.
std::optional<int> status_of_unreaped(pid_t pid) {
  const std::string stat = stat_of(pid);
  if (!stat.starts_with('Z')) return std::nullopt;
  return std::atoi(stat.c_str() + stat.find_last_of(' ') + 1);
}

/// The kernel's `struct pidfd_info` from 6.15 on, which older headers lack. Through a pidfd it tells how the process
/// ended, even after its parent has reaped it.
struct PidfdInfo {
  static constexpr uint64_t kExit = 1 << 3;
  uint64_t mask = kExit;
  uint64_t cgroup = 0;
  uint32_t ids[11] = {};
  int32_t status = 0;
};
static_assert(sizeof(PidfdInfo) == 64);

std::optional<int> status_of_reaped(int pidfd) {
  PidfdInfo info;
  if (ioctl(pidfd, _IOWR(0xff, 11, PidfdInfo), &info) != 0 || !(info.mask & PidfdInfo::kExit)) return std::nullopt;
  return info.status;
}

std::string name_of(const Doorway::Wanted& wanted) {
  return wanted.who.empty() ? "the process " + std::to_string(wanted.pid) + " of this host" : wanted.who;
}

Fd open_pidfd(pid_t pid) {
#ifdef SYS_pidfd_open
  return Fd(int(syscall(SYS_pidfd_open, pid, 0)));
#else
  (void)pid;
  return Fd();
#endif
}

}  // namespace

Neighbour::Neighbour(ArenaId id, int memfd, size_t bytes, Fd pidfd, pid_t pid, pid_t pid_here)
    : id_(id), mapping_(memfd, bytes), pidfd_(std::move(pidfd)), pid_(pid), pid_here_(pid_here) {
  if (!pidfd_ && pid_here_ == 0) {
    NVX_LOG(kWarn,
            "nvx cannot notice the end of process %d: it is in another pid namespace, and pidfd_open is not available "
            "there. Permit pidfd_open, or run all ranks of a host in one pid namespace",
            int(pid_));
  }
}

bool Neighbour::dead() const {
  // A kernel or a sandbox without pidfds: an unreaped process still has an entry in the process table.
  if (!pidfd_) return pid_here_ != 0 && ((kill(pid_here_, 0) != 0 && errno == ESRCH) || ending().known());
  pollfd ask{pidfd_.get(), POLLIN, 0};
  return poll(&ask, 1, 0) == 1;
}

bool Neighbour::stopped() const {
  const std::string stat = stat_of(pid_here_);
  return stat.starts_with('T') || stat.starts_with('t');
}

Ending Neighbour::ending() const {
  std::optional<int> status = status_of_unreaped(pid_here_);
  if (!status && pidfd_) status = status_of_reaped(pidfd_.get());
  if (!status) return {};
  if (WIFSIGNALED(*status)) return {Ending::How::kKilled, WTERMSIG(*status)};
  return {Ending::How::kExited, WEXITSTATUS(*status)};
}

Neighbours::Neighbours() : leases_(arena_, size_t(config().staging_mb) << 20), own_pidfd_(open_pidfd(getpid())) {}

std::shared_ptr<Neighbours> Neighbours::here() {
  Home& h = of_this_process<Home>();
  MutexLock lock(h.mutex);
  std::shared_ptr<Neighbours> neighbours = h.neighbours.lock();
  if (!neighbours) h.neighbours = neighbours = std::make_shared<Neighbours>();
  return neighbours;
}

std::shared_ptr<Neighbour> Neighbours::find(const ArenaId& id) {
  MutexLock lock(mutex_);
  const auto it = known_.find(id);
  return it == known_.end() ? nullptr : it->second.lock();
}

std::shared_ptr<Neighbour> Neighbours::adopt(std::shared_ptr<Neighbour> neighbour) {
  MutexLock lock(mutex_);
  std::erase_if(known_, [](const auto& entry) { return entry.second.expired(); });
  known_[neighbour->id()] = neighbour;
  return neighbour;
}

void Neighbours::meet(uint64_t global_rank, const std::shared_ptr<Neighbour>& neighbour, std::weak_ptr<void> standing) {
  MutexLock lock(mutex_);
  std::vector<Met>& met = met_[global_rank];
  std::erase_if(met, [&](const Met& m) {
    return m.standing.expired() || m.neighbour.lock() != neighbour;  // its place has been taken by another process
  });
  met.push_back({neighbour, std::move(standing)});
}

std::shared_ptr<Neighbour> Neighbours::met(uint64_t global_rank) {
  MutexLock lock(mutex_);
  const auto it = met_.find(global_rank);
  if (it == met_.end()) return nullptr;
  std::erase_if(it->second, [](const Met& m) { return m.standing.expired(); });
  return it->second.empty() ? nullptr : it->second.back().neighbour.lock();
}

Doorway::Doorway(Neighbours& neighbours)
    : neighbours_(neighbours), name_(fresh_socket_name()), listener_(listen_on(name_)) {}

void Doorway::answer() {
  const Arena& arena = neighbours_.arena();
  const int fds[] = {arena.fd(), neighbours_.own_pidfd().get()};
  const bool has_pidfd = fds[1] >= 0;
  const Introduction introduction{Introduction::kMagic, has_pidfd, arena.id()};
  accept_guests(
      listener_.get(),
      [&](const Fd& guest) {
        (void)send_packet(guest.get(), &introduction, sizeof introduction, std::span(fds, has_pidfd ? 2 : 1));
      },
      &strangers_);
  if (handout_) handout_->serve();
}

void Doorway::serve(std::chrono::microseconds span) {
  pollfd asks[] = {{listener_.get(), POLLIN, 0}, {handout_ ? handout_->fd() : -1, POLLIN, 0}};
  const timespec time{0, long(span.count()) * 1000};
  if (ppoll(asks, 2, &time, nullptr) >= 1) answer();
}

std::map<ArenaId, std::shared_ptr<Neighbour>> Doorway::fetch(const std::vector<Wanted>& wanted,
                                                             const Deadline& deadline) {
  std::map<ArenaId, std::shared_ptr<Neighbour>> got;
  std::vector<Visit> open;
  for (const Wanted& want : wanted) open.push_back({want, {}});
  std::vector<pollfd> polls;
  while (!open.empty()) {
    const bool all_connected = connect(open);
    if (stop_wanted()) throw Error(Code::kInterrupted, "nvx: " + stop_words() + " during set-up");
    if (deadline.passed(Clock::now())) end_as_late(open);
    polls.assign({{listener_.get(), POLLIN, 0}, {handout_ ? handout_->fd() : -1, POLLIN, 0}});
    const size_t first = polls.size();
    for (const Visit& visit : open) polls.push_back({visit.socket.get(), POLLIN, 0});
    const auto span = all_connected ? std::chrono::milliseconds(100) : kConnectPause;
    if (poll(polls.data(), polls.size(), int(span.count())) < 0 && errno != EINTR) throw system_error("poll failed");
    if (polls[0].revents || polls[1].revents) answer();
    for (size_t i = first; i < polls.size(); ++i) {
      if (polls[i].revents) got[open[i - first].want.id] = receive(open[i - first]);
    }
    std::erase_if(open, [&](const Visit& visit) { return got.contains(visit.want.id); });
  }
  return got;
}

/// Whether all are connected now. The backlog of the others is full of connections of another user, or of many
/// processes that came at once.
bool Doorway::connect(std::vector<Visit>& open) {
  bool all = true;
  for (Visit& visit : open) {
    if (visit.socket) continue;
    visit.socket = connect_to(visit.want.door);
    if (!visit.socket && !backlog_is_full()) {
      throw Error(Code::kPeerDied,
                  "nvx: " + name_of(visit.want) + " cannot be reached over its Unix socket (" + std::strerror(errno) +
                      "): it has ended, or belongs to another user",
                  "see its log; run all ranks of a host as one user");
    }
    all = all && visit.socket;
  }
  return all;
}

std::shared_ptr<Neighbour> Doorway::receive(const Visit& visit) {
  Introduction came{};
  Fd fds[2];
  const bool whole = receive_packet(visit.socket.get(), &came, sizeof came, fds);
  auto& [memfd, pidfd] = fds;
  if (!whole || came.magic != Introduction::kMagic || came.id != visit.want.id || !memfd ||
      !is_sealed_memory(memfd.get(), Arena::kBytes)) {
    throw Error(Code::kPeerDied,
                "nvx: " + name_of(visit.want) + " ended during set-up, or sent something other than its shared memory",
                "see its log");
  }
  return neighbours_.adopt(std::make_shared<Neighbour>(visit.want.id, memfd.get(), Arena::kBytes, std::move(pidfd),
                                                       visit.want.pid, listener_of(visit.socket.get())));
}

void Doorway::end_as_late(const std::vector<Visit>& open) const {
  std::string missing;
  bool full = false;
  for (const Visit& visit : open) {
    missing += (missing.empty() ? "" : ", ") + name_of(visit.want);
    if (!visit.socket) missing += " (the backlog of its Unix socket is full" + words_of(strangers_) + ")";
    full = full || !visit.socket;
  }
  const std::string advice =
      "check whether it is stopped or swapped out, and whether the timeout is long enough "
      "(init_process_group(timeout=))";
  throw Error(Code::kTimeout, "nvx: the shared memory of these processes did not arrive in time: " + missing,
              full ? advice + ". Does another user of this host flood the sockets @nvx-* (ss -xl)?" : advice);
}

}  // namespace nvx
