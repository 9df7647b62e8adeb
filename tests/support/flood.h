#pragma once

#include <sys/types.h>

#include <string>
#include <vector>

namespace nvx::test {

/// Another user of this host, who connects without end to every Unix socket of nvx that some processes listen on, so
/// that their backlogs are full. It finds the sockets in /proc/net/unix.
class Flood {
 public:
  static constexpr uid_t kUser = 65534;
  /// Why this process cannot act as another user; nullptr where it can.
  static const char* why_not();

  explicit Flood(std::vector<pid_t> victims);
  ~Flood();
  Flood(const Flood&) = delete;
  Flood& operator=(const Flood&) = delete;

  /// Returns once every socket that some victim listens on has been full: at least this many.
  void await(size_t sockets) const;

 private:
  pid_t child_;
  int reports_;  // the end of a pipe through which the child reports how many were full
};

/// Connects to a listener and leaves, until its backlog is full. As the same user.
void fill_backlog(const std::string& name);

}  // namespace nvx::test
