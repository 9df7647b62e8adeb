#pragma once

#include <sys/types.h>

#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "base/failure.h"
#include "base/handle.h"
#include "base/mutex.h"
#include "base/per_process.h"
#include "memory/shm/arena.h"
#include "memory/shm/leases.h"
#include "memory/shm/process_watch.h"
#include "memory/shm/tensor_memory.h"
#include "memory/shm/unix_socket.h"

namespace nvx {

class HostRelay;

/// Another process of this host: its arena, mapped here, and whether it has ended.
class PeerProcess {
 public:
  /// `pid`: as the process sees it.
  PeerProcess(ArenaId id, int memfd, size_t bytes, ProcessWatch process, pid_t pid);

  const ArenaId& id() const { return id_; }
  std::byte* at(size_t offset) const { return mapping_.base() + offset; }
  size_t size() const { return mapping_.size(); }
  /// Its `TensorMemory`, mapped here while it is referenced. Throws Error.
  std::shared_ptr<const Mapping> tensors() EXCLUDES(mutex_);
  const ProcessWatch& process() const { return process_; }
  bool dead() const { return process_.ended(); }
  /// Nothing that the process began, such as a kernel on a GPU, accesses memory any more.
  bool torn_down() const { return process_.torn_down(); }
  bool released() const { return process_.released(); }
  ExitStatus exit_status() const { return process_.exit_status(); }
  pid_t pid() const { return pid_; }

 private:
  ArenaId id_;
  const Fd memfd_;
  Mapping mapping_;
  Mutex mutex_;
  std::weak_ptr<const Mapping> tensors_ GUARDED_BY(mutex_);
  ProcessWatch process_;
  const pid_t pid_;
};

/// The memory that this process shares with the others of its host: its own arena and the arenas of the processes it
/// has noted. Exists from the first group to the last.
class ShmRegistry {
 public:
  static std::shared_ptr<ShmRegistry> instance();
  static std::shared_ptr<ShmRegistry> opened();

  Arena& arena() { return arena_; }
  LeasePool& leases() { return leases_; }
  TensorMemory& tensors() { return tensors_; }

  std::shared_ptr<PeerProcess> find(const ArenaId& id) EXCLUDES(mutex_);
  std::shared_ptr<PeerProcess> adopt(std::shared_ptr<PeerProcess> process) EXCLUDES(mutex_);

  /// Notes that this process is that rank of the whole job, as long as `membership`, of a group, exists: a job may
  /// renumber its ranks after a failure. `has_left_job`, for the group of the whole job: whether the rank has destroyed
  /// it; reads memory of the process.
  void note_rank(uint64_t global_rank, const std::shared_ptr<PeerProcess>& process, std::weak_ptr<void> membership,
                 std::function<bool()> has_left_job = {}) EXCLUDES(mutex_);
  std::shared_ptr<PeerProcess> process_of_rank(uint64_t global_rank) EXCLUDES(mutex_);
  /// Whether the rank has destroyed the group of the whole job, which exists here.
  bool has_left_job(uint64_t global_rank) EXCLUDES(mutex_);

  ShmRegistry();

 private:
  Arena arena_;
  LeasePool leases_;
  TensorMemory tensors_;
  Mutex mutex_;
  std::map<ArenaId, std::weak_ptr<PeerProcess>> known_ GUARDED_BY(mutex_);
  struct NotedRank {
    std::weak_ptr<PeerProcess> process;
    std::weak_ptr<void> membership;
    std::function<bool()> has_left_job;
  };
  std::map<uint64_t, std::vector<NotedRank>> ranks_ GUARDED_BY(mutex_);  // in the order of their groups
};

/// An abstract Unix socket on which this process passes its memfd and its lock file to processes of the same user. Open
/// only during the set-up of one group.
class IpcSocket {
 public:
  struct Wanted {
    ArenaId id;
    std::string socket;  ///< the name of that process's IPC socket
    pid_t pid;
    std::string description{};  ///< describes the process in errors
    int rank = kNoRank;         ///< in its group
  };

  explicit IpcSocket(ShmRegistry& shm);
  const std::string& name() const { return name_; }

  /// From now on, also serves the clients of this relay.
  void serve_with(HostRelay* relay) { relay_ = relay; }

  /// Fetches the memory of the wanted processes and serves the requests of others meanwhile. Throws at the deadline.
  /// `check_peers`: called repeatedly; throws if the wait has become pointless.
  std::map<ArenaId, std::shared_ptr<PeerProcess>> fetch(const std::vector<Wanted>& wanted, const Deadline& deadline,
                                                        const std::function<void()>& check_peers = {});

  /// Waits at most this long, and serves the requests that come meanwhile.
  void serve(std::chrono::microseconds span);

  /// Whether requests have arrived that could not be answered yet: `kTooManyInFlight`.
  bool has_unanswered() const;

 private:
  struct Client {
    LocalSocket socket;
    bool asked = false;  // its request has arrived
  };
  struct Connection {
    Wanted wanted;
    LocalSocket socket;  // none while the other process's backlog is full
  };

  void answer();
  bool answer(Client& client);
  static bool connect(std::vector<Connection>& open);
  std::shared_ptr<PeerProcess> receive(const Connection& connection);
  [[noreturn]] void throw_timeout(const std::vector<Connection>& open) const;

  ShmRegistry& shm_;
  std::string name_;
  LocalSocket listener_;
  std::vector<Client> clients_;  // that have yet to send a request, or to get the answer
  HostRelay* relay_ = nullptr;
  RejectedClients rejected_;
};

}  // namespace nvx
