#include "memory/shm/shm_registry.h"

#include <fcntl.h>
#include <poll.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <span>

#include "base/config.h"
#include "base/error.h"
#include "base/interrupt.h"
#include "base/per_process.h"
#include "memory/shm/host_relay.h"
#include "memory/shm/unix_socket.h"

namespace nvx {
namespace {

/// The message that passes through an IPC socket, with the two descriptors.
struct SegmentInfo {
  static constexpr uint32_t kMagic = 0x4e565832;  // "NVX2"
  uint32_t magic;
  uint32_t reserved;
  ArenaId id;
};

struct Home {
  Mutex mutex;
  std::weak_ptr<ShmRegistry> shm GUARDED_BY(mutex);
};

bool receive_segment(const LocalSocket& socket, SegmentInfo* segment, Fd* memfd, Fd* lock_file) {
  Fd fds[2];
  if (!receive_packet(socket, segment, sizeof *segment, fds)) return false;
  *memfd = std::move(fds[0]);
  *lock_file = std::move(fds[1]);
  return segment->magic == SegmentInfo::kMagic && *memfd && sealed_bytes(memfd->get()) >= Arena::kBytes;
}

std::string name_of(const IpcSocket::Wanted& wanted) {
  return wanted.description.empty() ? "the process " + std::to_string(wanted.pid) + " of this host"
                                    : wanted.description;
}

}  // namespace

PeerProcess::PeerProcess(ArenaId id, int memfd, size_t bytes, ProcessWatch process, pid_t pid)
    : id_(id),
      memfd_(fcntl(memfd, F_DUPFD_CLOEXEC, 0)),
      mapping_(memfd, bytes),
      process_(std::move(process)),
      pid_(pid) {
  if (!memfd_) throw system_error("cannot keep the descriptor of another process's memory");
}

std::shared_ptr<const Mapping> PeerProcess::tensors() {
  MutexLock lock(mutex_);
  std::shared_ptr<const Mapping> there = tensors_.lock();
  if (there) return there;
  const size_t bytes = sealed_bytes(memfd_.get());
  there = bytes > Arena::kBytes ? std::make_shared<Mapping>(memfd_.get(), bytes - Arena::kBytes, Arena::kBytes)
                                : std::make_shared<Mapping>();
  tensors_ = there;
  return there;
}

ShmRegistry::ShmRegistry() : leases_(arena_, size_t(config().staging_mb) << 20), tensors_(arena_) {}

std::shared_ptr<ShmRegistry> ShmRegistry::instance() {
  Home& h = of_this_process<Home>();
  MutexLock lock(h.mutex);
  std::shared_ptr<ShmRegistry> shm = h.shm.lock();
  if (!shm) h.shm = shm = std::make_shared<ShmRegistry>();
  return shm;
}

std::shared_ptr<ShmRegistry> ShmRegistry::opened() {
  Home& h = of_this_process<Home>();
  MutexLock lock(h.mutex);
  return h.shm.lock();
}

std::shared_ptr<PeerProcess> ShmRegistry::find(const ArenaId& id) {
  MutexLock lock(mutex_);
  const auto it = known_.find(id);
  return it == known_.end() ? nullptr : it->second.lock();
}

std::shared_ptr<PeerProcess> ShmRegistry::adopt(std::shared_ptr<PeerProcess> process) {
  MutexLock lock(mutex_);
  std::erase_if(known_, [](const auto& entry) { return entry.second.expired(); });
  if (auto known = known_[process->id()].lock()) return known;  // another thread's group has just mapped it, too
  known_[process->id()] = process;
  return process;
}

void ShmRegistry::note_rank(uint64_t global_rank, const std::shared_ptr<PeerProcess>& process,
                            std::weak_ptr<void> membership, std::function<bool()> has_left_job) {
  MutexLock lock(mutex_);
  std::vector<NotedRank>& noted = ranks_[global_rank];
  std::erase_if(noted, [&](const NotedRank& m) {
    return m.membership.expired() || m.process.lock() != process;  // its place has been taken by another process
  });
  noted.push_back({process, std::move(membership), std::move(has_left_job)});
}

std::shared_ptr<PeerProcess> ShmRegistry::process_of_rank(uint64_t global_rank) {
  MutexLock lock(mutex_);
  const auto it = ranks_.find(global_rank);
  if (it == ranks_.end()) return nullptr;
  std::erase_if(it->second, [](const NotedRank& m) { return m.membership.expired(); });
  return it->second.empty() ? nullptr : it->second.back().process.lock();
}

bool ShmRegistry::has_left_job(uint64_t global_rank) {
  MutexLock lock(mutex_);
  const auto it = ranks_.find(global_rank);
  return it != ranks_.end() && std::ranges::any_of(it->second, [](const NotedRank& m) {
           const auto membership = m.membership.lock();
           const auto process = m.process.lock();  // keeps the memory that `has_left_job` reads
           return membership && process && m.has_left_job && m.has_left_job();
         });
}

IpcSocket::IpcSocket(ShmRegistry& shm) : shm_(shm), name_(unique_socket_name()), listener_(listen_on(name_)) {}

void IpcSocket::answer() {
  accept_clients(
      listener_, [this](LocalSocket client) { clients_.push_back({std::move(client)}); }, &rejected_);
  std::erase_if(clients_, [this](Client& client) { return answer(client); });
  ptrdiff_t excess = std::ranges::count(clients_, false, &Client::asked) - kMostSilent;
  // The packet of a silent client may have arrived meanwhile.
  if (excess > 0) {
    std::erase_if(clients_,
                  [&](Client& client) { return !client.asked && excess-- > 0 && (answer(client) || !client.asked); });
  }
  if (relay_) relay_->serve();
}

/// False if the client has yet to send its request, or there is no room for the answer now.
bool IpcSocket::answer(Client& client) {
  if (!client.asked && !receive_packet(client.socket, nullptr, 0, {})) return errno != EAGAIN;
  client.asked = true;
  const Arena& arena = shm_.arena();
  const int fds[] = {arena.fd(), ProcessWatch::own_lock_file(peer_pid(client.socket.get()))};
  const bool has_lock_file = fds[1] >= 0;
  const SegmentInfo segment{SegmentInfo::kMagic, 0, arena.id()};
  return send_packet(client.socket, &segment, sizeof segment, std::span(fds, has_lock_file ? 2 : 1)) || errno != EAGAIN;
}

bool IpcSocket::has_unanswered() const { return std::ranges::find(clients_, true, &Client::asked) != clients_.end(); }

void IpcSocket::serve(std::chrono::microseconds span) {
  pollfd fds[] = {{listener_.get(), POLLIN, 0}, {relay_ ? relay_->fd() : -1, POLLIN, 0}};
  const timespec time{0, long(span.count()) * 1000};
  if (ppoll(fds, 2, &time, nullptr) >= 1 || !clients_.empty()) answer();
}

std::map<ArenaId, std::shared_ptr<PeerProcess>> IpcSocket::fetch(const std::vector<Wanted>& wanted,
                                                                 const Deadline& deadline,
                                                                 const std::function<void()>& check_peers) {
  std::map<ArenaId, std::shared_ptr<PeerProcess>> got;
  std::vector<Connection> open;
  for (const Wanted& want : wanted) open.push_back({want, {}});
  std::vector<pollfd> polls;
  while (!open.empty()) {
    const bool all_connected = connect(open);
    if (stop_requested()) throw Error(Code::kInterrupted, "nvx: " + interrupt_text() + " during set-up");
    if (check_peers) check_peers();
    if (deadline.passed(Clock::now())) throw_timeout(open);
    polls.assign({{listener_.get(), POLLIN, 0}, {relay_ ? relay_->fd() : -1, POLLIN, 0}});
    for (const Client& client : clients_) polls.push_back({client.socket.get(), POLLIN, 0});
    const size_t first = polls.size();
    for (const Connection& connection : open) polls.push_back({connection.socket.get(), POLLIN, 0});
    const auto span = all_connected && !has_unanswered() ? std::chrono::milliseconds(100) : kConnectPause;
    if (poll(polls.data(), polls.size(), int(span.count())) < 0 && errno != EINTR) throw system_error("poll failed");
    for (size_t i = first; i < polls.size(); ++i) {  // first, as it makes room for the descriptors of answers
      if (polls[i].revents) got[open[i - first].wanted.id] = receive(open[i - first]);
    }
    std::erase_if(open, [&](const Connection& connection) { return got.contains(connection.wanted.id); });
    const auto requests = std::span(polls).first(first);
    if (has_unanswered() || std::ranges::any_of(requests, [](const pollfd& p) { return p.revents != 0; })) answer();
  }
  return got;
}

/// Requests the memory of the others; returns whether all are connected now. A backlog may be full of connections of
/// another user, or of many processes that arrived at once.
bool IpcSocket::connect(std::vector<Connection>& open) {
  bool all = true;
  for (Connection& connection : open) {
    if (connection.socket) continue;
    connection.socket = connect_to(connection.wanted.socket);
    if (!connection.socket && !backlog_is_full()) {
      throw Error(Failure{.code = Code::kPeerDied,
                          .cause = name_of(connection.wanted) + " cannot be reached over its Unix socket (" +
                                   std::strerror(errno) + "): it has ended, or belongs to another user",
                          .advice = "see its log; run all ranks of a host as one user, or give each container an "
                                    "NVX_HOST_ID of its own",
                          .lost_rank = connection.wanted.rank});
    }
    // If the other has closed the connection, receive() notices.
    if (connection.socket && !send_packet(connection.socket, nullptr, 0, {}) && errno == EAGAIN) connection.socket = {};
    all = all && connection.socket;
  }
  return all;
}

std::shared_ptr<PeerProcess> IpcSocket::receive(const Connection& connection) {
  SegmentInfo segment{};
  Fd memfd, lock_file;
  if (!receive_segment(connection.socket, &segment, &memfd, &lock_file) || segment.id != connection.wanted.id) {
    throw Error(Failure{
        .code = Code::kPeerDied,
        .cause = name_of(connection.wanted) + " ended during set-up, or sent something other than its shared memory",
        .advice = "see its log",
        .lost_rank = connection.wanted.rank});
  }
  ProcessWatch process(std::move(lock_file), peer_pid(connection.socket.get()));
  return shm_.adopt(std::make_shared<PeerProcess>(connection.wanted.id, memfd.get(), Arena::kBytes, std::move(process),
                                                  connection.wanted.pid));
}

void IpcSocket::throw_timeout(const std::vector<Connection>& open) const {
  std::string missing;
  bool full = false;
  for (const Connection& connection : open) {
    missing += (missing.empty() ? "" : ", ") + name_of(connection.wanted);
    if (!connection.socket) missing += " (the backlog of its Unix socket is full" + describe(rejected_) + ")";
    full = full || !connection.socket;
  }
  std::string cause = "nvx: the shared memory of these processes did not arrive in time: " + missing;
  if (has_unanswered())
    throw Error(Code::kTimeout, cause + "; nor could this process send its own: " + kTooManyInFlight, kRaiseLimit);
  const std::string advice =
      "check whether it is stopped or swapped out, and whether the timeout is long enough "
      "(init_process_group(timeout=))";
  throw Error(Code::kTimeout, cause,
              full ? advice + "; check whether another user of this host floods the sockets @nvx-* (ss -xl)" : advice);
}

}  // namespace nvx
