#include "memory/shm/neighbours.h"

#include <fcntl.h>
#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <span>

#include "base/config.h"
#include "base/error.h"
#include "base/interrupt.h"
#include "base/log.h"
#include "base/per_process.h"
#include "memory/shm/handout.h"
#include "memory/shm/unix_socket.h"

namespace nvx {
namespace {

/// The message that passes through a doorway, with the two descriptors.
struct Introduction {
  static constexpr uint32_t kMagic = 0x4e565832;  // "NVX2"
  uint32_t magic;
  uint32_t has_life;
  ArenaId id;
};

struct Home {
  Mutex mutex;
  std::weak_ptr<Neighbours> neighbours GUARDED_BY(mutex);
};

bool receive_introduction(const LocalSocket& socket, Introduction* introduction, Fd* memfd, Fd* life) {
  Fd fds[2];
  if (!receive_packet(socket, introduction, sizeof *introduction, fds)) return false;
  *memfd = std::move(fds[0]);
  *life = std::move(fds[1]);
  return introduction->magic == Introduction::kMagic && *memfd && sealed_bytes(memfd->get()) >= Arena::kBytes;
}

std::string name_of(const Doorway::Wanted& wanted) {
  return wanted.who.empty() ? "the process " + std::to_string(wanted.pid) + " of this host" : wanted.who;
}

}  // namespace

Neighbour::Neighbour(ArenaId id, int memfd, size_t bytes, ProcessWatch process, pid_t pid)
    : id_(id),
      memfd_(fcntl(memfd, F_DUPFD_CLOEXEC, 0)),
      mapping_(memfd, bytes),
      process_(std::move(process)),
      pid_(pid) {
  if (!memfd_) throw system_error("cannot keep the descriptor of another process's memory");
}

std::shared_ptr<const Mapping> Neighbour::tensors() {
  MutexLock lock(mutex_);
  std::shared_ptr<const Mapping> there = tensors_.lock();
  if (there) return there;
  const size_t bytes = sealed_bytes(memfd_.get());
  there = bytes > Arena::kBytes ? std::make_shared<Mapping>(memfd_.get(), bytes - Arena::kBytes, Arena::kBytes)
                                : std::make_shared<Mapping>();
  tensors_ = there;
  return there;
}

Neighbours::Neighbours() : leases_(arena_, size_t(config().staging_mb) << 20), tensors_(arena_) {}

std::shared_ptr<Neighbours> Neighbours::here() {
  Home& h = of_this_process<Home>();
  MutexLock lock(h.mutex);
  std::shared_ptr<Neighbours> neighbours = h.neighbours.lock();
  if (!neighbours) h.neighbours = neighbours = std::make_shared<Neighbours>();
  return neighbours;
}

std::shared_ptr<Neighbours> Neighbours::opened() {
  Home& h = of_this_process<Home>();
  MutexLock lock(h.mutex);
  return h.neighbours.lock();
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

void Neighbours::meet(uint64_t global_rank, const std::shared_ptr<Neighbour>& neighbour, std::weak_ptr<void> standing,
                      std::function<bool()> has_left_job) {
  MutexLock lock(mutex_);
  std::vector<Met>& met = met_[global_rank];
  std::erase_if(met, [&](const Met& m) {
    return m.standing.expired() || m.neighbour.lock() != neighbour;  // its place has been taken by another process
  });
  met.push_back({neighbour, std::move(standing), std::move(has_left_job)});
}

std::shared_ptr<Neighbour> Neighbours::met(uint64_t global_rank) {
  MutexLock lock(mutex_);
  const auto it = met_.find(global_rank);
  if (it == met_.end()) return nullptr;
  std::erase_if(it->second, [](const Met& m) { return m.standing.expired(); });
  return it->second.empty() ? nullptr : it->second.back().neighbour.lock();
}

bool Neighbours::has_left_job(uint64_t global_rank) {
  MutexLock lock(mutex_);
  const auto it = met_.find(global_rank);
  return it != met_.end() && std::ranges::any_of(it->second, [](const Met& m) {
           const auto standing = m.standing.lock();
           const auto neighbour = m.neighbour.lock();  // keeps the memory that `has_left_job` reads
           return standing && neighbour && m.has_left_job && m.has_left_job();
         });
}

Doorway::Doorway(Neighbours& neighbours)
    : neighbours_(neighbours), name_(fresh_socket_name()), listener_(listen_on(name_)) {}

void Doorway::answer() {
  accept_guests(
      listener_, [this](LocalSocket guest) { guests_.push_back(std::move(guest)); }, &strangers_);
  std::erase_if(guests_, [this](const LocalSocket& guest) { return answer(guest); });
  for (; guests_.size() > kMostSilent; guests_.erase(guests_.begin()))
    (void)answer(guests_.front());  // its packet may have arrived meanwhile
  if (handout_) handout_->serve();
}

/// False if the guest has yet to ask.
bool Doorway::answer(const LocalSocket& guest) {
  if (!receive_packet(guest, nullptr, 0, {})) return errno != EAGAIN;
  const Arena& arena = neighbours_.arena();
  const int fds[] = {arena.fd(), ProcessWatch::own_life(process_at(guest.get()))};
  const bool has_life = fds[1] >= 0;
  const Introduction introduction{Introduction::kMagic, has_life, arena.id()};
  (void)send_packet(guest, &introduction, sizeof introduction, std::span(fds, has_life ? 2 : 1));
  return true;
}

void Doorway::serve(std::chrono::microseconds span) {
  pollfd asks[] = {{listener_.get(), POLLIN, 0}, {handout_ ? handout_->fd() : -1, POLLIN, 0}};
  const timespec time{0, long(span.count()) * 1000};
  if (ppoll(asks, 2, &time, nullptr) >= 1 || !guests_.empty()) answer();
}

std::map<ArenaId, std::shared_ptr<Neighbour>> Doorway::fetch(const std::vector<Wanted>& wanted,
                                                             const Deadline& deadline,
                                                             const std::function<void()>& check_peers) {
  std::map<ArenaId, std::shared_ptr<Neighbour>> got;
  std::vector<Visit> open;
  for (const Wanted& want : wanted) open.push_back({want, {}});
  std::vector<pollfd> polls;
  while (!open.empty()) {
    const bool all_connected = connect(open);
    if (stop_wanted()) throw Error(Code::kInterrupted, "nvx: " + stop_words() + " during set-up");
    if (check_peers) check_peers();
    if (deadline.passed(Clock::now())) end_as_late(open);
    polls.assign({{listener_.get(), POLLIN, 0}, {handout_ ? handout_->fd() : -1, POLLIN, 0}});
    for (const LocalSocket& guest : guests_) polls.push_back({guest.get(), POLLIN, 0});
    const size_t first = polls.size();
    for (const Visit& visit : open) polls.push_back({visit.socket.get(), POLLIN, 0});
    const auto span = all_connected ? std::chrono::milliseconds(100) : kConnectPause;
    if (poll(polls.data(), polls.size(), int(span.count())) < 0 && errno != EINTR) throw system_error("poll failed");
    if (std::any_of(polls.begin(), polls.begin() + ptrdiff_t(first), [](const pollfd& p) { return p.revents != 0; }))
      answer();
    for (size_t i = first; i < polls.size(); ++i) {
      if (polls[i].revents) got[open[i - first].want.id] = receive(open[i - first]);
    }
    std::erase_if(open, [&](const Visit& visit) { return got.contains(visit.want.id); });
  }
  return got;
}

/// Asks for the memory of the others. Whether all are connected now. The backlog of the others is full of connections
/// of another user, or of many processes that came at once.
bool Doorway::connect(std::vector<Visit>& open) {
  bool all = true;
  for (Visit& visit : open) {
    if (visit.socket) continue;
    visit.socket = connect_to(visit.want.door);
    if (!visit.socket && !backlog_is_full()) {
      throw Error(Failure{.code = Code::kPeerDied,
                          .cause = name_of(visit.want) + " cannot be reached over its Unix socket (" +
                                   std::strerror(errno) + "): it has ended, or belongs to another user",
                          .advice = "see its log; run all ranks of a host as one user",
                          .who = visit.want.rank});
    }
    // If the other has closed the connection, receive() notices.
    if (visit.socket && !send_packet(visit.socket, nullptr, 0, {}) && errno == EAGAIN) visit.socket = {};
    all = all && visit.socket;
  }
  return all;
}

std::shared_ptr<Neighbour> Doorway::receive(const Visit& visit) {
  Introduction introduction{};
  Fd memfd, life;
  if (!receive_introduction(visit.socket, &introduction, &memfd, &life) || introduction.id != visit.want.id) {
    throw Error(
        Failure{.code = Code::kPeerDied,
                .cause = name_of(visit.want) + " ended during set-up, or sent something other than its shared memory",
                .advice = "see its log",
                .who = visit.want.rank});
  }
  ProcessWatch process(std::move(life), process_at(visit.socket.get()));
  return neighbours_.adopt(
      std::make_shared<Neighbour>(visit.want.id, memfd.get(), Arena::kBytes, std::move(process), visit.want.pid));
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
              full ? advice + "; check whether another user of this host floods the sockets @nvx-* (ss -xl)" : advice);
}

}  // namespace nvx
