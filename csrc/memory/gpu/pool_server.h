#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "base/deadline.h"
#include "memory/driver/device_driver.h"
#include "memory/gpu/local_server.h"
#include "memory/shm/arena.h"

namespace nvx {

/// A question about the pool of one of a process's devices. Fixed layout; not trusted, as peers send it.
struct PoolQuestion {
  static constexpr uint32_t kMagic = 0x7178766e;  // "nvxq"
  uint32_t magic = kMagic;
  int32_t device = -1;
  ArenaId process;  ///< of the process that is asked
  uint64_t segment = 0;
};
static_assert(sizeof(PoolQuestion) == 32);

/// One segment of the pool. A descriptor comes with it if the kind is kFd.
struct PoolAnswer {
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
  char said[120] = {};  ///< for kNone: the reason
};
static_assert(sizeof(PoolAnswer) == 32 + 24 + 64 + 120);

/// The server through which this process passes its pools' memory to others of its host, at any time.
class PoolServer {
 public:
  /// Answers a question, with a descriptor if there is one. May throw Error, which then becomes the answer.
  using Answer = std::function<PoolAnswer(const PoolQuestion&, Fd*)>;

  /// Throws Error if the socket cannot be opened.
  PoolServer(const std::string& name, Answer answer);

 private:
  void handle(const LocalSocket& client);

  const Answer answer_;
  LocalServer server_;
};

/// Asks a process, which may have ended, have been replaced, or never answer. Throws Error.
PoolAnswer ask_pool_server(const std::string& name, const PoolQuestion& question, Fd* fd, const Deadline& deadline);

}  // namespace nvx
