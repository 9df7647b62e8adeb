#include "memory/shm/process_watch.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <optional>
#include <sstream>
#include <string>
#include <thread>

#include "base/mutex.h"
#include "base/per_process.h"

namespace nvx {
namespace {

struct OwnLockFile {
  Mutex mutex;
  Fd file GUARDED_BY(mutex);
};

struct flock whole_file() {
  struct flock lock {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  return lock;
}

/// Whether /proc shows this process's pid namespace: in another one, the same numbers are other processes.
bool proc_is_of_this_namespace() {
  char own[16] = {};
  return readlink("/proc/self", own, sizeof own - 1) > 0 && std::to_string(getpid()) == own;
}

/// The wait status, the last field: of an unreaped process, and from Linux 5.17 on already of one that is ending.
int status_in(const std::string& stat) { return std::atoi(stat.c_str() + stat.find_last_of(' ') + 1); }

std::optional<int> status_of_unreaped(pid_t pid) {
  const std::string stat = stat_of(pid);
  return stat.starts_with('Z') ? std::optional(status_in(stat)) : std::nullopt;
}

/// The kernel's flags of the main thread.
constexpr unsigned kExiting = 0x4;     // PF_EXITING
constexpr unsigned kSignaled = 0x400;  // PF_SIGNALED: by a signal that ends all threads
std::optional<unsigned> flags_in(const std::string& stat) {
  std::istringstream fields(stat);
  std::string skipped;
  unsigned flags = 0;
  for (int field = 0; field < 6; ++field) fields >> skipped;
  return fields >> flags ? std::optional(flags) : std::nullopt;
}

bool runs_on(pid_t pid) {
  const auto flags = flags_in(stat_of(pid));
  return flags && (*flags & (kExiting | kSignaled)) == 0;
}

bool holds(const std::string& file, const std::string& text) {
  std::ifstream stream(file);
  return std::string(std::istreambuf_iterator<char>(stream), {}).find(text) != std::string::npos;
}

/// Whether the freezer of its cgroup holds the process, as `docker pause` does: version 2, where systemd mounts it, or
/// version 1. The state in /proc is S or R under version 2, and D under version 1.
bool is_frozen(pid_t pid) {
  static const bool beside = access("/sys/fs/cgroup/unified", F_OK) == 0;  // version 2 beside version 1
  const std::string root = "/sys/fs/cgroup", second = beside ? root + "/unified" : root;
  std::ifstream cgroups("/proc/" + std::to_string(pid) + "/cgroup");  // "0::/path", and "6:freezer:/path"
  for (std::string line; std::getline(cgroups, line);) {
    const std::string path = line.substr(std::min(line.find('/'), line.size()));
    if (line.starts_with("0::") && holds(second + path + "/cgroup.events", "frozen 1")) return true;
    if (line.find(":freezer:") != std::string::npos && holds(root + "/freezer" + path + "/freezer.state", "FROZEN"))
      return true;
  }
  return false;
}

/// The kernel's `struct pidfd_info` from 6.15 on, which older headers lack. Through a pidfd it shows how the process
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

Fd open_pidfd(pid_t pid) {
#ifdef SYS_pidfd_open
  if (pid != 0) return Fd(int(syscall(SYS_pidfd_open, pid, 0)));
#endif
  return Fd();
}

/// Whether all threads of the process have ended. Without a pidfd, the main thread counts.
bool all_threads_ended(int pidfd, pid_t pid, std::chrono::milliseconds span) {
  if (pidfd >= 0) {
    pollfd readable{pidfd, POLLIN, 0};
    return poll(&readable, 1, int(span.count())) == 1;
  }
  const auto end = Clock::now() + span;
  while (!status_of_unreaped(pid)) {
    if (Clock::now() >= end) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

}  // namespace

std::string stat_of(pid_t pid) {
  if (pid == 0 || !proc_is_of_this_namespace()) return "";
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string stat;
  std::getline(file, stat);  // fails without an exception if the process is reaped meanwhile
  const size_t name_end = stat.rfind(')');
  return name_end == std::string::npos || name_end + 2 >= stat.size() ? "" : stat.substr(name_end + 2);
}

int ProcessWatch::own_lock_file(pid_t to) {
  if (to == getpid()) return -1;
  OwnLockFile& own = of_this_process<OwnLockFile>();
  MutexLock lock(own.mutex);
  if (own.file) return own.file.get();
  Fd file(memfd_create("nvx-lock", MFD_CLOEXEC));
  struct flock whole = whole_file();
  if (file && fcntl(file.get(), F_SETLK, &whole) == 0) own.file = std::move(file);
  return own.file.get();
}

ProcessWatch::ProcessWatch(Fd lock_file, pid_t pid)
    : lock_file_(std::move(lock_file)), pidfd_(open_pidfd(pid)), pid_(pid) {}

ProcessWatch& ProcessWatch::operator=(ProcessWatch&& other) noexcept {
  lock_file_ = std::move(other.lock_file_);
  pidfd_ = std::move(other.pidfd_);
  pid_ = other.pid_;
  signaled_ = other.signaled_.load();
  return *this;
}

bool ProcessWatch::ended() const { return signaled_.load(std::memory_order_relaxed) || released(); }

bool ProcessWatch::released() const {
  if (!lock_file_) return pidfd_ && all_threads_ended(pidfd_.get(), pid_, std::chrono::milliseconds(0));
  struct flock held = whole_file();
  return fcntl(lock_file_.get(), F_GETLK, &held) == 0 && held.l_type == F_UNLCK;
}

bool ProcessWatch::torn_down() const {
  return released() && (!pidfd_ || all_threads_ended(pidfd_.get(), pid_, std::chrono::milliseconds(0)));
}

ExitStatus ProcessWatch::exit_status() const {
  constexpr std::chrono::milliseconds kExitDelay{50};  // between the end of its files and its own
  if (pid_ == 0 || !ended()) return {};
  if (!all_threads_ended(pidfd_.get(), pid_, kExitDelay)) {
    const int signal = signaled_.load(std::memory_order_relaxed) ? WTERMSIG(status_in(stat_of(pid_))) : 0;
    if (signal != 0) return {ExitStatus::How::kKilled, signal};
    return {pidfd_ && runs_on(pid_) ? ExitStatus::How::kReplaced : ExitStatus::How::kUnknown};
  }
  std::optional<int> status = status_of_unreaped(pid_);
  if (!status && pidfd_) status = status_of_reaped(pidfd_.get());
  if (!status) return {};
  if (WIFSIGNALED(*status)) return {ExitStatus::How::kKilled, WTERMSIG(*status)};
  return {ExitStatus::How::kExited, WEXITSTATUS(*status)};
}

std::string ProcessWatch::state() const { return state_in(stat_of(pid_)); }

std::string ProcessWatch::state_in(const std::string& stat) const {
  if (stat.starts_with('T')) return "stopped by a signal (state T)";
  if (stat.starts_with('t')) return "stopped by a debugger (state t)";
  if (stat.starts_with('Z'))
    return ended() ? "" : "without its main thread, which has ended while others run (state Z)";
  return !stat.empty() && is_frozen(pid_) ? "stopped by the freezer of its cgroup" : "";
}

std::string ProcessWatch::state_change() const {
  constexpr std::chrono::milliseconds kInterval{250};
  constexpr int kChecks = 3;
  const auto now = Clock::now().time_since_epoch().count();
  auto next = next_check_.load(std::memory_order_relaxed);
  if (now < next || !next_check_.compare_exchange_strong(next, now + Clock::duration(kInterval).count())) return "";
  const std::string stat = stat_of(pid_);
  if (flags_in(stat).value_or(0) & kSignaled) signaled_.store(true, std::memory_order_relaxed);
  const std::string found = state_in(stat);
  const int checks = found.empty() ? checks_.exchange(0) : ++checks_;
  if (found.empty()) return checks >= kChecks ? "runs again" : "";
  return checks == kChecks ? "is " + found : "";
}

}  // namespace nvx
