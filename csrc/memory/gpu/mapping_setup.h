#pragma once

#include <condition_variable>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/mutex.h"
#include "memory/driver/gpu_info.h"
#include "memory/driver/thread_call.h"
#include "memory/gpu/local_server.h"
#include "memory/gpu/peer_mappings.h"

/// The protocol that makes a PeerMappings: the messages of the ranks, and their order. For `device_*.cc` only.
namespace nvx {

/// Memory that a rank offers to the others: its arena or its fallback.
struct Offer {
  static constexpr uint32_t kMagic = 0x4f78766e;
  static constexpr uint32_t kNone = 0, kHere = 1;
  static constexpr uint32_t kRetry = 2;  // another group has made the arena meanwhile, by another kind: agree again
  uint32_t magic = kMagic;
  uint32_t state = kNone;
  uint32_t kind = 0;
  int32_t rank = -1;
  ArenaId arena;
  uint64_t base = 0;  // its address in its own process
  uint64_t bytes = 0;
  uint64_t check = 0;  // offset of its part for checks: its own pattern, then a slot per rank
  uint64_t seed = 0;
  HandleBytes handle{};
  char why_not[160] = {};
};
static_assert(sizeof(Offer) == 16 + 16 + 32 + 64 + 160);

/// Sent with each file descriptor: whose memory it is.
struct DescriptorInfo {
  static constexpr uint32_t kMagic = 0x4678766e;
  uint32_t magic = kMagic;
  int32_t rank = -1;
  uint32_t turn = 0;  // number of that rank's offer
  uint32_t reserved = 0;
  ArenaId arena;
};
static_assert(sizeof(DescriptorInfo) == 32);

struct Finding {
  uint32_t state = 0;
  char why[124] = {};
};

/// The state that exists only while a PeerMappings is being made.
class MappingSetup {
 public:
  MappingSetup(PeerMappings& mappings, DeviceRegistry& registry, Bootstrap& bootstrap, const MappingOptions& options)
      : mappings_(mappings),
        registry_(registry),
        bootstrap_(bootstrap),
        options_(options),
        socket_name_(unique_socket_name()),
        budget_(Deadline::after(options.timeout + std::chrono::milliseconds(1))),
        server_(socket_name_, [this](const LocalSocket& client) { receive_fd(client); }) {}
  ~MappingSetup();

  /// Each rank sends its properties, and all agree on a kind.
  void exchange_infos();
  /// Returns false if the ranks must call exchange_infos() again, because a rank's arena has become of another kind.
  bool share_arenas();
  void share_fallbacks();
  /// Makes a multicast object if the options request it. On any failure there is none on any rank, for a reason that
  /// all ranks have. Throws Error only for invalid messages of peers.
  void share_multicast();

 private:
  class Steps;
  std::string why_no_multicast() const;
  size_t ranks() const { return size_t(options_.ranks); }
  size_t me() const { return size_t(options_.rank); }
  const DeviceInfo& own() const { return infos_[me()]; }
  bool same_process(size_t r) const { return infos_[r].process == own().process; }
  bool same_host(size_t r) const { return infos_[r].host == own().host; }
  /// If the driver does not identify its GPUs, compares the process and the device number.
  bool same_gpu(size_t r) const {
    if (own().uuid != decltype(own().uuid){}) return infos_[r].uuid == own().uuid;
    return same_process(r) && infos_[r].device == own().device;
  }

  ShareKind kind_to_make() const;
  Offer prepare(const std::shared_ptr<DeviceRegion>& region);
  void send_fd(int fd, const std::vector<bool>& to);
  std::optional<std::vector<Fd>> exchange(Offer mine, const std::function<void(Offer&)>& fill,
                                          const std::vector<bool>& over_socket);
  bool exchange_offers(const Offer& mine);
  void receive_fd(const LocalSocket& client) EXCLUDES(mutex_);
  std::vector<Fd> collect(const std::vector<bool>& from) EXCLUDES(mutex_);
  std::shared_ptr<DeviceRegion> open(size_t r, ShareKind kind, const std::shared_ptr<const void>& call);
  std::shared_ptr<DeviceRegion> import(size_t r, ShareKind kind, Fd fd, const std::shared_ptr<const void>& call);
  PairVerdict reach(size_t r, ShareKind kind, Fd fd, DevicePtr* at);
  PairVerdict check_mark(size_t r, const std::shared_ptr<DeviceRegion>& region);
  std::vector<PairVerdict> exchange_findings(const std::vector<PairVerdict>& mine);
  PairVerdict pair_verdict(size_t a, size_t b, const std::vector<PairVerdict>& reached,
                           const std::vector<PairVerdict>& marked) const;
  std::vector<PairVerdict> verify(const std::shared_ptr<DeviceRegion>& region, ShareKind kind,
                                  const std::vector<bool>& with, std::vector<Fd> fds, std::vector<DevicePtr>& at);

  /// A call on this rank's own device. Throws Error.
  template <class Result>
  Result call_on_own_gpu(const std::string& what, std::function<Result()> call) const {
    return call_or_throw<Result>(what + " on GPU " + std::to_string(options_.device),
                                 Deadline::after(registry_.timeout()), std::move(call));
  }
  static Deadline soon(const Deadline& budget, std::chrono::milliseconds timeout);
  Deadline soon_mapped() const { return soon(mapping_budget_, registry_.timeout()); }
  Deadline soon_checked() const { return soon(budget_, options_.timeout); }
  static uint64_t mark(const Offer& by, size_t to) { return by.seed ^ (0x9e3779b97f4a7c15 * (to + 1)); }

  PeerMappings& mappings_;
  DeviceRegistry& registry_;
  Bootstrap& bootstrap_;
  const MappingOptions options_;
  const std::string socket_name_;
  std::optional<ShareProbe> found_;  // kinds that this process can export ...
  ShareProbe probe_;                 // ... without those that its arena is not made by
  uint32_t turn_ = 0;                // of offers
  std::vector<DeviceInfo> infos_;
  std::vector<Offer> offers_;
  std::vector<PairVerdict> pairs_;  // indexed by both ranks: whether each pair can use its arenas
  Span check_;
  bool touched_ = false;              // others may be using `check_` ...
  bool hung_ = false;                 // ... and may never end
  Deadline mapping_budget_, budget_;  // for the calls that map, and for the checks
  Mutex mutex_;
  std::condition_variable received_cv_;
  std::vector<std::pair<DescriptorInfo, Fd>> received_ GUARDED_BY(mutex_);
  std::optional<Failure> refused_ GUARDED_BY(mutex_);  // why a received descriptor could not be accepted
  LocalServer server_;                                 // last, because its thread uses the members above
};

}  // namespace nvx
