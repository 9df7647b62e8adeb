#include "memory/gpu/pool_server.h"

#include <poll.h>

#include <algorithm>
#include <cerrno>

#include "base/error.h"
#include "memory/driver/gpu_info.h"
#include "memory/shm/unix_socket.h"

namespace nvx {
namespace {

/// How long a reply waits for room for its descriptor. Other requests wait too, and the process for its end.
constexpr std::chrono::milliseconds kMostWait{1000};

}  // namespace

PoolServer::PoolServer(const std::string& name, Serve serve)
    : serve_(std::move(serve)), server_(name, [this](const LocalSocket& client) { handle(client); }) {}

/// Each client sends one request only, so its socket is empty before the reply, and only a descriptor may find no room.
void PoolServer::handle(const LocalSocket& client) {
  PoolRequest request;
  if (!receive_packet(client, &request, sizeof request, {})) return;
  if (request.magic != PoolRequest::kMagic) return;
  PoolReply reply;
  Fd fd;
  try {
    reply = serve_(request, &fd);
  } catch (const Error& error) {
    reply = PoolReply();
    put(reply.why_not, error.reason());
  }
  try {
    const int number = fd.get();
    (void)send_before(client, &reply, sizeof reply, {&number, fd ? size_t(1) : size_t(0)}, Deadline::after(kMostWait));
  } catch (const Error& error) {
    reply = PoolReply();
    put(reply.why_not, error.reason());
    (void)send_packet(client, &reply, sizeof reply, {});
  }
}

PoolReply request_from_pool(const std::string& name, const PoolRequest& request, Fd* fd, const Deadline& deadline) {
  const LocalSocket client = connect_or_throw(name, "its Unix socket", deadline);
  if (!send_packet(client, &request, sizeof request, {}))
    throw Error(Code::kPeerDied, "nvx: it ended before it received the request");
  for (;;) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline.end - Clock::now()).count();
    pollfd readable{client.get(), POLLIN, 0};
    const int ready = poll(&readable, 1, int(std::clamp<int64_t>(left + 1, 0, 1 << 30)));
    if (ready > 0) break;
    if (ready == 0) throw Error(Code::kTimeout, "nvx: it did not answer within " + how_long(deadline));
    if (errno != EINTR) throw system_error("cannot wait for a Unix socket");
  }
  PoolReply reply;
  if (!receive_packet(client, &reply, sizeof reply, {fd, 1}))
    throw Error(Code::kPeerDied, "nvx: it ended before it answered");
  if (reply.magic != PoolReply::kMagic) throw Error(Code::kMismatch, "nvx: it runs another version of nvx");
  if (reply.state != PoolReply::kHere) throw Error(Code::kPeerFailed, "nvx: it refused: " + text_of(reply.why_not));
  return reply;
}

}  // namespace nvx
