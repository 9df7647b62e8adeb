#pragma once

#include <chrono>
#include <span>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "net/host_address.h"
#include "net/ucx/ucx_library.h"
#include "net/ucx/ucx_listeners.h"

namespace nvx::net {

/// One context of UCX with one worker, for links between hosts: active messages, no shared memory. Options that the
/// user has not set (UCX_*, NVX_UCX_*) are chosen so that UCX reports a silent host, but not a link that is down for
/// some seconds.
class UcxWorker {
 public:
  /// `store_host`: see open_ucx(); the interface to it leads to the other hosts too. Throws Error.
  explicit UcxWorker(const std::string& store_host);
  ~UcxWorker() { close(); }
  /// UCX accesses no memory of its user afterwards. Does nothing in a forked child, whose parent owns the connections.
  void close();
  /// False in a forked child.
  bool mine() const;
  UcxWorker(const UcxWorker&) = delete;

  const UcxLibrary& ucx() const { return ucx_; }
  ucp_worker_h get() const { return worker_; }
  /// Readable when an armed worker has an event.
  int fd() const { return fd_; }
  const std::vector<std::byte>& address() const { return address_; }
  /// Whether there is a transport of RDMA, with which the receiver fetches large messages.
  bool has_rdma() const { return has_rdma_; }
  std::string use_device_memory(std::span<const std::byte> range);
  ucs_memory_type_t memory_type_of(const void* at) const;
  const std::string& describe() const { return description_; }
  /// The addresses at which peers reach this worker over TCP; empty if it has another transport.
  const std::vector<HostAddress>& reached_at() const { return reached_at_; }

  /// The sockets at which peers connect to this worker over TCP.
  UcxListeners& listeners() { return listeners_; }

  /// Takes an endpoint, and closes it when ready_to_close() is called for it, or after this span.
  void close_later(ucp_ep_h endpoint, std::chrono::milliseconds timeout);
  void ready_to_close(ucp_ep_h endpoint);
  /// Advances the closing of endpoints. Call it between calls of progress. Returns true if none is left.
  bool advance_closing();
  /// Keeps all connections that exist now from other programs, and limits their silence.
  void claim_sockets() const;
  /// Closes all sockets in a forked child: otherwise peers would miss the parent's death, or connect to the child.
  void close_in_child() const;
  /// Limits the remaining time of all closing endpoints to this span.
  void limit_closing(std::chrono::milliseconds timeout);

 private:
  struct Closing {
    ucp_ep_h endpoint;
    Clock::time_point force_at;
    bool ready = false;
    void* flushing = nullptr;
    void* closing = nullptr;
  };
  void make_context(const std::string& store_host);
  void make_worker();
  void take_address();
  void query_transports();
  bool advance_closing(Closing& closing);
  void require(ucs_status_t status, const char* what) const;

  const uint32_t generation_;
  const UcxLibrary& ucx_;
  ucp_context_h context_ = nullptr;
  ucp_worker_h worker_ = nullptr;
  int fd_ = -1;
  std::vector<std::byte> address_;
  bool has_rdma_ = false, has_cuda_ = false;
  std::vector<std::span<const std::byte>> on_device_;  // one for each device in use
  std::string description_;
  std::vector<HostAddress> reached_at_;
  std::vector<Closing> closing_;
  UcxListeners listeners_;
};

}  // namespace nvx::net
