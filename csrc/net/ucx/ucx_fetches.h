#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "net/link.h"
#include "net/ucx/ucx_worker.h"

namespace nvx::net {

/// The large messages that a worker is receiving by rendezvous, and those received but not yet reported.
class UcxFetches {
 public:
  explicit UcxFetches(const UcxWorker& worker) : worker_(worker) {}
  /// Starts to receive a message. To be called in UCX's callback for it, which returns this status.
  ucs_status_t begin(Receiver& receiver, std::span<const std::byte> header, void* descriptor, size_t bytes);
  bool under_way() const { return !fetches_.empty(); }
  bool fetched() const { return !fetched_.empty(); }
  /// Reports the messages that have ended. To be called outside of UCX's calls.
  void report(Receiver& receiver);
  /// Drops all messages. To be called after the worker is closed.
  void drop(Receiver& receiver);

 private:
  struct Fetch {
    UcxFetches* fetches;
    std::vector<std::byte> header;
    std::byte* where;
    size_t bytes;
    std::vector<std::byte> own;  // empty if the receiver has given a place
    ucs_status_t status;
  };
  void end(Fetch& fetch, ucs_status_t status);
  static void on_fetched(void* request, ucs_status_t status, size_t bytes, void* fetch) noexcept;

  const UcxWorker& worker_;
  std::vector<Fetch*> fetches_, fetched_;
};

}  // namespace nvx::net
