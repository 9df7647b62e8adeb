#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "base/deadline.h"
#include "memory/driver/device_driver.h"
#include "memory/gpu/local_server.h"
#include "memory/shm/arena.h"

namespace nvx {

/// A request for a segment of the pool of one of a process's devices. Fixed layout; not trusted, as peers send it.
struct PoolRequest {
  static constexpr uint32_t kMagic = 0x7178766e;  // "nvxq"
  uint32_t magic = kMagic;
  int32_t device = -1;
  ArenaId process;  ///< the owner of the pool
  uint64_t segment = 0;
};
static_assert(sizeof(PoolRequest) == 32);

/// One segment of the pool. A descriptor comes with it if the kind is kFd.
struct PoolReply {
  static constexpr uint32_t kMagic = 0x6178766e;  // "nvxa"
  static constexpr uint32_t kNone = 0, kHere = 1;
  uint32_t magic = kMagic;
  uint32_t state = kNone;
  uint32_t kind = 0;
  uint32_t reserved = 0;
  ArenaId pool;
  uint64_t room = 0;  ///< size of the whole pool's address range
  uint64_t offset = 0;
  uint64_t bytes = 0;
  HandleBytes handle{};
  char why_not[120] = {};  ///< for kNone
};
static_assert(sizeof(PoolReply) == 32 + 24 + 64 + 120);

/// The server through which this process passes its pools' memory to others of its host, at any time.
class PoolServer {
 public:
  /// Serves a request, with a descriptor if there is one. May throw Error, which then becomes the reply.
  using Serve = std::function<PoolReply(const PoolRequest&, Fd*)>;

  /// Throws Error if the socket cannot be opened.
  PoolServer(const std::string& name, Serve serve);

 private:
  void handle(const LocalSocket& client);

  const Serve serve_;
  LocalServer server_;
};

/// Sends a request to a process, which may have ended, have been replaced, or never reply. Throws Error.
PoolReply request_from_pool(const std::string& name, const PoolRequest& request, Fd* fd, const Deadline& deadline);

}  // namespace nvx
