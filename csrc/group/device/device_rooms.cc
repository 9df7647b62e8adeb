#include "group/device/device_rooms.h"

#include <algorithm>
#include <cstdlib>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "base/log.h"
#include "base/mutex.h"
#include "group/meet/store.h"
#include "kernel/gpu/residency.h"
#include "memory/driver/cards.h"

namespace nvx {
namespace {

/// A rank's report of its GPU, before the channel's shape is decided. Fixed layout; comes from peers.
struct RoomCard {
  static constexpr uint32_t kMagic = 0x6578766e;  // "nvxe"
  uint32_t magic = kMagic;
  int32_t rank = -1;
  int32_t device = -1;
  int32_t resident = 0;  // blocks that are resident at once
  std::array<uint8_t, 16> uuid{};
  ArenaId home;             // of the rank's process
  uint64_t arena_free = 0;  // bytes
  uint32_t wanted = 0;      // blocks
  uint32_t first_epoch = 0;
  uint32_t promised = 0;  // blocks that its process has promised to other groups on this GPU
  uint32_t sharers = 1;   // processes that may use the GPU

  /// Ranks whose kernels must be resident on one GPU have the same one. If the driver reports no UUIDs, the process and
  /// the device index identify a GPU.
  bool same_gpu(const RoomCard& other) const {
    if (uuid != decltype(uuid){}) return uuid == other.uuid;
    return home == other.home && device == other.device;
  }
};
static_assert(sizeof(RoomCard) == 72);

/// Each GPU once, in the order of its first rank: the same on every rank. The process with the least room counts.
std::vector<kernel::GpuRoom> rooms_of(const std::vector<RoomCard>& cards) {
  std::vector<kernel::GpuRoom> rooms;
  std::vector<const RoomCard*> gpus;
  for (const RoomCard& card : cards) {
    const auto known = std::find_if(gpus.begin(), gpus.end(), [&](const RoomCard* g) { return g->same_gpu(card); });
    const size_t index = size_t(known - gpus.begin());
    if (known == gpus.end()) {
      gpus.push_back(&card);
      rooms.push_back({card.resident, 0});
    }
    kernel::GpuRoom& room = rooms[index];
    const auto beside = [&](const RoomCard& other) { return other.home == card.home && other.same_gpu(card); };
    room = {std::min(room.resident, int(card.resident)),
            std::max(room.ranks, uint32_t(std::count_if(cards.begin(), cards.end(), beside))),
            std::max(room.promised, card.promised), std::max(room.processes, card.sharers)};
  }
  return rooms;
}

using Gpu = std::pair<ArenaId, int>;

/// The knowledge of this process about a GPU, as long as it has promised blocks there.
struct Ledger {
  uint32_t promised = 0;
  std::set<ArenaId> here, elsewhere;  // the arenas that groups have met on this GPU and on others: one a process
};

/// All GPUs of this process, including simulated ones of tests.
struct Book {
  Mutex mutex;
  std::map<Gpu, Ledger> ledgers GUARDED_BY(mutex);
  std::set<Gpu> warned_of GUARDED_BY(mutex);  // of too few connections
};

Book& book() {
  static auto* const kBook = new Book;  // groups may outlive static objects
  return *kBook;
}

/// Whether this process has that rank on this GPU.
bool is_here(const DeviceShare& share, int rank) {
  return share.peer(rank).same_gpu && share.peer(rank).kind == ShareKind::kPointer;
}

/// Whether this is the group's first rank of this process on this GPU, which reports for the others.
bool speaks_for_process(const DeviceShare& share, int rank) {
  for (int r = 0; r < rank; ++r) {
    if (is_here(share, r)) return false;
  }
  return true;
}

uint32_t ranks_here(const DeviceShare& share, int ranks) {
  uint32_t n = 0;
  for (int r = 0; r < ranks; ++r) n += is_here(share, r);
  return n;
}

/// The processes that may use this rank's GPU, as far as this process knows after meeting this group's.
uint32_t sharers(const DeviceShare& share, const RoomRequest& request) {
  MutexLock lock(book().mutex);
  Ledger& ledger = book().ledgers[{request.home, request.device}];
  for (int r = 0; r < request.ranks; ++r) {
    const DevicePeer& peer = share.peer(r);
    (peer.same_gpu ? ledger.here : ledger.elsewhere).insert(peer.arena);
  }
  const uint32_t here = uint32_t(ledger.here.size()), met = here + uint32_t(ledger.elsewhere.size());
  return here == 1 ? 1 : here + (request.processes - std::min(request.processes, met));
}

/// Warns once per GPU, since CUDA reads the variable only at initialization.
void warn_of_connections(const DeviceShare& share, const RoomRequest& request) {
  const uint32_t here = ranks_here(share, request.ranks);
  const std::string warning = connections_wanted(here, std::getenv("CUDA_DEVICE_MAX_CONNECTIONS"));
  if (warning.empty()) return;
  {
    MutexLock lock(book().mutex);
    if (!book().warned_of.insert({request.home, request.device}).second) return;
  }
  NVX_LOG(kWarn, "GPU %d: %s", request.device, warning.c_str());
}

}  // namespace

BlockPromise::BlockPromise(const ArenaId& home, int device, const std::function<uint32_t(uint32_t)>& how_many)
    : home_(home), device_(device) {
  MutexLock lock(book().mutex);
  uint32_t& promised = book().ledgers[{home_, device_}].promised;
  before_ = promised;
  blocks_ = how_many(before_);
  promised += blocks_;
}

BlockPromise& BlockPromise::operator=(BlockPromise&& other) noexcept {
  if (this == &other) return *this;
  give_back();
  home_ = other.home_, device_ = other.device_, before_ = other.before_;
  blocks_ = std::exchange(other.blocks_, 0);
  return *this;
}

void BlockPromise::give_back() {
  if (blocks_ == 0) return;
  MutexLock lock(book().mutex);
  const auto it = book().ledgers.find({home_, device_});
  it->second.promised -= std::exchange(blocks_, 0);
  if (it->second.promised == 0) book().ledgers.erase(it);
}

std::string connections_wanted(uint32_t ranks, const char* set) {
  constexpr const char* kName = "CUDA_DEVICE_MAX_CONNECTIONS";
  constexpr int kMost = 32;  // CUDA's limit; all streams of the process share the connections
  if (ranks < 2 || (set && std::atoi(set) >= kMost)) return "";
  return std::to_string(ranks) + " ranks of this process share it, and " + kName + " is " +
         (set ? std::string(set) : "not set") +
         ": the hardware may queue one rank's kernel behind another's that waits for it, until both time out. Next: "
         "set " +
         kName + "=" + std::to_string(kMost) + " in the environment before CUDA is initialized";
}

/// Processes may set up several groups at once. Before a process publishes its card, its first rank on a GPU claims all
/// blocks that its ranks of the group can get there. So of two groups that share a process, one counts the other in
/// full, and together they never get more blocks than the process's part of the GPU has.
Rooms agree_on_rooms(Exchange& exchange, const DeviceShare& share, const RoomRequest& request) {
  RoomCard card;
  card.rank = request.rank;
  card.device = request.device;
  card.resident = request.resident;
  card.uuid = request.uuid;
  card.home = request.home;
  card.arena_free = request.arena_free;
  card.wanted = std::max(request.wanted, 1u);
  card.first_epoch = request.first_epoch;
  card.sharers = sharers(share, request);
  Rooms rooms;
  if (speaks_for_process(share, request.rank)) {
    rooms.claim = BlockPromise(request.home, request.device, [&](uint32_t before) {
      const kernel::GpuRoom room{request.resident, ranks_here(share, request.ranks), before, card.sharers};
      return std::min(kernel::share_of(room), card.wanted) * room.ranks;
    });
    card.promised = rooms.claim.before();
  }
  const auto cards = read_cards<RoomCard>(exchange.all_gather(bytes_of(card)), 1, request.name);
  rooms.arena_free = UINT64_MAX;
  uint32_t wanted = card.wanted;
  for (size_t r = 0; r < cards.size(); ++r) {
    const bool alike = cards[r].first_epoch == card.first_epoch && cards[r].wanted > 0;
    if (cards[r].magic != RoomCard::kMagic || cards[r].rank != int32_t(r) || !alike)
      throw Error(Code::kMismatch,
                  "nvx: " + request.name(int(r)) + " describes its GPU in the format of another version of nvx",
                  kOneVersion);
    rooms.arena_free = std::min(rooms.arena_free, cards[r].arena_free);
    wanted = std::min(wanted, cards[r].wanted);
  }
  kernel::BlockAgreement agreed = kernel::agree_on_blocks(rooms_of(cards), wanted);
  NVX_CHECK(agreed.blocks > 0, agreed.why_fewer +
                                   ", so the ranks would wait for each other: put fewer ranks on it, or "
                                   "destroy groups that are no longer needed");
  if (speaks_for_process(share, request.rank)) warn_of_connections(share, request);
  rooms.blocks = agreed.blocks;
  rooms.why_fewer = std::move(agreed.why_fewer);
  rooms.promise = BlockPromise(request.home, request.device, [&](uint32_t) { return rooms.blocks; });
  return rooms;
}

}  // namespace nvx
