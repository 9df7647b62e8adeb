#include "memory/pool_door.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <vector>

#include "base/contain.h"
#include "base/error.h"
#include "memory/apart.h"
#include "memory/beside_captures.h"
#include "memory/cards.h"
#include "memory/unix_socket.h"

namespace nvx {

PoolDoor::PoolDoor(const std::string& name, Answer answer)
    : answer_(std::move(answer)), listener_(listen_on(name)), end_(eventfd(0, EFD_CLOEXEC)) {
  if (!end_) throw system_error("cannot make an eventfd");
  try {
    thread_ = std::thread([this] { serve(); });
  } catch (const std::system_error&) {
    throw Error(Code::kSystem, "nvx: the system gives no thread to hand out GPU memory");
  }
}

PoolDoor::~PoolDoor() {
  const uint64_t one = 1;
  (void)!write(end_.get(), &one, sizeof one);
  thread_.join();
}

void PoolDoor::serve() {
  const BesideCaptures beside;
  constexpr int kRestMs = 100;  // where nobody can be let in, as there are no descriptors left
  bool rests = false;
  for (;;) {
    std::vector<pollfd> asked{{end_.get(), POLLIN, 0}, {listener_.get(), short(rests ? 0 : POLLIN), 0}};
    for (const Fd& guest : guests_) asked.push_back({guest.get(), POLLIN, 0});
    const int came = poll(asked.data(), asked.size(), rests ? kRestMs : -1);
    if (came < 0 && errno != EINTR) return;
    if (came < 0) continue;
    if (asked[0].revents) return;
    auto guest = guests_.begin();
    for (size_t i = 2; i < asked.size(); ++i) {
      const auto next = std::next(guest);
      if (asked[i].revents) {
        contain("handing out GPU memory", [&] { hear(*guest); });
        guests_.erase(guest);
      }
      guest = next;
    }
    rests = false;
    if (!asked[1].revents) continue;
    try {
      let_in();
    } catch (const Error&) {
      rests = true;
    }
  }
}

void PoolDoor::let_in() {
  Fd guest;
  if (accept_from(listener_.get(), &guest) != Came::kGuest) return;
  if (guests_.size() >= kMostGuests) guests_.pop_front();
  guests_.push_back(std::move(guest));
}

/// Each guest asks one question only, so the answer is all that lies in its socket, and sending it never blocks.
void PoolDoor::hear(const Fd& guest) {
  PoolQuestion question;
  if (!receive_packet(guest.get(), &question, sizeof question, {})) return;
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
  (void)send_packet(guest.get(), &answer, sizeof answer, {&number, fd ? size_t(1) : size_t(0)});
}

PoolAnswer ask_at_door(const std::string& name, const PoolQuestion& question, Fd* fd, const Deadline& deadline) {
  const Fd guest = connect_to(name);
  if (!guest || !send_packet(guest.get(), &question, sizeof question, {}))
    throw Error(Code::kPeerDied, std::string("nvx: its Unix socket cannot be reached (") + std::strerror(errno) +
                                     "): it has ended, or belongs to another user");
  for (;;) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline.end - Clock::now()).count();
    pollfd asked{guest.get(), POLLIN, 0};
    const int came = poll(&asked, 1, int(std::clamp<int64_t>(left + 1, 0, 1 << 30)));
    if (came > 0) break;
    if (came == 0) throw Error(Code::kTimeout, "nvx: it did not answer within " + how_long(deadline));
    if (errno != EINTR) throw system_error("cannot wait for a Unix socket");
  }
  PoolAnswer answer;
  if (!receive_packet(guest.get(), &answer, sizeof answer, {fd, 1}))
    throw Error(Code::kPeerDied, "nvx: it ended before it answered");
  if (answer.magic != PoolAnswer::kMagic) throw Error(Code::kMismatch, "nvx: it answers what another version would");
  if (answer.state != PoolAnswer::kHere) throw Error(Code::kPeerFailed, "nvx: it says: " + text_of(answer.said));
  return answer;
}

}  // namespace nvx
