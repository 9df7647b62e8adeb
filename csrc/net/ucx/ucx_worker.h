#pragma once

#include <chrono>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "net/host_address.h"
#include "net/ucx/ucx_library.h"
#include "net/ucx/ucx_listeners.h"

namespace nvx::net {

/// One context of UCX with one worker, set up for links between hosts: active messages, no shared memory, and what the
/// user has not set himself in the environment (UCX_*, NVX_UCX_*) chosen so that a silent host is noticed and a link
/// that is down for some seconds is not. Throws Error.
class UcxWorker {
 public:
  /// met_at: the host at which the ranks met, where that is known: the way to it is a way to the others.
  explicit UcxWorker(const std::string& met_at);
  ~UcxWorker() { close(); }
  /// From here on UCX neither reads nor writes anything of its user's. In a forked child nothing happens: connections
  /// are the parent's, and must not end with this process.
  void close();
  /// False in a forked child.
  bool mine() const;
  UcxWorker(const UcxWorker&) = delete;
  UcxWorker& operator=(const UcxWorker&) = delete;

  const UcxLibrary& ucx() const { return ucx_; }
  ucp_worker_h get() const { return worker_; }
  /// Readable when an armed worker has something to do.
  int fd() const { return fd_; }
  const std::vector<std::byte>& address() const { return address_; }
  /// Some transport is more than TCP: large messages are then best fetched.
  bool has_rdma() const { return has_rdma_; }
  const std::string& describe() const { return description_; }
  /// Where others reach this worker; empty where TCP is not the only way.
  const std::vector<HostAddress>& reached_at() const { return reached_at_; }

  /// Where others connect to this worker over TCP.
  UcxListeners& listeners() { return listeners_; }

  /// Takes over an endpoint, to close it when ready_to_close() is called for it, or after this span.
  void retire(ucp_ep_h endpoint, std::chrono::milliseconds patience);
  void ready_to_close(ucp_ep_h endpoint);
  /// Goes on with closing; to be called between calls of progress. True when nothing is left to close.
  bool bury();
  /// The connections that there are by now are not inherited by programs that this process starts.
  void keep_sockets_to_itself() const;
  /// Closes connections and listeners in a child just forked. Otherwise peers would take the parent for alive, and
  /// connect to its ports, as long as the child lives.
  void close_in_child() const;
  /// From now on, no closing endpoint is waited for longer than this.
  void hurry(std::chrono::milliseconds patience);

 private:
  struct Closing {
    ucp_ep_h endpoint;
    Clock::time_point force_at;
    bool ready = false;
    void* flushing = nullptr;
    void* closing = nullptr;
  };
  void make_context(const std::string& met_at);
  void make_worker();
  void take_address();
  void look_around();
  bool bury(Closing& closing);
  void require(ucs_status_t status, const char* what) const;

  const uint32_t generation_;
  const UcxLibrary& ucx_;
  ucp_context_h context_ = nullptr;
  ucp_worker_h worker_ = nullptr;
  int fd_ = -1;
  std::vector<std::byte> address_;
  bool has_rdma_ = false;
  std::string description_;
  std::vector<HostAddress> reached_at_;
  std::vector<Closing> closing_;
  UcxListeners listeners_;
};

}  // namespace nvx::net
