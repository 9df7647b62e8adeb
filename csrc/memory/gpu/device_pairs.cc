// The trial of every pair of ranks.

#include "memory/gpu/mapping_setup.h"

namespace nvx {

/// The deadline of the next check. If several checks hang, all of them together take little more time than two.
Deadline MappingSetup::soon() const {
  using std::chrono::milliseconds;
  const auto left = std::chrono::duration_cast<milliseconds>(budget_.end - Clock::now());
  return Deadline::after(
      std::clamp(left, milliseconds(1) + options_.patience / 8, milliseconds(1) + options_.patience));
}

/// The memory of a rank of this process, made accessible to this rank's device.
std::shared_ptr<DeviceRegion> MappingSetup::open(size_t r, ShareKind kind) {
  DeviceArena* const arena = registry_.made(cards_[r].device);
  NVX_CHECK(arena && arena->id() == offers_[r].arena && arena->region().bytes() == offers_[r].bytes,
            "it is not this process's arena of that GPU");
  if (kind == ShareKind::kHost) return arena->hold_fallback();
  return call_or_throw<std::shared_ptr<DeviceRegion>>(
      "giving access to GPU " + std::to_string(options_.device), soon(),
      [driver = registry_.driver(), device = options_.device, peer = cards_[r].device, theirs = arena->hold()] {
        demand_reach(*driver, device, peer);
        theirs->open_to(device);
        return theirs;
      });
}

/// The memory of a rank of another process, mapped for this rank's device.
std::shared_ptr<DeviceRegion> MappingSetup::import(size_t r, ShareKind kind, Fd fd) {
  const Offer& offer = offers_[r];
  const DeviceRegistry::Import import{offer.arena, kind, options_.device};
  if (auto known = registry_.find(import); known && known->bytes() == offer.bytes) return known;
  const bool by_descriptor = kind == ShareKind::kFd || kind == ShareKind::kHost;
  if (by_descriptor && !fd) throw Error(Code::kSystem, "nvx: its descriptor did not arrive through the Unix socket");
  const auto map = [driver = registry_.driver(), device = options_.device, kind, bytes = offer.bytes,
                    handle = offer.handle,
                    fd = std::make_shared<Fd>(std::move(fd))]() -> std::shared_ptr<DeviceRegion> {
    if (kind == ShareKind::kFd) return DeviceRegion::import_fd(driver, device, fd->get(), bytes);
    if (kind == ShareKind::kHost) return DeviceRegion::pin(driver, device, fd->get(), bytes);
    return DeviceRegion::import_handle(driver, device, kind, handle, bytes);
  };
  const auto region =
      call_or_throw<std::shared_ptr<DeviceRegion>>("mapping it on GPU " + std::to_string(options_.device), soon(), map);
  registry_.adopt(import, region);
  return region;
}

/// Maps another rank's memory, checks the pattern in it, and leaves a mark.
PairVerdict MappingSetup::reach(size_t r, ShareKind kind, Fd fd, DevicePtr* at) {
  const Offer& offer = offers_[r];
  const bool by_pointer = same_process(r) && kind != ShareKind::kHost;  // an arena and its fallback are two imports
  const DeviceRegistry::Import import{offer.arena, by_pointer ? ShareKind::kPointer : kind, options_.device};
  // Not tried again, so nothing can hang in it.
  if (const std::string why = registry_.distrusted(import); !why.empty()) return {PairState::kRefused, why};
  PairVerdict verdict;
  try {
    const auto region = same_process(r) ? open(r, kind) : this->import(r, kind, std::move(fd));
    if (!same_process(r)) mappings_.kept_.add(region);
    *at = region->base();
    const DevicePtr part = *at + offer.check;
    const PairCheck check{options_.device,        part,    offer.seed, part + (me() + 1) * kCheckBytes,
                          mark(offers_[me()], r), {region}};
    verdict = run_check(registry_.driver(), check, soon());
  } catch (const Error& error) {
    verdict = {error.code() == Code::kTimeout ? PairState::kHung : PairState::kRefused, error.reason()};
  }
  if (verdict.state == PairState::kHung || verdict.state == PairState::kCorrupt)
    registry_.distrust(import, verdict.why + " (found by an earlier group)");
  return verdict;
}

/// Checks whether another rank's mark has arrived in this rank's memory.
PairVerdict MappingSetup::look_for_mark(size_t r, const std::shared_ptr<DeviceRegion>& region) {
  const DevicePtr slot = region->base() + check_.offset + (r + 1) * kCheckBytes;
  return run_check(registry_.driver(), {options_.device, slot, mark(offers_[r], me()), 0, 0, {region}}, soon());
}

std::vector<PairVerdict> MappingSetup::tell_findings(const std::vector<PairVerdict>& mine) {
  std::vector<Finding> findings(ranks());
  for (size_t r = 0; r < ranks(); ++r) {
    findings[r].state = uint32_t(mine[r].state);
    put(findings[r].why, mine[r].why);
  }
  const auto told =
      read_cards<Finding>(exchange_.all_gather(std::as_bytes(std::span(findings))), ranks(), options_.name);
  std::vector<PairVerdict> all;
  for (const Finding& finding : told)
    all.push_back({PairState(std::min(finding.state, uint32_t(PairState::kCorrupt))), text_of(finding.why)});
  return all;
}

/// The first failure in either direction.
PairVerdict MappingSetup::judge(size_t a, size_t b, const std::vector<PairVerdict>& reached,
                                const std::vector<PairVerdict>& marked) const {
  const auto say = [&](const std::vector<PairVerdict>& found, size_t from, size_t to, const char* what) {
    PairVerdict verdict = found[from * ranks() + to];
    if (!verdict.fine())
      verdict.why = options_.name(int(from)) + " " + what + " " + options_.name(int(to)) + ": " + verdict.why;
    return verdict;
  };
  for (const auto& [from, to] : {std::pair(a, b), std::pair(b, a)}) {
    if (PairVerdict v = say(reached, from, to, "with the memory of"); !v.fine()) return v;
  }
  for (const auto& [from, to] : {std::pair(a, b), std::pair(b, a)}) {
    if (PairVerdict v = say(marked, from, to, "with the data from"); !v.fine()) return v;
  }
  return {};
}

/// Tries every pair in both directions. Returns the verdicts by pair, the same on all ranks.
std::vector<PairVerdict> MappingSetup::verify(const std::shared_ptr<DeviceRegion>& region, ShareKind kind,
                                              const std::vector<bool>& with, std::vector<Fd> fds,
                                              std::vector<DevicePtr>& at) {
  budget_ = Deadline::after(2 * options_.patience + std::chrono::milliseconds(1));
  std::vector<PairVerdict> mine(ranks());
  for (size_t r = 0; r < ranks(); ++r) {
    if (with[r]) mine[r] = reach(r, kind, std::move(fds[r]), &at[r]);
  }
  const std::vector<PairVerdict> reached = tell_findings(mine);
  for (size_t r = 0; r < ranks(); ++r) {
    const bool left = with[r] && reached[r * ranks() + me()].fine();
    mine[r] = left ? look_for_mark(r, region) : PairVerdict{};
  }
  const std::vector<PairVerdict> marked = tell_findings(mine);
  // Not by the pair's verdict, the first failure only: work that hangs in the other direction may still write here.
  for (size_t r = 0; r < ranks(); ++r) {
    for (const auto* found : {&reached, &marked}) {
      hung_ = hung_ || (*found)[r * ranks() + me()].state == PairState::kHung ||
              (*found)[me() * ranks() + r].state == PairState::kHung;
    }
  }
  std::vector<PairVerdict> pairs(ranks() * ranks());
  for (size_t a = 0; a < ranks(); ++a) {
    for (size_t b = 0; b < ranks(); ++b) {
      pairs[a * ranks() + b] = judge(std::min(a, b), std::max(a, b), reached, marked);
    }
  }
  touched_ = false;
  return pairs;
}

}  // namespace nvx
