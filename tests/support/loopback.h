#pragma once

#include <memory>
#include <string>

#include "net/link.h"

namespace nvx::net {

/// Faults on the way from one link to another. Shares of messages are between 0 and 1. Every link may delay and reorder
/// messages; duplicates, truncated and lost messages break the contract, as a hostile peer might.
struct Faults {
  int most_delay = 0;                    ///< calls of the receiver's progress() that a message is late, at most
  std::chrono::microseconds latency{0};  ///< time that every message takes at least
  size_t bytes_per_progress = 0;         ///< how much one progress() takes in, leaving the rest for later; 0: all of it
  double reorder = 0;                    ///< messages that overtake all that wait already
  double duplicate = 0;
  double truncate = 0;
  double lose = 0;
  double corrupt = 0;      ///< bodies of device memory of which one byte changes
  double unwritten = 0;    ///< bodies of device memory that arrive without being written
  uint64_t cut_after = 0;  ///< messages after which the two lose each other; 0: never
};

/// A network inside one process, for tests and simulations: each link reaches every other one, as unreliably as wanted.
/// The seed alone determines what happens to every message, if one thread uses all of the links.
class LoopbackNet {
 public:
  struct Options {
    uint64_t seed = 1;
    Faults faults;  ///< of every direction, until set otherwise
    size_t segment_bytes = 64 << 10;
    size_t place_above = 64 << 10;  ///< longer bodies are fetched by the receiver, from the post, with place()
    std::string no_device_memory = "a loopback net moves host memory alone";  ///< empty: it moves device memory too
    std::chrono::microseconds device_latency{0};                              ///< of messages of device memory, beside
  };

  LoopbackNet();
  explicit LoopbackNet(const Options& options);
  ~LoopbackNet();
  LoopbackNet(const LoopbackNet&) = delete;
  LoopbackNet& operator=(const LoopbackNet&) = delete;

  /// A new end of the network. The net must outlive it.
  std::unique_ptr<Link> open();

  /// Links are numbered here in the order in which they were opened.
  void set_faults(int from, int to, const Faults& faults);
  /// As if the way between two had broken: they lose each other, and what was on its way is gone.
  void cut(int a, int b);
  /// As if its process had been killed: all others lose it, and it moves nothing any more.
  void kill(int link);

  struct Counts {
    uint64_t posted = 0, delivered = 0, bytes = 0, lost = 0, duplicated = 0, truncated = 0;
    uint64_t device_bytes = 0;  ///< moved from device memory to device memory
    uint64_t host_copies = 0;   ///< messages that were in device memory at one end only
  };
  Counts counts() const;

 private:
  class EndLink;
  class Shared;
  std::unique_ptr<Shared> shared_;
};

}  // namespace nvx::net
