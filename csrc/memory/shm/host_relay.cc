#include "memory/shm/host_relay.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <thread>

#include "base/deadline.h"
#include "base/error.h"
#include "base/text.h"
#include "memory/shm/unix_socket.h"

namespace nvx {
namespace {

constexpr uint64_t kRecord = 0x746565687378766e;  // "nvxsheet"
constexpr uint64_t kReason = 0x6e6f73616572786e;  // "nxreason"
constexpr size_t kMostBytes = size_t(1) << 30;
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE;

std::span<const int> only_if(const int& fd) { return {&fd, fd >= 0 ? size_t(1) : 0}; }

bool send_info(const LocalSocket& socket, const PeerInfo& info) {
  const int lock_file = ProcessWatch::own_lock_file(peer_pid(socket.get()));
  return send_packet(socket, &info, sizeof info, only_if(lock_file));
}

/// Whether a PeerInfo has arrived. `process` watches its sender.
bool receive_info(const LocalSocket& socket, PeerInfo* info, ProcessWatch* process) {
  Fd lock_file;
  if (!receive_packet(socket, info, sizeof *info, {&lock_file, 1}) || info->magic != PeerInfo::kMagic) return false;
  info->description[sizeof info->description - 1] = '\0';
  *process = ProcessWatch(std::move(lock_file), peer_pid(socket.get()));
  return true;
}

Fd written(std::span<const uint8_t> record) {
  Fd fd(memfd_create("nvx-record", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd) throw system_error("memfd_create failed");
  for (size_t done = 0; done < record.size();) {
    const ssize_t wrote = write(fd.get(), record.data() + done, record.size() - done);
    if (wrote <= 0) throw system_error("cannot write to shared memory");
    done += size_t(wrote);
  }
  if (fcntl(fd.get(), F_ADD_SEALS, kSeals) != 0) throw system_error("cannot seal the shared memory");
  return fd;
}

/// Returns nothing if the file is not one that a relay passes.
std::optional<std::vector<uint8_t>> read_all(int fd) {
  struct stat facts {};
  const int seals = fcntl(fd, F_GET_SEALS);
  if (seals < 0 || (seals & kSeals) != kSeals || fstat(fd, &facts) != 0) return std::nullopt;
  if (facts.st_size < 0 || size_t(facts.st_size) > kMostBytes) return std::nullopt;
  std::vector<uint8_t> record(size_t(facts.st_size));
  for (size_t done = 0; done < record.size();) {
    const ssize_t got = pread(fd, record.data() + done, record.size() - done, off_t(done));
    if (got <= 0) return std::nullopt;
    done += size_t(got);
  }
  return record;
}

}  // namespace

PeerInfo PeerInfo::of(int rank, const std::string& description) {
  PeerInfo info;
  info.rank = rank;
  put(info.description, description);
  return info;
}

HostRelay::HostRelay(const PeerInfo& own) : own_(own), name_(unique_socket_name()), listener_(listen_on(name_)) {}

void HostRelay::publish(std::span<const uint8_t> record) { add(record, /*is_reason=*/false); }

void HostRelay::give_up(std::span<const uint8_t> reason) { add(reason, /*is_reason=*/true); }

void HostRelay::add(std::span<const uint8_t> record, bool is_reason) {
  records_.push_back({written(record), is_reason});
  serve();
}

void HostRelay::serve() {
  accept_clients(listener_, [this](LocalSocket client) { clients_.push_back({std::move(client)}); });
  std::erase_if(clients_, [this](Client& client) { return !serve(client); });
  ptrdiff_t excess = std::ranges::count(clients_, false, &Client::introduced) - kMostSilent;
  if (excess <= 0) return;
  // The packet of a silent client may have arrived meanwhile.
  std::erase_if(clients_, [&](Client& client) {
    return !client.introduced && excess-- > 0 && (!serve(client) || !client.introduced);
  });
}

/// False if the client has gone away. It stays in `peers()`: its process may be about to end.
bool HostRelay::serve(Client& client) {
  if (!client.introduced) {
    LocalPeer rank;
    client.introduced = receive_info(client.socket, &rank.info, &rank.process);
    if (!client.introduced && errno == EAGAIN) return true;
    if (client.introduced) ranks_.push_back(std::move(rank));
  }
  char more = 0;
  bool here = client.introduced && recv(client.socket.get(), &more, sizeof more, MSG_PEEK | MSG_DONTWAIT) < 0 &&
              errno == EAGAIN;
  if (here && !client.answered) {
    client.answered = here = send_info(client.socket, own_);
    if (!here && errno == EAGAIN) return true;  // there is no room for the descriptor
  }
  for (; here && client.sent < records_.size(); ++client.sent) {
    const Record& record = records_[client.sent];
    const int fd = record.file.get();
    const uint64_t kind = record.is_reason ? kReason : kRecord;
    if (send_packet(client.socket, &kind, sizeof kind, {&fd, 1})) continue;
    if (errno == EAGAIN) return true;  // it has yet to read earlier records, or there is no room for the descriptor
    here = false;
  }
  lost_ |= !here;
  return here;
}

RelayClient::RelayClient(const std::string& name, const PeerInfo& own) : name_(name), own_(own) { connect(); }

void RelayClient::connect() {
  if (!socket_) {
    socket_ = connect_to(name_);
    open_ = socket_ || errno != ECONNREFUSED;  // refused: it has ended. Other errors show at its IPC socket
    if (!socket_) return;
    process_ = ProcessWatch({}, peer_pid(socket_.get()));  // until the relay has introduced itself
  }
  connected_ = send_info(socket_, own_);
  open_ = connected_ || errno == EAGAIN;
}

std::optional<std::vector<uint8_t>> RelayClient::next(std::chrono::milliseconds span) {
  const Deadline deadline{Clock::now(), Clock::now() + span};
  for (; open_ && !connected_ && !deadline.passed(Clock::now()); std::this_thread::sleep_for(kConnectPause)) connect();
  if (!connected_ || !open_) return std::nullopt;
  do {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline.end - Clock::now());
    pollfd readable{socket_.get(), POLLIN, 0};
    if (poll(&readable, 1, int(std::max<int64_t>(left.count(), 0))) != 1) return std::nullopt;
    if (auto record = take()) return record;
  } while (open_);
  return std::nullopt;
}

/// The record that has arrived; nothing if it is the PeerInfo of the relay, or the end.
std::optional<std::vector<uint8_t>> RelayClient::take() {
  if (!introduced_) {
    PeerInfo info;
    introduced_ = open_ = receive_info(socket_, &info, &process_);
    return std::nullopt;
  }
  uint64_t kind = 0;
  Fd record;
  if (receive_packet(socket_, &kind, sizeof kind, {&record, 1}) && (kind == kRecord || kind == kReason) && record) {
    auto value = read_all(record.get());
    if (value && kind == kRecord) return value;
    reason_ = std::move(value);
  }
  open_ = false;
  return std::nullopt;
}

}  // namespace nvx
