#include "torch/call/gloo_ranks.h"

#include <algorithm>
#include <cstring>
#include <span>
#include <utility>

#include "base/error.h"

namespace nvx {
namespace {

constexpr uint64_t kLength = 6988;  // python/nvx/stand_in.py finds it in gloo's error: "... 136 vs 6988"
constexpr int kAtOnce = 16;         // ranks that one call checks: all ranks together check all
const std::vector<uint8_t> kAbsent = {'-'};

/// A list of addresses of gloo's that is well-formed, but has an address of a length that gloo refuses.
std::vector<uint8_t> refusal() {
  constexpr uint64_t kRankLength = 3;
  std::vector<uint8_t> value(2 * sizeof(uint64_t) + kRankLength + kLength);
  std::memcpy(value.data(), &kRankLength, sizeof kRankLength);
  std::memcpy(value.data() + sizeof kRankLength, "nvx", kRankLength);
  std::memcpy(value.data() + sizeof kRankLength + kRankLength, &kLength, sizeof kLength);
  return value;
}

/// The number of ranks for which gloo wrote the entry: 8 bytes for each at its end. 0 if gloo did not write it.
size_t ranks_of(std::span<const uint8_t> entry) {
  for ([[maybe_unused]] const char* part : {"the name of the host", "the address"}) {
    uint64_t length = 0;
    if (entry.size() < sizeof length) return 0;
    std::memcpy(&length, entry.data(), sizeof length);
    entry = entry.subspan(sizeof length);
    if (entry.size() < length) return 0;
    entry = entry.subspan(length);
  }
  return entry.size() / sizeof(uint64_t);
}

std::string key_of(int rank) { return "0/" + std::to_string(rank); }  // of gloo's first context

}  // namespace

GlooRanks::GlooRanks(std::shared_ptr<TorchStore> store, std::string group, int rank, int size)
    : store_(std::move(store)),
      group_(std::move(group)),
      rank_(rank),
      size_(size),
      pause_(
          std::clamp(std::chrono::milliseconds(size), std::chrono::milliseconds(100), std::chrono::milliseconds(1000))),
      next_(Clock::now() + pause_) {
  // An entry of an earlier group shows that those of other ranks may be as old: they prove nothing.
  const bool entries_are_new = store_->peek(key_of(rank_), kAbsent) == kAbsent;
  for (int i = 1; entries_are_new && i < size_; ++i) others_.push_back((rank_ + i) % size_);
  store_->set(key_of(rank_), refusal());
}

void GlooRanks::check() {
  if (others_.empty() || Clock::now() < next_) return;
  next_ = Clock::now() + pause_;
  static const std::vector<uint8_t> kOurs = refusal();
  for (size_t left = std::min<size_t>(others_.size(), kAtOnce); left != 0; --left) {
    const int other = others_.front();
    others_.pop_front();
    const std::vector<uint8_t> found = store_->peek(key_of(other), kAbsent);
    // One for another number of ranks is of an earlier group: this rank may be the first that has reached this one.
    const size_t ranks = ranks_of(found);
    const bool is_old = ranks != 0 && ranks != size_t(size_);
    if (found == kAbsent || is_old) others_.push_back(other);
    if (found == kAbsent || is_old || found == kOurs) continue;
    throw Error(Code::kMismatch,
                "nvx: NVX_AS differs between ranks: rank " + std::to_string(other) + " of group " + group_ +
                    " uses gloo itself, and on rank " + std::to_string(rank_) + " nvx replaces gloo",
                "set NVX_AS=gloo (or call nvx.serve_as) on all ranks, or on none. If it is set everywhere, nvx is not "
                "loaded on the ranks that use gloo: install it there and unset TORCH_DEVICE_BACKEND_AUTOLOAD");
  }
}

void GlooRanks::leave() { store_->remove(key_of(rank_)); }

}  // namespace nvx
