#include "memory/gpu/peer_mappings.h"

#include <algorithm>

#include "base/contain.h"
#include "base/log.h"
#include "memory/gpu/mapping_setup.h"

namespace nvx {
namespace {

bool one_process(std::span<const DeviceInfo> infos) {
  return std::ranges::all_of(infos, [&](const DeviceInfo& c) { return c.process == infos[0].process; });
}

bool one_host(std::span<const DeviceInfo> infos) {
  return std::ranges::all_of(infos, [&](const DeviceInfo& c) { return c.host == infos[0].host; });
}

}  // namespace

ShareAgreement agree_on_kind(std::span<const DeviceInfo> infos, const RankNames& name_of) {
  if (one_process(infos)) return {ShareKind::kPointer, ""};
  ShareAgreement agreement;
  for (const ShareKind kind : {ShareKind::kFabric, ShareKind::kFd, ShareKind::kIpc, ShareKind::kHost}) {
    const auto lacks = [&](const DeviceInfo& info) { return !(info.kinds >> int(kind) & 1); };
    const auto without = std::ranges::find_if(infos, lacks);
    std::string& why = agreement.why_not_better;
    if (without != infos.end()) {
      why += (why.empty() ? "" : "; ") + std::string("no ") + name(kind) + ": " + name_of(without->rank) + ": " +
             text_of(without->why_not[int(kind)]);
    } else if (kind != ShareKind::kFabric && !one_host(infos)) {
      why += (why.empty() ? "" : "; ") + std::string("no ") + name(kind) + ": the ranks are on several hosts";
    } else {
      agreement.kind = kind;
      return agreement;
    }
  }
  throw Error(Code::kSystem, "nvx: the GPUs of these ranks cannot share memory: " + agreement.why_not_better);
}

bool MappingSetup::share_arenas() {
  const ShareKind agreed = mappings_.agreement_.kind;
  const bool exported = agreed != ShareKind::kPointer && agreed != ShareKind::kHost;
  std::vector<bool> over_socket(ranks()), with(ranks());
  for (size_t r = 0; r < ranks(); ++r) {
    with[r] = r != me() && (agreed != ShareKind::kHost || same_process(r));
    over_socket[r] = with[r] && !same_process(r) && agreed == ShareKind::kFd;
  }
  const auto fill = [&](Offer& offer) {
    mappings_.arena_ = &registry_.arena(options_.device, kind_to_make());
    const std::shared_ptr<DeviceRegion>& region = mappings_.arena_->hold();
    if (exported && region->kind() != agreed) {
      offer.state = Offer::kRetry;
      return;
    }
    if (!check_) check_ = mappings_.arena_->allocate((ranks() + 1) * kCheckBytes);
    offer = prepare(region);
    if (agreed != ShareKind::kFd) return;
    const auto fd = call_on_own_gpu<std::shared_ptr<Fd>>(
        "exporting memory", [region] { return std::make_shared<Fd>(region->export_fd()); });
    send_fd(fd->get(), over_socket);
  };
  std::optional<std::vector<Fd>> fds = exchange(Offer{}, fill, over_socket);
  if (!fds) return false;
  std::vector<DevicePtr> at(ranks());
  const std::shared_ptr<DeviceRegion>& own_region = mappings_.arena_->hold();
  pairs_ = verify(own_region, own_region->kind(), with, *std::move(fds), at);
  mappings_.peers_.resize(ranks());
  const DevicePtr mine = own_region->base();
  for (size_t r = 0; r < ranks(); ++r) {
    const ShareKind how = same_process(r) ? ShareKind::kPointer : agreed;
    mappings_.peers_[r] = {
        how, r == me() ? mine : at[r], mine, offers_[r].bytes, offers_[r].arena, same_gpu(r), "", infos_[r].uuid};
    for (size_t b = 0; agreed == ShareKind::kHost && b < ranks(); ++b) {
      if (infos_[r].process != infos_[b].process)
        pairs_[r * ranks() + b] = {PairState::kRefused, mappings_.agreement_.why_not_better};
    }
  }
  return true;
}

/// For the pairs that cannot access each other's device memory. All ranks take part, because all need the result.
void MappingSetup::share_fallbacks() {
  const auto broken = [&](size_t a) {
    return std::any_of(pairs_.begin() + ptrdiff_t(a * ranks()), pairs_.begin() + ptrdiff_t((a + 1) * ranks()),
                       [](const PairVerdict& pair) { return !pair.fine(); });
  };
  bool any = false;
  for (size_t r = 0; r < ranks(); ++r) any = any || broken(r);
  if (!any) return;
  std::vector<bool> with(ranks()), over_socket(ranks());
  for (size_t r = 0; r < ranks(); ++r) {
    with[r] = !pairs_[me() * ranks() + r].fine() && same_host(r);
    over_socket[r] = with[r] && !same_process(r);
  }
  const bool wanted = broken(me());
  const auto fill = [&](Offer& offer) {
    if (!wanted) return;
    offer = prepare(mappings_.arena_->hold_fallback());
    send_fd(mappings_.arena_->fallback_fd(), over_socket);
  };
  std::optional<std::vector<Fd>> fds = exchange(offers_[me()], fill, over_socket);
  if (!fds) throw Error(Code::kMismatch, "nvx: a rank requests a new agreement after the ranks have agreed");
  std::vector<DevicePtr> at(ranks());
  const std::shared_ptr<DeviceRegion> own = wanted ? mappings_.arena_->hold_fallback() : mappings_.arena_->hold();
  const std::vector<PairVerdict> fallbacks = verify(own, ShareKind::kHost, with, *std::move(fds), at);
  for (size_t a = 0; a < ranks(); ++a) {
    for (size_t b = a + 1; b < ranks(); ++b) {
      const PairVerdict& arenas = pairs_[a * ranks() + b];
      if (arenas.fine() || (fallbacks[a * ranks() + b].fine() && infos_[a].host == infos_[b].host)) continue;
      throw Error(Code::kSystem, "nvx: " + options_.name(int(a)) + " and " + options_.name(int(b)) +
                                     " share neither GPU memory (" + arenas.why + ") nor pinned host memory (" +
                                     (infos_[a].host == infos_[b].host ? fallbacks[a * ranks() + b].why
                                                                       : "they are on different hosts") +
                                     ")");
    }
  }
  for (size_t r = 0; r < ranks(); ++r) {
    if (with[r])
      mappings_.peers_[r] = {ShareKind::kHost,
                             at[r],
                             own->base(),
                             offers_[r].bytes,
                             offers_[r].arena,
                             mappings_.peers_[r].same_gpu,
                             pairs_[me() * ranks() + r].why,
                             infos_[r].uuid};
  }
}

PeerMappings::PeerMappings(DeviceRegistry& registry, Bootstrap& bootstrap, const MappingOptions& options)
    : kept_(options.timeout), name_of_(options.name) {
  try {
    MappingSetup setup(*this, registry, bootstrap, options);
    // A rank whose arena already existed with another kind reports that in the next round. So no rank has more than one
    // reason to agree again.
    int left = options.ranks + 1;
    do {
      NVX_CHECK(left-- > 0, "the ranks do not reach an agreement");
      setup.exchange_infos();
    } while (!setup.share_arenas());
    setup.share_fallbacks();
    setup.share_multicast();
  } catch (const std::exception& error) {
    contain("notifying the other ranks that GPU memory cannot be shared",
            [&] { bootstrap.give_up(failure_of(error)); });
    throw;
  }
  if (const std::string lines = fallbacks(); !lines.empty()) NVX_LOG(kWarn, "%s", lines.c_str());
}

std::string PeerMappings::fallbacks() const {
  std::string lines;
  for (size_t r = 0; r < peers_.size(); ++r) {
    if (peers_[r].why_not_better.empty()) continue;
    lines += (lines.empty() ? "" : "\n") + name_of_(int(r)) + " is reached through " + name(peers_[r].kind) +
             ", which is slower than GPU memory: " + peers_[r].why_not_better;
  }
  return lines;
}

}  // namespace nvx
