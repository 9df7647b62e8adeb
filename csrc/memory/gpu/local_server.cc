#include "memory/gpu/local_server.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>
#include <vector>

#include "base/contain.h"
#include "base/error.h"
#include "memory/driver/relaxed_capture_guard.h"

namespace nvx {

LocalServer::LocalServer(const std::string& name, Handler handler)
    : handler_(std::move(handler)), listener_(listen_on(name)), end_(eventfd(0, EFD_CLOEXEC)) {
  if (!end_) throw system_error("cannot make an eventfd");
  try {
    thread_ = std::thread([this] { serve(); });
  } catch (const std::system_error& error) {
    throw system_error("cannot start a thread that passes GPU memory on", error.code().value());
  }
}

LocalServer::~LocalServer() {
  const uint64_t one = 1;
  (void)!write(end_.get(), &one, sizeof one);
  thread_.join();
}

void LocalServer::serve() {
  const RelaxedCaptureGuard relaxed;
  constexpr int kRestMs = 100;  // pause while the process has no free descriptors
  bool rests = false;
  for (;;) {
    std::vector<pollfd> fds{{end_.get(), POLLIN, 0}, {listener_.get(), short(rests ? 0 : POLLIN), 0}};
    for (const LocalSocket& client : clients_) fds.push_back({client.get(), POLLIN, 0});
    const int ready = poll(fds.data(), fds.size(), rests ? kRestMs : -1);
    if (ready < 0 && errno != EINTR) return;
    if (ready < 0) continue;
    if (fds[0].revents) return;
    auto client = clients_.begin();
    for (size_t i = 2; i < fds.size(); ++i) {
      const auto next = std::next(client);
      if (fds[i].revents) {
        handle(*client);
        clients_.erase(client);
      }
      client = next;
    }
    rests = false;
    if (!fds[1].revents) continue;
    try {
      accept();
    } catch (const Error&) {
      rests = true;
    }
  }
}

void LocalServer::accept() {
  accept_clients(listener_, [this](LocalSocket client) {
    clients_.push_back(std::move(client));
    if (clients_.size() <= kMostClients) return;
    handle(clients_.front());  // its packet may have arrived meanwhile
    clients_.pop_front();
  });
}

void LocalServer::handle(const LocalSocket& client) {
  contain("handing over GPU memory", [&] { handler_(client); });
}

}  // namespace nvx
