#include "memory/shm/handout.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <thread>

#include "base/deadline.h"
#include "base/error.h"
#include "memory/shm/unix_socket.h"

namespace nvx {
namespace {

constexpr uint64_t kMagic = 0x746565687378766e;  // "nvxsheet"
constexpr size_t kMostBytes = size_t(1) << 30;
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE;

Fd written(std::span<const uint8_t> sheet) {
  Fd fd(memfd_create("nvx-sheet", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd) throw system_error("memfd_create failed");
  for (size_t done = 0; done < sheet.size();) {
    const ssize_t wrote = write(fd.get(), sheet.data() + done, sheet.size() - done);
    if (wrote <= 0) throw system_error("cannot write to shared memory");
    done += size_t(wrote);
  }
  if (fcntl(fd.get(), F_ADD_SEALS, kSeals) != 0) throw system_error("cannot seal the shared memory");
  return fd;
}

/// Returns nothing if the file is not one that a handout passes.
std::optional<std::vector<uint8_t>> read_all(int fd) {
  struct stat facts {};
  const int seals = fcntl(fd, F_GET_SEALS);
  if (seals < 0 || (seals & kSeals) != kSeals || fstat(fd, &facts) != 0) return std::nullopt;
  if (facts.st_size < 0 || size_t(facts.st_size) > kMostBytes) return std::nullopt;
  std::vector<uint8_t> sheet(size_t(facts.st_size));
  for (size_t done = 0; done < sheet.size();) {
    const ssize_t got = pread(fd, sheet.data() + done, sheet.size() - done, off_t(done));
    if (got <= 0) return std::nullopt;
    done += size_t(got);
  }
  return sheet;
}

}  // namespace

Handout::Handout() : name_(fresh_socket_name()), listener_(listen_on(name_)) {}

void Handout::give(std::span<const uint8_t> sheet) {
  sheets_.push_back(written(sheet));
  serve();
}

void Handout::serve() {
  accept_guests(listener_.get(), [this](Fd guest) { guests_.push_back({std::move(guest), 0}); });
  for (Guest& guest : guests_) {
    for (; guest.socket && guest.given < sheets_.size(); ++guest.given) {
      const int fd = sheets_[guest.given].get();
      if (send_packet(guest.socket.get(), &kMagic, sizeof kMagic, {&fd, 1})) continue;
      if (errno == EAGAIN) break;  // it has yet to read earlier sheets
      guest.socket.reset();        // it has ended
    }
  }
}

void Receipt::connect() {
  socket_ = connect_to(name_);
  open_ = socket_ || backlog_is_full();
}

std::optional<std::vector<uint8_t>> Receipt::next(std::chrono::milliseconds span) {
  const Deadline deadline{Clock::now(), Clock::now() + span};
  for (; open_ && !socket_ && !deadline.passed(Clock::now()); std::this_thread::sleep_for(kConnectPause)) connect();
  if (!socket_) return std::nullopt;
  const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline.end - Clock::now());
  pollfd ask{socket_.get(), POLLIN, 0};
  if (poll(&ask, 1, int(std::max<int64_t>(left.count(), 0))) != 1) return std::nullopt;
  uint64_t magic = 0;
  Fd sheet;
  if (receive_packet(socket_.get(), &magic, sizeof magic, {&sheet, 1}) && magic == kMagic && sheet) {
    if (auto value = read_all(sheet.get())) return value;
  }
  open_ = false;
  return std::nullopt;
}

}  // namespace nvx
