#include "group/setup/setup.h"

#include <unistd.h>

#include <algorithm>

#include "base/config.h"
#include "base/contain.h"
#include "base/hash.h"
#include "base/log.h"
#include "base/round_up.h"
#include "base/text.h"
#include "net/descriptors.h"
#include "net/tcp/job_key.h"

namespace nvx {
namespace {

constexpr const char* kAddresses = "addresses";
constexpr size_t kMostOnHost = 4096;  ///< ranks: a pad for all ranks of a large world would not fit into an arena
constexpr size_t kMostDescriptors =
    2048;  ///< limit of the reservation: a rank seldom connects to more than a thousand others
std::string address_of(int rank) { return "address/" + std::to_string(rank); }

std::chrono::milliseconds set_up_time(const GroupOptions& options) {
  return options.timeout.count() > 0 ? options.timeout : std::chrono::milliseconds(std::chrono::hours(24));
}

void begin_counters(kernel::Pad pad, uint32_t epoch) {
  const Stamp first = stamp(epoch, 0);
  for (Flag* flag : {&pad.done(), &pad.staged(), &pad.reduced(), &pad.fetched()}) flag->value.store(first);
  for (uint32_t e = 0; e < kernel::kEpochs; ++e) pad.arrival(e).flag.value.store(first);
}

}  // namespace

SetUp::Made SetUp::run() {
  std::shared_ptr<ShmRegistry> shm;
  std::optional<IpcSocket> ipc;  // closes after give_up(): a rank that finds it closed finds the note, too
  try {
    shm = members_.shm = ShmRegistry::instance();
    ipc.emplace(*shm);
    begin(*ipc);
    try {
      find_members(*ipc);
      map_peers(*ipc);
      await_ready(*ipc);
      if (members_.topology.hosts.size() > 1) open_port();
    } catch (const Error& error) {
      store_setup_.check_for_cause(error.code());
      throw;
    }
    store_setup_.stop_sharing();
  } catch (const std::exception& error) {
    give_up(made(), failure_of(error));
    throw;
  }
  return made();
}

SetUp::Made SetUp::made() { return {std::move(members_), std::move(port_), std::move(membership_)}; }

void SetUp::give_up(Made made, const Failure& why) {
  Failure note = store_setup_.received_note().value_or(why);
  if (!store_setup_.received_note()) {
    note.cause = rank_name(rank()) + " (pid " + std::to_string(getpid()) + ", host " + own_host_name(options_.host) +
                 ") failed to create group " + name() + ": " + why.cause;
    if (note.advice.empty()) note.advice = see_log_of(rank_name(rank()));  // a store's own error has none
  }
  const Members& members = made.members;
  if (members.pad_span) {
    const kernel::Pad own(members.shm->arena().at(members.pad_span.offset), size());
    own.header().failure.write(note);
    own.header().presence.store(kernel::Presence::kLeft);
  }
  contain("leaving a note in the store that a group cannot be made", [&] { store_setup_.leave_notes(note); });
  if (made.port)
    contain("notifying other hosts that a group cannot be made", [&] {
      notify_other_hosts(*made.port, members.topology, note);
      made.port->messenger().flush_reports();
    });
  made.membership.reset();  // first: Liveness calls the port while this exists
  made.port.reset();
  if (!members.pad_span) return;
  Arena& arena = members.shm->arena();
  if (!members.topology.ranks.empty() && members.memory.size() == members.ranks_of_host().size())
    return arena.free_when(members.pad_span, members.all_peers_gone());
  arena.free_when(members.pad_span,
                  [end = Deadline::after(set_up_time(options_))] { return end.passed(Clock::now()); });
}

/// Allocates the pad, and joins the set-up. The pad has room for many ranks until the ranks of this host are known.
void SetUp::begin(const IpcSocket& ipc) {
  Arena& arena = members_.shm->arena();
  members_.name = name();
  members_.rank = rank();
  members_.first_epoch = options_.first_epoch;
  members_.pad_span = arena.allocate(kernel::PadLayout(std::min(size(), kMostOnHost)).bytes(),
                                     /*left=*/members_.shm->leases().unleased());
  deadline_ = Deadline::after(set_up_time(options_));
  kernel::Pad own(arena.at(members_.pad_span.offset), size());
  own.header().rank = rank();
  own.header().presence.store(kernel::Presence::kHere);
  begin_counters(own, options_.first_epoch);
  Hello self = describe_self(rank(), options_.host);
  Config mine = config();
  mine.kernels = members_.kernels = options_.kernels.value_or(mine.kernels);
  members_.tune = options_.tune;
  tuning_ = tuning_of(options_.tune);
  mine.tune = tuning_.text();
  self.agreed = mine.agreed();
  std::string settings;
  for (const std::string& value : mine.agreed_values()) settings += value + '\n';
  if (const net::JobKey* const key = net::JobKey::instance()) self.key_tag = key->tag();
  self.arena = arena.id();
  self.pad_offset = members_.pad_span.offset;
  if (!options_.global_ranks.empty()) {
    Hash members;
    for (const uint64_t rank : options_.global_ranks) members.add(rank);
    self.members = members.value();
  }
  self.ranks = uint32_t(size());
  std::ranges::copy(net::own_addresses(), self.addresses.begin());
  put(self.socket, ipc.name());
  store_setup_.begin(self, settings);
}

/// Gets all ranks and their hosts from the store.
void SetUp::find_members(IpcSocket& ipc) {
  members_.topology =
      Topology::from(store_setup_.exchange_hellos(deadline_), [&](int r) { return store_setup_.settings_of(r); });
  members_.topology.global_ranks = options_.global_ranks;
  members_.generation = store_setup_.generation();
  static std::atomic<bool> logged{false};
  const std::string warning = rank() == 0 ? members_.topology.host_warning() : "";
  if (!warning.empty() && !logged.exchange(true))
    NVX_LOG(kWarn, "%s. Next: %s", warning.c_str(), Topology::kHostAdvice);
  ipc.serve_with(store_setup_.relay());
  members_.facts = facts_of(members_.topology, rank(), tuning_);
  if (const std::string tuned = members_.facts.tuning.text(); !tuned.empty())
    NVX_LOG(kInfo, "group %s: tuned: %s", name().c_str(), tuned.c_str());
  members_.id = members_.topology.ranks[0].nonce;
  kernel::Pad own(members_.shm->arena().at(members_.pad_span.offset), size());
  own.header().group = members_.id;
  shrink_pad();
}

/// The pad was allocated before the ranks of this host were known, and only these use it.
void SetUp::shrink_pad() {
  Span& span = members_.pad_span;
  const size_t ranks = members_.ranks_of_host().size();
  const size_t bytes = round_up(kernel::PadLayout(ranks).bytes(), kSpanPage);
  if (bytes > span.bytes)
    throw Error(Code::kInvalid, "nvx: " + std::to_string(ranks) + " ranks are on one host, at most " +
                                    std::to_string(kMostOnHost) + " may be");
  if (bytes == span.bytes) return;
  members_.shm->arena().free({span.offset + bytes, span.bytes - bytes});
  span.bytes = bytes;
}

void SetUp::map_peers(IpcSocket& ipc) {
  ShmRegistry& shm = *members_.shm;
  const Topology& topology = members_.topology;
  const std::vector<int>& here = members_.ranks_of_host();
  std::vector<std::shared_ptr<PeerProcess>>& peers = members_.peers;
  const ArenaId own = shm.arena().id();
  std::vector<IpcSocket::Wanted> wanted;
  peers.resize(here.size());
  for (size_t s = 0; s < peers.size(); ++s) {
    const Hello& hello = topology.ranks[size_t(here[s])];
    if (hello.arena == own || (peers[s] = shm.find(hello.arena))) continue;
    const auto same = [&](const IpcSocket::Wanted& w) { return w.id == hello.arena; };
    if (std::none_of(wanted.begin(), wanted.end(), same))
      wanted.push_back({hello.arena, hello.socket, pid_t(hello.pid), topology.describe(here[s]), here[s]});
  }
  const auto check_peers = [&] {
    store_setup_.poll([] { return std::string("the memory of a rank of this host has not arrived"); });
  };
  const auto fetched = ipc.fetch(wanted, deadline_, check_peers);
  const size_t bytes = kernel::PadLayout(peers.size()).bytes();
  for (size_t s = 0; s < peers.size(); ++s) {
    const size_t r = size_t(here[s]);
    const Hello& hello = topology.ranks[r];
    if (const auto it = fetched.find(hello.arena); it != fetched.end()) peers[s] = it->second;
    if (hello.pad_offset % 4096 != 0 || hello.pad_offset > Arena::kBytes || bytes > Arena::kBytes - hello.pad_offset) {
      throw Error(Code::kMismatch, "nvx: " + topology.describe(int(r)) + " reports memory outside its arena",
                  kOneVersion);
    }
    std::byte* arena = peers[s] ? peers[s]->at(0) : shm.arena().at(0);
    // `held`: its users' copies of the function keep the mapping.
    const auto tensors = [&shm, peer = peers[s].get(), held = std::shared_ptr<const Mapping>()]() mutable {
      if (!peer) return shm.tensors().all();
      if (!held) held = peer->tensors();
      return std::span(held->base(), held->size());
    };
    members_.memory.push_back({arena, Arena::kBytes, arena + hello.pad_offset, tensors});
    if (r >= options_.global_ranks.size() || !peers[s]) continue;
    std::function<bool()> has_left;
    if (options_.whole_job) {
      has_left = [&header = kernel::Pad(arena + hello.pad_offset, peers.size()).header(), id = members_.id] {
        return header.group == id && header.presence.load() == kernel::Presence::kLeft;
      };
    }
    shm.note_rank(options_.global_ranks[r], peers[s], membership_, std::move(has_left));
  }
  store_setup_.watch([this] { check_local_ranks(); });
}

void SetUp::await_ready(IpcSocket& ipc) {
  signal(members_.own_pad().header().ready.flag, 1);
  for (int s = 0; s < members_.local_ranks(); ++s) {
    const int r = members_.ranks_of_host()[size_t(s)];
    const kernel::PadHeader& header = members_.pad(s).header();
    for (int polls = 0; !reached(header.ready.flag.value.load(std::memory_order_seq_cst), 1); ++polls) {
      if (polls < 200) {
        relax();
        continue;
      }
      ipc.serve(std::chrono::microseconds(polls < 2000 ? 50 : 1000));
      if (polls % 64 != 0) continue;
      store_setup_.poll([&] { return members_.topology.describe(r) + " has not mapped the memory of the others"; });
      if (deadline_.passed(Clock::now())) {
        const std::string why = ipc.has_unanswered() ? std::string(": ") + kTooManyInFlight : "";
        throw Error(
            Code::kTimeout,
            "nvx: " + members_.topology.describe(r) + " did not finish creating group " + name() + " in time" + why,
            why.empty() ? see_log_of(rank_name(r)) : kRaiseLimit);
      }
    }
    if (header.group != members_.id || header.rank != r) {
      throw Error(Code::kMismatch,
                  "nvx: the shared memory of " + members_.topology.describe(r) + " does not belong to group " + name());
    }
  }
}

/// Throws if any rank of this host cannot become ready. A rank waits for all of them, directly or through others, so
/// all ranks end with the same cause.
void SetUp::check_local_ranks() {
  for (int s = 0; s < members_.local_ranks(); ++s) {
    if (s == members_.local_rank()) continue;
    members_.warn_if_stopped(s);
    const kernel::PadHeader& header = members_.pad(s).header();
    const std::string description = "nvx: " + members_.describe_local_rank(s);
    const std::string advice = see_log_of(rank_name(members_.ranks_of_host()[size_t(s)]));
    const uint64_t group = header.group;
    const bool of_this_group = group == members_.id || group == 0;  // 0: the rank does not know the others yet
    if (of_this_group && header.failure.readable()) {
      const std::string writer = rank_name(members_.ranks_of_host()[size_t(s)]);
      store_setup_.throw_note(header.failure.read(options_.size).value_or(unreadable_note(writer)));
    }
    const kernel::Presence presence = header.presence.load();
    const bool ready = reached(header.ready.flag.value.load(std::memory_order_seq_cst), 1);
    if (!ready && (!of_this_group || presence != kernel::Presence::kHere))
      throw Error(Code::kPeerLeft, description + " has failed to create group " + name(), advice);
    if (members_.dead(s) && presence == kernel::Presence::kHere) {
      const ExitStatus status = members_.peers[size_t(s)]->exit_status();
      throw Error(Failure{.code = Code::kPeerDied,
                          .cause = members_.describe_local_rank(s) + " has ended" + text_of(status, " (", ")") +
                                   " while group " + name() + " was being created",
                          .advice = advice,
                          .lost_rank = members_.ranks_of_host()[size_t(s)],
                          .exit_status = status});
    }
  }
}

/// The source addresses of connections from ranks on other hosts.
std::vector<AddressPrefix> SetUp::sources() const {
  std::vector<AddressPrefix> sources;
  const std::vector<Hello>& hellos = members_.topology.ranks;
  for (int r = 0; r < options_.size; ++r) {
    if (members_.local_rank_of(r) >= 0) continue;
    const std::vector<AddressPrefix> more = sources_of(hellos[size_t(r)], hellos[size_t(rank())]);
    sources.insert(sources.end(), more.begin(), more.end());
  }
  return sources;
}

std::shared_ptr<net::Messenger> SetUp::messenger() const {
  try {
    return options_.messenger ? options_.messenger() : net::Messenger::instance(store_.host());
  } catch (const Error& error) {
    const std::string warning = members_.topology.host_warning();
    if (warning.empty()) throw;
    throw Error(error.code(), "nvx: " + warning + ", and " + error.failure().cause, Topology::kHostAdvice);
  }
}

/// A rank publishes its address after it has opened its port and its link admits all peers. So no message arrives for
/// an unknown group, and no connection of a peer is dropped.
void SetUp::open_port() {
  const std::shared_ptr<net::Messenger> messenger = this->messenger();
  messenger->admit(sources());
  port_ = std::make_unique<net::GroupPort>(messenger, members_.id, rank(), options_.size);
  net::grow_descriptor_table(std::min(kMostDescriptors, 2 * (size_t(options_.size) - members_.ranks_of_host().size())));
  const std::vector<std::vector<std::byte>> addresses = exchange_addresses(messenger->address());
  const Topology& topology = members_.topology;
  for (int r = 0; r < options_.size; ++r) {
    if (members_.local_rank_of(r) >= 0) continue;
    try {
      MutexLock lock(port_->mutex());
      port_->connect(r, addresses[size_t(r)]);
      if (size_t(r) >= options_.global_ranks.size()) continue;
      std::function<bool()> has_left;
      if (options_.whole_job) {
        has_left = [port = port_.get(), r] {
          port->mutex().held_by_caller();
          port->ping(r);
          const auto departure = port->departure(r);
          return departure && departure->left();
        };
      }
      messenger->liveness().note_rank(options_.global_ranks[size_t(r)], *port_->process_of(r), membership_,
                                      topology.location(r), std::move(has_left));
    } catch (const Error& error) {
      Failure failure = error.failure();
      failure.cause += " (" + topology.describe(r) + ", seen from " + topology.describe(rank()) + ")";
      throw Error(failure);
    }
  }
  if (rank() == 0) NVX_LOG(kInfo, "group %s: between hosts: %s", name().c_str(), messenger->describe().c_str());
}

/// Returns the network addresses of all ranks.
std::vector<std::vector<std::byte>> SetUp::exchange_addresses(const std::vector<std::byte>& own) {
  const auto fetch = [this](const std::string& what, int writer) {
    if (auto value = store_setup_.fetch(what, writer, deadline_)) return *std::move(value);
    throw Error(Code::kPeerFailed,
                "nvx: " + members_.topology.describe(writer) + " has started again to create group " + name());
  };
  if (rank() != 0) {
    const auto* begin = reinterpret_cast<const uint8_t*>(own.data());
    store_setup_.publish(address_of(rank()), {begin, begin + own.size()});
    return decode_addresses(fetch(kAddresses, 0), size());
  }
  std::vector<std::vector<std::byte>> addresses(size());
  addresses[0] = own;
  for (int r = 1; r < options_.size; ++r) {
    const std::vector<uint8_t> value = fetch(address_of(r), r);
    const auto* begin = reinterpret_cast<const std::byte*>(value.data());
    addresses[size_t(r)].assign(begin, begin + value.size());
  }
  store_setup_.publish(kAddresses, encode_addresses(addresses));
  return addresses;
}

}  // namespace nvx
