#include "memory/shm/handout.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <thread>

#include "base/deadline.h"
#include "base/error.h"
#include "memory/shm/unix_socket.h"

namespace nvx {
namespace {

constexpr uint64_t kSheet = 0x746565687378766e;   // "nvxsheet"
constexpr uint64_t kReason = 0x6e6f73616572786e;  // "nxreason"
constexpr size_t kMostBytes = size_t(1) << 30;
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_WRITE;

std::span<const int> only_if(const int& fd) { return {&fd, fd >= 0 ? size_t(1) : 0}; }

/// Sends this process's card with its life.
bool introduce(const LocalSocket& socket, const Card& card) {
  const int life = ProcessWatch::own_life(process_at(socket.get()));
  return send_packet(socket, &card, sizeof card, only_if(life));
}

/// Whether a card has come. `process` watches its sender.
bool receive_card(const LocalSocket& socket, Card* card, ProcessWatch* process) {
  Fd life;
  if (!receive_packet(socket, card, sizeof *card, {&life, 1}) || card->magic != Card::kMagic) return false;
  card->who[sizeof card->who - 1] = '\0';
  *process = ProcessWatch(std::move(life), process_at(socket.get()));
  return true;
}

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

Card Card::of(int rank, const std::string& who) {
  Card card;
  card.rank = rank;
  std::memcpy(card.who, who.data(), std::min(who.size(), sizeof card.who - 1));
  return card;
}

Handout::Handout(const Card& own) : own_(own), name_(fresh_socket_name()), listener_(listen_on(name_)) {}

void Handout::give(std::span<const uint8_t> sheet) { add(sheet, /*is_reason=*/false); }

void Handout::give_up(std::span<const uint8_t> reason) { add(reason, /*is_reason=*/true); }

void Handout::add(std::span<const uint8_t> sheet, bool is_reason) {
  sheets_.push_back({written(sheet), is_reason});
  serve();
}

void Handout::serve() {
  accept_guests(listener_, [this](LocalSocket guest) { guests_.push_back({std::move(guest)}); });
  std::erase_if(guests_, [this](Guest& guest) { return !attend(guest); });
  ptrdiff_t excess = std::ranges::count(guests_, false, &Guest::known) - kMostSilent;
  if (excess <= 0) return;
  // The packet of a silent one may have arrived meanwhile.
  std::erase_if(guests_,
                [&](Guest& guest) { return !guest.known && excess-- > 0 && (!attend(guest) || !guest.known); });
}

/// False if the guest has gone away. It stays known: its process may be about to end.
bool Handout::attend(Guest& guest) {
  if (!guest.known) {
    Acquaintance rank;
    guest.known = receive_card(guest.socket, &rank.card, &rank.process);
    if (!guest.known && errno == EAGAIN) return true;
    if (guest.known) known_.push_back(std::move(rank));
    guest.known = guest.known && introduce(guest.socket, own_);
  }
  char more = 0;
  bool here =
      guest.known && recv(guest.socket.get(), &more, sizeof more, MSG_PEEK | MSG_DONTWAIT) < 0 && errno == EAGAIN;
  for (; here && guest.given < sheets_.size(); ++guest.given) {
    const Sheet& sheet = sheets_[guest.given];
    const int fd = sheet.file.get();
    const uint64_t kind = sheet.is_reason ? kReason : kSheet;
    if (send_packet(guest.socket, &kind, sizeof kind, {&fd, 1})) continue;
    if (errno == EAGAIN) return true;  // it has yet to read earlier sheets
    here = false;
  }
  lost_ |= !here;
  return here;
}

Receipt::Receipt(const std::string& name, const Card& own) : name_(name), own_(own) { connect(); }

void Receipt::connect() {
  socket_ = connect_to(name_);
  open_ = socket_ || errno != ECONNREFUSED;  // refused: the process has ended. Otherwise its door will tell
  if (!socket_) return;
  process_ = ProcessWatch({}, process_at(socket_.get()));  // until the handout has introduced itself
  if (!introduce(socket_, own_)) open_ = false;
}

std::optional<std::vector<uint8_t>> Receipt::next(std::chrono::milliseconds span) {
  const Deadline deadline{Clock::now(), Clock::now() + span};
  for (; open_ && !socket_ && !deadline.passed(Clock::now()); std::this_thread::sleep_for(kConnectPause)) connect();
  if (!socket_ || !open_) return std::nullopt;
  do {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline.end - Clock::now());
    pollfd ask{socket_.get(), POLLIN, 0};
    if (poll(&ask, 1, int(std::max<int64_t>(left.count(), 0))) != 1) return std::nullopt;
    if (auto sheet = take()) return sheet;
  } while (open_);
  return std::nullopt;
}

/// The sheet that has arrived; nothing if it is the handout's card, or the end.
std::optional<std::vector<uint8_t>> Receipt::take() {
  if (!met_) {
    Card card;
    met_ = open_ = receive_card(socket_, &card, &process_);
    return std::nullopt;
  }
  uint64_t kind = 0;
  Fd sheet;
  if (receive_packet(socket_, &kind, sizeof kind, {&sheet, 1}) && (kind == kSheet || kind == kReason) && sheet) {
    auto value = read_all(sheet.get());
    if (value && kind == kSheet) return value;
    reason_ = std::move(value);
  }
  open_ = false;
  return std::nullopt;
}

}  // namespace nvx
