// The answer through a Unix socket when a process maps another one's memory: bytes and descriptors of any kind.

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <thread>

#include "base/error.h"
#include "memory/shm/neighbours.h"

namespace nvx {
namespace {

constexpr ArenaId kWanted{0x1111, 0x2222};

/// A listening socket and the descriptors that it may pass.
struct FalseDoor {
  FalseDoor()
      : name("nvx-fuzz-" + std::to_string(getpid())), listener(socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0)) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    std::memcpy(address.sun_path + 1, name.data(), name.size());
    const auto length = socklen_t(offsetof(sockaddr_un, sun_path) + 1 + name.size());
    if (bind(listener.get(), reinterpret_cast<sockaddr*>(&address), length) != 0 || listen(listener.get(), 8) != 0)
      std::abort();
    sealed = Fd(memfd_create("fuzz", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    unsealed = Fd(memfd_create("fuzz", MFD_CLOEXEC | MFD_ALLOW_SEALING));
    if (ftruncate(sealed.get(), off_t(Arena::kBytes)) != 0 || ftruncate(unsealed.get(), 4096) != 0) std::abort();
    if (fcntl(sealed.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) != 0) std::abort();
  }

  /// Answers the next connection with the input, whose first byte selects the descriptors.
  void answer(const uint8_t* data, size_t size) {
    const Fd guest(accept(listener.get(), nullptr, nullptr));
    const int kinds[] = {sealed.get(), unsealed.get(), STDIN_FILENO, listener.get()};
    const size_t count = data[0] % 5;
    int fds[4];
    for (size_t i = 0; i < count; ++i) fds[i] = kinds[(data[0] / 5 + i) % 4];
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof fds)] = {};
    std::vector<uint8_t> bytes(data + 1, data + size);
    if (data[0] & 0x80) {
      const uint32_t magic = 0x4e565832;
      bytes.resize(std::max<size_t>(bytes.size(), 24));
      std::memcpy(bytes.data(), &magic, sizeof magic);
      std::memcpy(bytes.data() + 8, &kWanted, sizeof kWanted);
    }
    Word word{};  // its name has none
    iovec parts[] = {{word.data(), sizeof word}, {bytes.data(), bytes.size()}};
    msghdr message{};
    message.msg_iov = parts;
    message.msg_iovlen = 2;
    if (count != 0) {
      message.msg_control = control;
      message.msg_controllen = CMSG_SPACE(count * sizeof(int));
      cmsghdr* head = CMSG_FIRSTHDR(&message);
      head->cmsg_level = SOL_SOCKET;
      head->cmsg_type = SCM_RIGHTS;
      head->cmsg_len = CMSG_LEN(count * sizeof(int));
      std::memcpy(CMSG_DATA(head), fds, count * sizeof(int));
    }
    if (sendmsg(guest.get(), &message, MSG_NOSIGNAL) < 0) shutdown(guest.get(), SHUT_RDWR);
  }

  std::string name;
  Fd listener, sealed, unsealed;
};

}  // namespace
}  // namespace nvx

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace nvx;
  if (size == 0 || size > 4096) return 0;
  static FalseDoor& door = *new FalseDoor;
  static const std::shared_ptr<Neighbours>& here = *new std::shared_ptr<Neighbours>(Neighbours::here());
  std::thread answering([&] { door.answer(data, size); });
  try {
    Doorway mine(*here);
    const auto got = mine.fetch({{kWanted, door.name, getpid()}}, Deadline::after(std::chrono::seconds(4)));
    const volatile std::byte last = *got.at(kWanted)->at(Arena::kBytes - 1);  // all of it is accessible
    (void)last;
  } catch (const Error&) {
  }
  answering.join();
  return 0;
}
