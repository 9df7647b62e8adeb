#pragma once

#include <sys/types.h>

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
#include "memory/shm/unix_socket.h"

namespace nvx {

class Handout;

/// Another process of this host: its arena, mapped here, and a descriptor that reports its end.
class Neighbour {
 public:
  /// `pid`: as the process knows it. `pid_here`: in this process's namespace; 0 if it is not visible here.
  Neighbour(ArenaId id, int memfd, size_t bytes, Fd pidfd, pid_t pid, pid_t pid_here);

  const ArenaId& id() const { return id_; }
  std::byte* at(size_t offset) const { return mapping_.base() + offset; }
  size_t size() const { return mapping_.size(); }
  /// Always false without a pidfd, for a process that is not visible here.
  bool dead() const;
  /// Whether a signal or a debugger has stopped it, according to /proc.
  bool stopped() const;
  /// How it ended, if the kernel still knows.
  Ending ending() const;
  pid_t pid() const { return pid_; }

 private:
  ArenaId id_;
  Mapping mapping_;
  Fd pidfd_;
  const pid_t pid_, pid_here_;
};

/// The memory that this process shares with the others of its host: its own arena and the arenas of the processes it
/// has met. Exists from the first group to the last.
class Neighbours {
 public:
  static std::shared_ptr<Neighbours> here();

  Arena& arena() { return arena_; }
  LeasePool& leases() { return leases_; }
  const Fd& own_pidfd() const { return own_pidfd_; }

  std::shared_ptr<Neighbour> find(const ArenaId& id) EXCLUDES(mutex_);
  std::shared_ptr<Neighbour> adopt(std::shared_ptr<Neighbour> neighbour) EXCLUDES(mutex_);

  /// Notes that this process is that rank of the whole job, as long as the group `standing` exists: a job may renumber
  /// its ranks after a failure.
  void meet(uint64_t global_rank, const std::shared_ptr<Neighbour>& neighbour, std::weak_ptr<void> standing)
      EXCLUDES(mutex_);
  std::shared_ptr<Neighbour> met(uint64_t global_rank) EXCLUDES(mutex_);

  Neighbours();

 private:
  Arena arena_;
  LeasePool leases_;
  Fd own_pidfd_;
  Mutex mutex_;
  std::map<ArenaId, std::weak_ptr<Neighbour>> known_ GUARDED_BY(mutex_);
  struct Met {
    std::weak_ptr<Neighbour> neighbour;
    std::weak_ptr<void> standing;
  };
  std::map<uint64_t, std::vector<Met>> met_ GUARDED_BY(mutex_);  // in the order of their groups
};

/// An abstract Unix socket on which this process passes its memfd and its pidfd to processes of the same user. Open
/// only during the set-up of one group.
class Doorway {
 public:
  struct Wanted {
    ArenaId id;
    std::string door;  ///< the name of that process's doorway
    pid_t pid;
    std::string who{};  ///< describes the process in errors
  };

  explicit Doorway(Neighbours& neighbours);
  const std::string& name() const { return name_; }

  /// From now on, also serves the guests of this handout.
  void hand_out(Handout* handout) { handout_ = handout; }

  /// Fetches the wanted neighbours and serves the requests of others meanwhile. Throws at the deadline.
  std::map<ArenaId, std::shared_ptr<Neighbour>> fetch(const std::vector<Wanted>& wanted, const Deadline& deadline);

  /// Waits at most this long, and serves the requests that come meanwhile.
  void serve(std::chrono::microseconds span);

 private:
  struct Visit {
    Wanted want;
    Fd socket;  // none while the other process's backlog is full
  };

  void answer();
  static bool connect(std::vector<Visit>& open);
  std::shared_ptr<Neighbour> receive(const Visit& visit);
  [[noreturn]] void end_as_late(const std::vector<Visit>& open) const;

  Neighbours& neighbours_;
  std::string name_;
  Fd listener_;
  Handout* handout_ = nullptr;
  Strangers strangers_;
};

}  // namespace nvx
