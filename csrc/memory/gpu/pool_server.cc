#include "memory/gpu/pool_server.h"

#include <poll.h>

#include <algorithm>
#include <cerrno>

#include "base/error.h"
#include "memory/driver/gpu_info.h"
#include "memory/driver/thread_call.h"
#include "memory/shm/unix_socket.h"

namespace nvx {

PoolServer::PoolServer(const std::string& name, Answer answer)
    : answer_(std::move(answer)), server_(name, [this](const LocalSocket& client) { handle(client); }) {}

/// Each client sends one question only, so its socket is empty before the answer, and sending the answer never blocks.
void PoolServer::handle(const LocalSocket& client) {
  PoolQuestion question;
  if (!receive_packet(client, &question, sizeof question, {})) return;
  if (question.magic != PoolQuestion::kMagic) return;
  PoolAnswer answer;
  Fd fd;
  try {
    answer = answer_(question, &fd);
  } catch (const Error& error) {
    answer = PoolAnswer();
    put(answer.said, error.reason());
  }
  const int number = fd.get();
  (void)send_packet(client, &answer, sizeof answer, {&number, fd ? size_t(1) : size_t(0)});
}

PoolAnswer ask_pool_server(const std::string& name, const PoolQuestion& question, Fd* fd, const Deadline& deadline) {
  const LocalSocket client = connect_or_throw(name, "its Unix socket", deadline);
  if (!send_packet(client, &question, sizeof question, {}))
    throw Error(Code::kPeerDied, "nvx: it ended before it was asked");
  for (;;) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline.end - Clock::now()).count();
    pollfd asked{client.get(), POLLIN, 0};
    const int came = poll(&asked, 1, int(std::clamp<int64_t>(left + 1, 0, 1 << 30)));
    if (came > 0) break;
    if (came == 0) throw Error(Code::kTimeout, "nvx: it did not answer within " + how_long(deadline));
    if (errno != EINTR) throw system_error("cannot wait for a Unix socket");
  }
  PoolAnswer answer;
  if (!receive_packet(client, &answer, sizeof answer, {fd, 1}))
    throw Error(Code::kPeerDied, "nvx: it ended before it answered");
  if (answer.magic != PoolAnswer::kMagic) throw Error(Code::kMismatch, "nvx: it runs another version of nvx");
  if (answer.state != PoolAnswer::kHere) throw Error(Code::kPeerFailed, "nvx: it says: " + text_of(answer.said));
  return answer;
}

}  // namespace nvx
