#pragma once

#include <functional>
#include <list>
#include <string>
#include <thread>

#include "base/handle.h"

namespace nvx {

/// A listener that a thread of its own serves at any time, without a step of the process's: each connection of the same
/// user sends one packet. The thread sleeps while nobody comes.
class ServedDoor {
 public:
  /// Reads the packet, and may answer, on the door's thread. What it throws is logged.
  using Hear = std::function<void(const Fd& guest)>;

  /// Throws Error where it cannot be opened.
  ServedDoor(const std::string& name, Hear hear);
  ~ServedDoor();
  ServedDoor(const ServedDoor&) = delete;
  ServedDoor& operator=(const ServedDoor&) = delete;

 private:
  void serve();
  void let_in();
  void hear(const Fd& guest);

  /// When there are more, those who came first and have not sent anything make room for others.
  static constexpr size_t kMostGuests = 64;

  const Hear hear_;
  Fd listener_;
  Fd end_;  // readable when the thread is to end
  std::list<Fd> guests_;
  std::thread thread_;
};

}  // namespace nvx
