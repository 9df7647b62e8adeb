// How the ranks of a group find each other: through the store, then through Unix sockets, then through memory.

#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "base/config.h"
#include "base/log.h"
#include "group/group.h"
#include "group/mailbox.h"

namespace nvx {
namespace {

constexpr const char* kTableKey = "nvx/table";
std::string hello_key(int rank) { return "nvx/" + std::to_string(rank); }

std::chrono::milliseconds set_up_time(const GroupOptions& options) {
  return options.timeout.count() > 0 ? options.timeout : std::chrono::milliseconds(std::chrono::hours(24));
}

PlanFacts facts_of(const Topology& topology) {
  PlanFacts facts;
  facts.ranks = topology.ranks.size();
  facts.cores = topology.cores;
  if (topology.l2_bytes) facts.l2_bytes = topology.l2_bytes;
  if (topology.l3_bytes) facts.l3_bytes = topology.l3_bytes;
  if (config().algorithm == "one_shot") facts.force = PlanFacts::Force::kOneShot;
  if (config().algorithm == "pipelined") facts.force = PlanFacts::Force::kPipelined;
  facts.one_shot_bytes = size_t(std::max<int64_t>(config().one_shot_bytes, 0));
  facts.lease_bytes = size_t(std::max<int64_t>(config().lease_kb, 0)) << 10;
  return facts;
}

/// Spinning takes the core from the very rank that is waited for, where ranks outnumber cores.
std::chrono::microseconds spin_of(const PlanFacts& facts) {
  constexpr std::chrono::microseconds kMost{200};
  if (config().spin_us >= 0) return std::chrono::microseconds(config().spin_us);
  return facts.ranks > facts.cores ? std::chrono::microseconds(0) : kMost;
}

void begin_counters(kernel::Pad pad, uint32_t epoch) {
  const Stamp first = stamp(epoch, 0);
  for (Flag* flag : {&pad.done(), &pad.staged(), &pad.reduced(), &pad.fetched()}) flag->value.store(first);
  for (uint32_t e = 0; e < kernel::kEpochs; ++e) pad.arrival(e).flag.value.store(first);
}

}  // namespace

Group::Group(Store& store, const GroupOptions& options)
    : options_(options),
      fork_generation_(nvx::fork_generation()),
      neighbours_(Neighbours::here()),
      lane_(std::make_shared<Lane>()),
      timeout_ms_(config().timeout_s > 0 ? config().timeout_s * 1000 : options.timeout.count()) {
  const size_t size = size_t(options.size);
  pad_span_ = neighbours_->arena().allocate(kernel::PadLayout(size).bytes());
  try {
    meet(store);
  } catch (...) {
    // Nobody can have read this pad's slots yet; whoever maps it finds that its rank has left.
    memory_.clear();
    neighbours_->arena().free(pad_span_);
    throw;
  }
  channel_ = std::make_unique<kernel::Channel>(rank(), memory_, options.first_epoch);
  mailbox_ = std::make_unique<Mailbox>(*this);
  neighbours_->leases().join(this);
  if (rank() == 0) {
    NVX_LOG(kInfo, "group %s: %d ranks on host %s, %zu cores, L3 %zu KiB; copy and reduce loops: %s", name().c_str(),
            this->size(), topology_.ranks[0].host_name, topology_.cores, topology_.l3_bytes >> 10,
            kernel::level().name);
    NVX_LOG(kInfo, "group %s: %s", name().c_str(), explain(kernel::Collective::kAllReduce, 1 << 20, facts_).c_str());
  }
}

void Group::meet(Store& store) {
  const Deadline deadline = Deadline::after(set_up_time(options_));
  kernel::Pad own(neighbours_->arena().at(pad_span_.offset), size_t(size()));
  own.header().rank = rank();
  own.header().presence.store(kernel::Presence::kHere);
  begin_counters(own, options_.first_epoch);
  Doorway door(*neighbours_);
  topology_ = Topology::from(exchange_hellos(store, door.name(), deadline));
  facts_ = facts_of(topology_);
  if (const auto spin = spin_of(facts_); spin.count() > 0) patience_ = std::make_unique<Patience>(spin);
  id_ = topology_.ranks[0].nonce;
  own.header().group = id_;
  map_peers(door, deadline);
  await_ready(door, deadline);
}

/// A value that another rank writes. Waits in slices, to see if a rank that this process has met before has ended
/// meanwhile.
std::vector<uint8_t> Group::fetch(Store& store, const std::string& key, const Deadline& deadline) {
  constexpr std::chrono::milliseconds kSlice{200};
  for (;;) {
    if (auto value = store.get(key, kSlice)) return *std::move(value);
    for (const uint64_t global : options_.global_ranks) {
      const std::shared_ptr<Neighbour> met = neighbours_->met(global);
      if (met && met->dead()) {
        throw Error(Code::kPeerDied, "nvx: global rank " + std::to_string(global) + " (pid " +
                                         std::to_string(met->pid()) + ") has ended" + met->how_it_ended(" (", ")") +
                                         " while group " + name() + " was being made");
      }
    }
    if (deadline.passed(Clock::now())) {
      throw Error(Code::kTimeout, "nvx: the ranks of group " + name() + " did not all come in " +
                                      std::to_string(int64_t(deadline.elapsed_s())) + " s: rank " +
                                      std::to_string(rank()) + " waits for the key " + key + " in the store");
    }
  }
}

std::vector<Hello> Group::exchange_hellos(Store& store, const std::string& door, const Deadline& deadline) {
  Hello self = describe_self(rank());
  self.arena = neighbours_->arena().id();
  self.pad_offset = pad_span_.offset;
  self.pad_bytes = pad_span_.bytes;
  std::memcpy(self.door, door.data(), std::min(door.size(), sizeof self.door - 1));
  if (size() == 1) return {self};
  if (rank() != 0) {
    store.set(hello_key(rank()), encode({&self, 1}));
    return decode(fetch(store, kTableKey, deadline), size_t(size()));
  }
  std::vector<Hello> hellos{self};
  for (int r = 1; r < size(); ++r) hellos.push_back(decode(fetch(store, hello_key(r), deadline), 1).front());
  store.set(kTableKey, encode(hellos));
  return hellos;
}

void Group::map_peers(Doorway& door, const Deadline& deadline) {
  const ArenaId own = neighbours_->arena().id();
  std::vector<Doorway::Wanted> wanted;
  peers_.resize(topology_.ranks.size());
  for (size_t r = 0; r < peers_.size(); ++r) {
    const Hello& hello = topology_.ranks[r];
    if (hello.arena == own || (peers_[r] = neighbours_->find(hello.arena))) continue;
    const auto same = [&](const Doorway::Wanted& w) { return w.id == hello.arena; };
    if (std::none_of(wanted.begin(), wanted.end(), same)) wanted.push_back({hello.arena, hello.door, pid_t(hello.pid)});
  }
  const auto fetched = door.fetch(wanted, deadline);
  const size_t bytes = kernel::PadLayout(topology_.ranks.size()).bytes();
  for (size_t r = 0; r < peers_.size(); ++r) {
    const Hello& hello = topology_.ranks[r];
    if (const auto it = fetched.find(hello.arena); it != fetched.end()) peers_[r] = it->second;
    if (hello.pad_offset % 4096 != 0 || hello.pad_offset > Arena::kBytes || bytes > Arena::kBytes - hello.pad_offset) {
      throw Error(Code::kMismatch, "nvx: " + topology_.describe(int(r)) + " describes memory that it cannot have");
    }
    if (r < options_.global_ranks.size() && peers_[r])
      neighbours_->meet(options_.global_ranks[r], peers_[r], standing_);
    std::byte* arena = peers_[r] ? peers_[r]->at(0) : neighbours_->arena().at(0);
    memory_.push_back({arena, Arena::kBytes, arena + hello.pad_offset});
  }
}

void Group::await_ready(Doorway& door, const Deadline& deadline) {
  signal(pad(rank()).header().ready.flag, 1);
  for (int r = 0; r < size(); ++r) {
    const kernel::PadHeader& header = pad(r).header();
    for (int looks = 0; !reached(header.ready.flag.value.load(std::memory_order_seq_cst), 1); ++looks) {
      if (looks < 200) {
        relax();
        continue;
      }
      door.serve(std::chrono::microseconds(looks < 2000 ? 50 : 1000));
      if (looks % 64 != 0) continue;
      if (peers_[size_t(r)] && peers_[size_t(r)]->dead()) {
        throw Error(Code::kPeerDied,
                    "nvx: " + topology_.describe(r) + " ended while group " + name() + " was being set up");
      }
      if (deadline.passed(Clock::now())) {
        throw Error(Code::kTimeout,
                    "nvx: " + topology_.describe(r) + " did not finish setting up group " + name() + " in time");
      }
    }
    if (header.group != id_ || header.rank != r) {
      throw Error(Code::kMismatch,
                  "nvx: the memory of " + topology_.describe(r) + " belongs to another group than " + name());
    }
  }
}

}  // namespace nvx
