#pragma once

#include <sys/types.h>

#include <atomic>
#include <string>

#include "base/deadline.h"
#include "base/failure.h"
#include "base/handle.h"

namespace nvx {

/// The state of a process and the following fields of its `/proc/<pid>/stat`, such as "S 1 4711 ..."; empty if the
/// process is not visible (0).
std::string stat_of(pid_t pid);

/// Another process of this host, watched through the kernel.
///
/// Every process locks a file of its own and passes the file to the processes that watch it. The kernel releases the
/// lock when the process ends, and when it calls exec(). A forked child does not inherit the lock. So no pid is
/// compared, which may belong to another process by then, or in another pid namespace.
class ProcessWatch {
 public:
  /// Nothing is known of the process: it never ends.
  ProcessWatch() = default;
  /// `lock_file`: from the process, if it could lock one. `pid`: in this process's namespace; 0 if it is not visible
  /// here.
  ProcessWatch(Fd lock_file, pid_t pid);
  ProcessWatch(ProcessWatch&& other) noexcept : ProcessWatch() { *this = std::move(other); }
  ProcessWatch& operator=(ProcessWatch&& other) noexcept;

  /// The lock file of this process, to send to that one; -1 if there is none. A process sends none to itself: the lock
  /// goes with the first descriptor of the file that the process closes.
  static int own_lock_file(pid_t to);

  /// Whether it has ended, or runs another program. Also, once `state_change()` has seen it, whether a signal has ended
  /// it and the kernel has yet to write its core or to free its memory, which may take seconds.
  bool ended() const;
  /// Whether the kernel has closed its files. No thread of it writes to memory any more; its GPUs may.
  bool released() const;
  /// Whether the kernel has finished with it, its kernels on GPUs too. False for one that runs another program.
  bool torn_down() const;
  /// How it ended, if the kernel still has it. The kernel has it a moment after `ended()`, for which this waits.
  ExitStatus exit_status() const;
  /// Why it does not run, according to /proc and its cgroup: "stopped by a signal (state T)". Empty if it runs, or is
  /// not visible.
  std::string state() const;
  /// For waiters, which call it as often as they like, and then `ended()`: a text, once, when the process has had a
  /// `state()` for half a second, and when it runs again; otherwise empty.
  std::string state_change() const;

 private:
  std::string state_in(const std::string& stat) const;

  Fd lock_file_, pidfd_;
  pid_t pid_ = 0;
  mutable std::atomic<bool> signaled_{false};  // a signal has ended it
  mutable std::atomic<Clock::duration::rep> next_check_{0};
  mutable std::atomic<int> checks_{0};  // in a row that found a state()
};

}  // namespace nvx
