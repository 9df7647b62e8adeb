#include "memory/handout.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/error.h"
#include "memory/unix_socket.h"

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

/// Nothing if it is not what a handout gives.
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
  for (Fd guest;;) {
    const Came came = accept_from(listener_.get(), &guest);
    if (came == Came::kNobody) break;
    if (came == Came::kGuest) guests_.push_back({std::move(guest), 0});
  }
  for (Guest& guest : guests_) {
    for (; guest.socket && guest.given < sheets_.size(); ++guest.given) {
      const int fd = sheets_[guest.given].get();
      if (!send_packet(guest.socket.get(), &kMagic, sizeof kMagic, {&fd, 1})) guest.socket.reset();  // it has gone
    }
  }
}

Receipt::Receipt(const std::string& name) : socket_(connect_to(name)) {}

std::optional<std::vector<uint8_t>> Receipt::next(std::chrono::milliseconds span) {
  if (!socket_) return std::nullopt;
  pollfd ask{socket_.get(), POLLIN, 0};
  if (poll(&ask, 1, int(span.count())) != 1) return std::nullopt;
  uint64_t magic = 0;
  Fd sheet;
  if (receive_packet(socket_.get(), &magic, sizeof magic, {&sheet, 1}) && magic == kMagic && sheet) {
    if (auto value = read_all(sheet.get())) return value;
  }
  socket_.reset();
  return std::nullopt;
}

}  // namespace nvx
