#include "group/p2p/symmetric.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

#include "base/per_process.h"
#include "memory/driver/gpu_info.h"

namespace nvx {
namespace {

constexpr const char* kPurpose = "symmetric memory";

/// Whether this rank has mapped all blocks. Comes from peers.
struct Mapped {
  uint32_t done;
  char why_not[124];
};

void check_one_host(const Members& members) {
  const auto& hosts = members.topology.hosts;
  if (hosts.size() == 1) return;
  NVX_CHECK(false, "symmetric memory needs all ranks of a group on one host, and those of group " + members.name +
                       " are on " + std::to_string(hosts.size()) + ": " + members.topology.describe(hosts[0][0]) +
                       " and " + members.topology.describe(hosts[1][0]) +
                       ". Next: rendezvous in a group of the ranks of one host (dist.new_subgroups)");
}

std::string text_of(const SymmetricBlock& block) {
  return std::to_string(block.bytes) + " bytes and a signal pad of " + std::to_string(block.pad_bytes);
}

void check_alike(const Members& members, int rank, const SymmetricBlock& block, const SymmetricBlock& first) {
  NVX_CHECK(block.is_like(first), "blocks differ in group " + members.name + ": " + members.topology.describe(0) +
                                      " has " + text_of(first) + ", " + members.topology.describe(rank) + " has " +
                                      text_of(block) + ". Next: call symm_mem.empty with one size on all ranks");
}

/// `offset`: in a peer's memory, as the peer has sent it.
void check_part(uint64_t size, uint64_t offset, uint64_t bytes) {
  NVX_CHECK(offset % kSpanPage == 0 && offset <= size && bytes <= size - offset,
            "it describes a block outside its memory");
}

std::byte* part_of(std::span<std::byte> memory, uint64_t offset, uint64_t bytes) {
  check_part(memory.size(), offset, bytes);
  return memory.data() + offset;
}

}  // namespace

Symmetric::Symmetric(const Core& core, const SymmetricBlock& mine)
    : mine_(mine),
      rank_(core.members.rank),
      fork_generation_(fork_generation()),
      shm_(core.members.shm),
      flags_span_(shm_->tensors().allocate(ReleaseFlags::bytes(size_t(core.members.size())))),
      peers_(size_t(core.members.size())),
      base_(peers_.size()),
      release_flags_(peers_.size()) {
  if (!flags_span_) return;
  std::byte* const at = shm_->tensors().at(flags_span_);
  std::memset(at, 0, ReleaseFlags::bytes(peers_.size()));
  release_flags_[size_t(rank_)] = new (at) ReleaseFlags;
}

/// Maps between two exchanges: after the first all ranks decide alike, after the second no rank uses memory that a peer
/// has not mapped.
std::shared_ptr<Symmetric> Symmetric::rendezvous(const Parts& group, const SymmetricBlock& mine, std::byte* base) {
  Core& core = group.core;
  const Members& members = core.members;
  check_one_host(members);
  const std::shared_ptr<Symmetric> made(new Symmetric(core, mine));
  const Info info{mine, made->flags_span_.offset, bool(made->flags_span_)};
  const std::vector<Info> infos = gather(core, group.execute, core.next_number(), kPurpose, info);
  for (int r = 0; r < members.size(); ++r) check_alike(members, r, infos[size_t(r)].block, infos[0].block);
  Mapped mapped{1, {}};
  try {
    made->map(group, infos, base);
  } catch (const Error& error) {
    mapped.done = 0;
    nvx::put(mapped.why_not, error.reason());
  }
  made->shares_flags_ = true;  // also if this exchange fails: it may end on other ranks
  const std::vector<Mapped> all = gather(core, group.execute, core.next_number(), kPurpose, mapped);
  made->shares_flags_ = std::ranges::all_of(all, [](const Mapped& there) { return there.done != 0; });
  for (int r = 0; r < members.size(); ++r) {
    NVX_CHECK(all[size_t(r)].done, "no symmetric memory in group " + members.name + ": " +
                                       members.topology.describe(r) + " cannot map " + text_of(all[size_t(r)].why_not));
  }
  made->begin_use(group);
  return made;
}

void Symmetric::map(const Parts& group, const std::vector<Info>& infos, std::byte* base) {
  const Members& members = group.core.members;
  base_[size_t(rank_)] = base;
  for (int r = 0; r < size(); ++r) {
    try {
      map_peer(group, r, infos[size_t(r)]);
    } catch (const Error& error) {
      throw Error(error.code(), "nvx: the memory of " + members.topology.describe(r) + ": " + error.reason());
    }
  }
}

void Symmetric::map_peer(const Parts& group, int rank, const Info& info) {
  const Members& members = group.core.members;
  const int s = members.local_rank_of(rank);
  NVX_CHECK(info.has_flags, "it has none left");
  Peer& peer = peers_[size_t(rank)];
  peer.process = members.peers[size_t(s)];
  if (peer.process) peer.tensors = peer.process->tensors();
  const auto tensors = peer.tensors ? std::span(peer.tensors->base(), peer.tensors->size()) : shm_->tensors().all();
  std::byte* const flags = part_of(tensors, info.flags_at, ReleaseFlags::bytes(peers_.size()));
  release_flags_[size_t(rank)] = reinterpret_cast<ReleaseFlags*>(flags);
  if (rank == rank_) return;
  const uint64_t bytes = mine_.pad + mine_.pad_bytes;
  if (!group.pool_of) {
    base_[size_t(rank)] = part_of(tensors, info.block.offset, bytes);
    return;
  }
  peer.pool = group.pool_of(s);
  NVX_CHECK(peer.pool && !peer.pool->is_given_up(), "its GPU's memory is not reachable from this GPU");
  const Deadline deadline = Deadline::after(group.core.waits.span_of(std::chrono::milliseconds(0)));
  check_part(UINT64_MAX, info.block.offset, bytes);
  map_on_thread("mapping its pool", peer.pool, info.block.offset + bytes, deadline);
  base_[size_t(rank)] = reinterpret_cast<std::byte*>(peer.pool->base() + info.block.offset);
}

void Symmetric::begin_use(const Parts& group) {
  leaving_ = std::make_shared<Leaving>();
  leaving_->on_gpu = bool(group.pool_of);
  for (int r = 0; r < size(); ++r) {
    if (r != rank_) leaving_->peers.emplace_back(peers_[size_t(r)].process, &release_flags_[size_t(rank_)]->left(r));
  }
}

bool Symmetric::Leaving::all_left() {
  if (done.load(std::memory_order_acquire)) return true;
  const bool all = std::all_of(peers.begin(), peers.end(), [&](const auto& peer) {
    const auto& [process, left] = peer;
    return left->load(std::memory_order_acquire) != 0 ||
           (process && (on_gpu ? process->torn_down() : process->released()));
  });
  if (all) done.store(true, std::memory_order_release);
  return all;
}

/// A GPU's pool may call after the last group of this process, so it keeps the memory of the release flags. Host memory
/// is that memory's own, and must not keep it.
std::function<bool()> Symmetric::released() const {
  return [leaving = leaving_, memory = leaving_->on_gpu ? shm_ : nullptr] { return leaving->all_left(); };
}

/// Release: a rank that sees that this one has left sees its accesses done. If the rendezvous failed on this rank
/// alone, its peers may still set its release flags, so these stay.
Symmetric::~Symmetric() {
  if (fork_generation_ != fork_generation()) {
    new auto(std::move(peers_));  // a forked child has not inherited their memory
    new auto(shm_);
    return;
  }
  if (!shares_flags_ && flags_span_) shm_->tensors().free(flags_span_);
  if (!leaving_) return;
  for (int r = 0; r < size(); ++r) {
    if (r != rank_) release_flags_[size_t(r)]->left(rank_).store(1, std::memory_order_release);
  }
  shm_->tensors().free_when(flags_span_, [leaving = leaving_] { return leaving->all_left(); });
}

// --- signals

std::atomic<uint32_t>& Symmetric::word(int receiver, int sender, uint64_t channel) const {
  static_assert(sizeof(std::atomic<uint32_t>) == sizeof(uint32_t) && std::atomic<uint32_t>::is_always_lock_free);
  return reinterpret_cast<std::atomic<uint32_t>*>(pad(receiver))[channel * base_.size() + size_t(sender)];
}

/// Waits until the word is `from` and sets it to `to`. Sequentially consistent with the count of sleepers, as in
/// `signal()`: either the peer sees the new word, or this rank sees that it sleeps.
Status Symmetric::swap(Core& core, const char* what, int peer, std::atomic<uint32_t>& word, uint32_t from, uint32_t to,
                       const WaitRules& rules) {
  const auto swapped = [&] {
    uint32_t seen = word.load(std::memory_order_seq_cst);
    return seen == from && word.compare_exchange_strong(seen, to, std::memory_order_seq_cst);
  };
  const Waited how = nvx::wait(release_flags_[size_t(rank_)]->flag, swapped, core.members.local_rank_of(peer), rules);
  if (how != Waited::kReached) return core.failures.explain_wait(how, {{peer}, ""}, what, rules.deadline);
  Flag& theirs = release_flags_[size_t(peer)]->flag;
  theirs.core.store(this_core(), std::memory_order_relaxed);
  if (theirs.sleepers.load(std::memory_order_seq_cst) != 0) ring(theirs);
  return {};
}

Status Symmetric::raise_signal(Core& core, const char* what, int to, uint64_t channel, const WaitRules& rules) {
  return swap(core, what, to, word(to, rank_, channel), 0, 1, rules);
}

Status Symmetric::clear_signal(Core& core, const char* what, int from, uint64_t channel, const WaitRules& rules) {
  return swap(core, what, from, word(rank_, from, channel), 1, 0, rules);
}

Status Symmetric::put(Core& core, int to, uint64_t channel, std::chrono::milliseconds timeout) {
  constexpr const char* kWhat = "symm_mem put_signal";
  NVX_TRY(core.failures.check_alive(kWhat));
  return raise_signal(core, kWhat, to, channel, core.waits.rules(timeout, Runner::kCaller));
}

Status Symmetric::wait(Core& core, int from, uint64_t channel, std::chrono::milliseconds timeout) {
  constexpr const char* kWhat = "symm_mem wait_signal";
  NVX_TRY(core.failures.check_alive(kWhat));
  return clear_signal(core, kWhat, from, channel, core.waits.rules(timeout, Runner::kCaller));
}

Status Symmetric::barrier(Core& core, uint64_t channel, std::chrono::milliseconds timeout) {
  constexpr const char* kWhat = "symm_mem barrier";
  NVX_TRY(core.failures.check_alive(kWhat));
  const WaitRules rules = core.waits.rules(timeout, Runner::kCaller);
  for (int step = 1; step < size(); ++step) NVX_TRY(raise_signal(core, kWhat, (rank_ + step) % size(), channel, rules));
  for (int step = 1; step < size(); ++step) NVX_TRY(clear_signal(core, kWhat, (rank_ + step) % size(), channel, rules));
  return {};
}

}  // namespace nvx
