// How the ranks of a group find each other: through the store, then through Unix sockets, then through memory.

#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <thread>

#include "base/config.h"
#include "base/contain.h"
#include "base/interrupt.h"
#include "base/log.h"
#include "group/device_side.h"
#include "group/group.h"
#include "group/mailbox.h"
#include "group/roster.h"
#include "group/spread.h"
#include "group/store_notes.h"
#include "net/port.h"

namespace nvx {
namespace {

/// What ranks write into the store is of one set-up: a store, and a prefix in it, may serve several, one after another.
constexpr const char* kHellos = "table";
constexpr const char* kAddresses = "addresses";
constexpr const char* kSize = "size";  // of the group, as rank 0 makes it
constexpr int64_t kMostDoubles = 8;    // who are told that they are
std::string hello_of(int rank) { return std::to_string(rank); }
std::string address_of(int rank) { return "address/" + std::to_string(rank); }
std::string claim_of(int64_t pid, const std::string& host) { return "pid " + std::to_string(pid) + " on host " + host; }
std::string generation_of(int rank) { return "nvx/generation/" + std::to_string(rank); }

std::chrono::milliseconds set_up_time(const GroupOptions& options) {
  return options.timeout.count() > 0 ? options.timeout : std::chrono::milliseconds(std::chrono::hours(24));
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

PlanFacts facts_of(const Topology& topology, int rank) {
  PlanFacts facts;
  facts.ranks = topology.hosts[size_t(topology.host_of[size_t(rank)])].size();
  facts.hosts = topology.hosts.size();
  facts.rails = topology.rails();
  facts.world = topology.ranks.size();
  facts.cores = topology.cores;
  if (topology.l2_bytes) facts.l2_bytes = topology.l2_bytes;
  if (topology.l3_bytes) facts.l3_bytes = topology.l3_bytes;
  const bool no_one_shot = config().one_shot_bytes == 0;
  if (config().algorithm == "pipelined" || no_one_shot) facts.force = PlanFacts::Force::kPipelined;
  if (config().algorithm == "one_shot") facts.force = PlanFacts::Force::kOneShot;
  facts.one_shot_bytes = size_t(std::max<int64_t>(config().one_shot_bytes, 0));
  facts.lease_bytes = size_t(config().lease_kb) << 10;
  return facts;
}

Group::Group(Store& store, const GroupOptions& options)
    : options_(options),
      fork_generation_(nvx::fork_generation()),
      lane_(std::make_shared<Lane>()),
      timeout_ms_((config().timeout.count() > 0 ? config().timeout : options.timeout).count()) {
  try {
    if (size() > 1) generation_ = store.add(generation_of(rank()), 1);  // first, as failures are told under it
    tell_size(store);
    neighbours_ = Neighbours::here();
    pad_span_ = neighbours_->arena().allocate(kernel::PadLayout(size_t(size())).bytes());
    meet(store);
    channel_ = std::make_unique<kernel::Channel>(seat(), memory_, options.first_epoch);
    if (port_) spread_ = std::make_unique<Spread>(*this, *port_);
    mailbox_ = std::make_unique<Mailbox>(*this);
  } catch (const Error& error) {
    give_up(store, error.code(), error.what());
    throw;
  } catch (const std::exception& error) {
    give_up(store, Code::kSystem, error.what());
    throw;
  }
  if (port_) {
    MutexLock lock(port_->mutex());
    port_->on_failure([this](const net::Port::Failure& failure) { pass_on(failure); });
  }
  if (rank() == 0) {
    NVX_LOG(kInfo, "group %s: %s; %zu cores, L3 %zu KiB; copy and reduce loops: %s", name().c_str(),
            topology_.describe().c_str(), topology_.cores, topology_.l3_bytes >> 10, kernel::level().name);
    NVX_LOG(kInfo, "group %s: %s", name().c_str(), explain(kernel::Collective::kAllReduce, 1 << 20, facts_).c_str());
  }
  neighbours_->leases().join(this);
  Roster::here().join(*this);  // last: who joins is a whole group
}

void Group::meet(Store& store) {
  const Deadline deadline = Deadline::after(set_up_time(options_));
  kernel::Pad own(neighbours_->arena().at(pad_span_.offset), size_t(size()));
  own.header().rank = rank();
  own.header().presence.store(kernel::Presence::kHere);
  begin_counters(own, options_.first_epoch);
  Doorway door(*neighbours_);
  topology_ = Topology::from(exchange_hellos(store, door.name(), deadline));
  topology_.global_ranks = options_.global_ranks;
  door.hand_out(handout_.get());
  facts_ = facts_of(topology_, rank());
  if (const auto spin = spin_of(facts_); spin.count() > 0) patience_ = std::make_unique<Patience>(spin);
  id_ = topology_.ranks[0].nonce;
  own.header().group = id_;
  shrink_pad();
  try {
    map_peers(door, deadline);
    await_ready(door, deadline);
  } catch (const Error& error) {
    if (error.code() == Code::kPeerDied || error.code() == Code::kPeerLeft) look_for_failures(store);
    throw;
  }
  if (topology_.hosts.size() > 1) open_port(store, deadline);
  handout_.reset();
  receipt_.reset();
}

/// The pad was made before it was known who else is on this host, which alone has a part in it.
void Group::shrink_pad() {
  const size_t bytes = (kernel::PadLayout(here().size()).bytes() + kSpanPage - 1) / kSpanPage * kSpanPage;
  if (bytes >= pad_span_.bytes) return;
  neighbours_->arena().free({pad_span_.offset + bytes, pad_span_.bytes - bytes});
  pad_span_.bytes = bytes;
}

/// Tells whoever waits for this rank. Peers may have mapped its pad, or do so yet: it rests until they cannot look at
/// it any more, and until then they find there that its rank has left, and why.
void Group::give_up(Store& store, Code code, const std::string& why) {
  const std::string note = !told_.empty() ? told_
                                          : rank_name(rank()) + " (pid " + std::to_string(getpid()) + ", host " +
                                                own_host_name(options_.host) + ") gave up making group " + name() +
                                                ": " + without_name(why);
  if (pad_span_) {
    const kernel::Pad own(neighbours_->arena().at(pad_span_.offset), size_t(size()));
    write_note(own.header().failure, code, note);
    own.header().presence.store(kernel::Presence::kLeft);
  }
  contain("the store, told that a group cannot be made,", [&] {
    for (int64_t g = generation_; g != 0 && g <= std::max(generation_, doubled_until_); ++g) {
      leave_note(store, key_in(g, ""), note);
    }
    if (const int64_t ahead = set_up_ahead(store)) leave_note(store, key_in(ahead, ""), note);
    // As a rule rank 0 serves the store, and others look into it once a second.
    constexpr std::chrono::milliseconds kMost{1500};
    if (rank() == 0 && generation_ != 0 && code != Code::kInterrupted) await_notes(store, key(""), size(), kMost);
  });
  if (port_)
    contain("the wire, told that a group cannot be made,",
            [&] { tell_other_hosts(told_.empty() ? code : Code::kPeerFailed, note); });
  mailbox_.reset();
  spread_.reset();
  port_.reset();
  if (!pad_span_) return;
  if (!topology_.ranks.empty() && memory_.size() == here().size())
    return neighbours_->arena().bury(pad_span_, everybody_gone());
  neighbours_->arena().bury(pad_span_,
                            [until = Clock::now() + set_up_time(options_)] { return Clock::now() >= until; });
}

void Group::end_as_told(const std::string& note) {
  told_ = printable(note);
  const Status status =
      met_in({Code::kPeerFailed, "nvx: " + told_}, "this is " + rank_name(rank()) + ", which was making it");
  throw Error(status.code(), status.what());
}

/// Throws if a rank has given this set-up up, wherever it is.
void Group::look_for_failures(Store& store) {
  if (generation_ == 0) return;
  if (const auto note = read_note(store, key(""))) end_as_told(*note);
}

/// Throws if a rank that this process has met in another group has ended meanwhile. Of those on other hosts only the
/// one that is waited for is looked after: to ask means to connect.
void Group::look_for_deaths(int writer) {
  const std::shared_ptr<net::Wire> wire = options_.wire ? options_.wire() : net::Wire::opened();
  for (size_t r = 0; r < options_.global_ranks.size(); ++r) {
    const uint64_t global = options_.global_ranks[r];
    const std::string who = "global rank " + std::to_string(global);
    const std::string when = " while group " + name() + " was being made. " + see_log_of(who);
    const std::shared_ptr<Neighbour> met = neighbours_->met(global);
    if (met && met->dead()) {
      throw Error(Code::kPeerDied, "nvx: " + who + " (pid " + std::to_string(met->pid()) + ", host " +
                                       own_host_name(options_.host) + ") has ended" + met->how_it_ended(" (", ")") +
                                       when);
    }
    if (!wire || int(r) != writer) continue;
    MutexLock lock(wire->mutex());
    const std::string lost = wire->fate(global);
    if (!lost.empty()) throw Error(Code::kPeerDied, "nvx: " + who + " " + lost + "," + when);
  }
}

/// For what the set-up waits for.
void Group::stop_if_unwanted() const {
  if (stop_wanted())
    throw Error(Code::kInterrupted, "nvx: " + stop_words() + " while group " + name() + " was being made");
  if (options_.unwanted && options_.unwanted())
    throw Error(Code::kAborted,
                "nvx: group " + name() + " was aborted on rank " + std::to_string(rank()) + " while it was being made");
}

/// Of many ranks, the first that comes on each host reads the store for all of it, so that the store hands out one
/// table a host. Where that rank is gone, or late, the others read for themselves.
void Group::choose_reader(Store& store, uint64_t host) {
  constexpr std::chrono::milliseconds kSpan{2000};
  handout_.reset();
  receipt_.reset();
  if (size() < options_.shared_reads_from || rank() == 0) return;
  const std::string reader = key("reader/" + std::to_string(host));
  if (store.add(reader + "/asked", 1) == 1) {
    handout_ = std::make_unique<Handout>();
    store.set(reader, {handout_->name().begin(), handout_->name().end()});
  } else if (const auto named = store.get(reader, kSpan)) {
    receipt_ = std::make_unique<Receipt>(std::string(named->begin(), named->end()));
  }
}

/// What rank 0 writes for all, from the store or from who reads it for this host.
std::optional<std::vector<uint8_t>> Group::take(Store& store, const std::string& what, std::chrono::milliseconds span) {
  if (receipt_ && receipt_->open()) {
    auto value = receipt_->next(span);
    if (value || receipt_->open()) return value;
  }
  auto value = store.get(key(what), span);
  try {
    if (value && handout_) handout_->give(*value);
  } catch (const Error&) {
    handout_.reset();  // the others read for themselves
  }
  return value;
}

/// Ranks that have not begun this set-up, of the first 256. Each counts its set-up in the store first.
std::string Group::missing_in_set_up(Store& store, int writer) {
  constexpr int kMostAsked = 256, kMostNamed = 8;
  std::vector<std::string> missing;
  for (int r = 0; r < std::min(size(), kMostAsked); ++r) {
    if (store.add(generation_of(r), 0) < generation_) missing.push_back(rank_name(r).substr(5));
  }
  if (missing.empty()) return rank_name(writer) + " has come, but says nothing more";
  std::string named;
  for (size_t i = 0; i < std::min<size_t>(missing.size(), kMostNamed); ++i) named += (i ? ", " : "") + missing[i];
  if (missing.size() > kMostNamed) named += " and others";
  if (missing.size() == 1) return "rank " + named + " has not";
  const bool server_too = missing.front() == "0";  // which torch holds back as long as anybody is missing
  return "ranks " + named + " have not" +
         (server_too ? " (where rank 0 serves the store, it first waits there until all have connected)" : "");
}

/// A value that another rank writes; nothing if that rank has begun anew without it. Waits in slices, to see if
/// somebody has ended or given up meanwhile; the store is asked for that less often when it takes long, as all ranks
/// do.
std::optional<std::vector<uint8_t>> Group::fetch(Store& store, const std::string& what, int writer,
                                                 const Deadline& deadline) {
  constexpr std::chrono::milliseconds kSlice{200};
  for (int slice = 0;; ++slice) {
    if (auto value = take(store, what, kSlice)) return value;
    stop_if_unwanted();
    if (slice < 10 || slice % 5 == 0) {
      look_for_a_double(store);
      if (store.add(generation_of(writer), 0) > generation_) return store.get(key(what), kSlice);
      look_for_failures(store);
    }
    look_for_deaths(writer);
    if (deadline.passed(Clock::now())) {
      throw Error(Code::kTimeout,
                  "nvx: the ranks of group " + name() + " did not all come in " + seconds(deadline) + ": " +
                      missing_in_set_up(store, writer) + earlier_claim(store) + "; this is " + rank_name(rank()) +
                      ", which waits for the key " + key(what) +
                      " in the store. Next: has every rank been started, with this backend and world size, and "
                      "does each make this group? See the logs of those that have not come");
    }
  }
}

/// Counters agree unless a rank died or gave up and began again, or joins a world that has grown. Nobody of this world
/// can have finished the earlier set-up, so a rank that is behind adopts the higher count.
void Group::catch_up(Store& store, int rank) {
  look_for_a_double(store);
  const int64_t theirs = store.add(generation_of(rank), 0);
  generation_ = store.add(generation_of(this->rank()), theirs - generation_);
  tell_size(store);
}

/// For ranks that have counted fewer set-ups than rank 0: whether they belong to this one. In the first one nobody has.
void Group::tell_size(Store& store) {
  if (rank() != 0 || generation_ <= 1) return;
  const std::string text = std::to_string(size());
  store.set(key(kSize), {text.begin(), text.end()});
}

/// The set-up that rank 0 has begun after the one that this rank has counted, if it is of as many ranks: then the
/// others wait for this rank in that one, and look there for a note of its failure. Else 0.
int64_t Group::set_up_ahead(Store& store) {
  constexpr std::chrono::milliseconds kSpan{200};  // rank 0 says it at once
  if (generation_ == 0 || rank() == 0) return 0;
  const int64_t theirs = store.add(generation_of(0), 0);
  if (theirs <= generation_) return 0;
  const auto ranks = store.get(key_in(theirs, kSize), kSpan);
  return ranks && std::string(ranks->begin(), ranks->end()) == std::to_string(size()) ? theirs : 0;
}

/// Whether rank 0 begins another set-up within a few seconds. Worlds of several sizes may be made one after another
/// over one store: a rank that joins has counted fewer set-ups than rank 0, which takes part in all, and finds the
/// table of one that it had no part in, perhaps before rank 0 has begun the one that it is for.
bool Group::rank_0_begins_anew(Store& store, const Deadline& deadline) {
  constexpr std::chrono::milliseconds kSpan{3000}, kPause{50};
  const Deadline limit = Deadline::after(kSpan);
  while (store.add(generation_of(0), 0) <= generation_) {
    if (limit.passed(Clock::now()) || deadline.passed(Clock::now())) return false;
    stop_if_unwanted();
    std::this_thread::sleep_for(kPause);
  }
  return true;
}

/// Throws if another process has counted as this rank while this one is making the group: nobody else may, and it would
/// wait for a set-up of its own. It is told, too.
void Group::look_for_a_double(Store& store) {
  const int64_t counted = store.add(generation_of(rank()), 0);
  if (counted > generation_) end_as_doubled(store, counted);
}

void Group::end_as_doubled(Store& store, int64_t their_generation) {
  doubled_until_ = std::min(their_generation, generation_ + kMostDoubles);
  const std::string own = claim_of(getpid(), own_host_name(options_.host)), other = claimant(store, their_generation);
  throw Error(Code::kMismatch, "nvx: rank " + std::to_string(rank()) + " of group " + name() +
                                   " was claimed twice: by " + own + " and by " +
                                   (other.empty() ? "another process" : other) +
                                   ". Next: give each process a rank of its own (RANK, init_process_group(rank=))");
}

/// Whoever was this rank before may have ended, or have made the group that this process waits for: nobody here can
/// tell.
std::string Group::earlier_claim(Store& store) {
  const std::string who = generation_ > 1 ? claimant(store, generation_ - 1) : "";
  const std::string own_host = own_host_name(options_.host).substr(0, sizeof Hello::host_name - 1);
  if (who.empty() || who == claim_of(getpid(), own_host)) return "";
  return "; rank " + std::to_string(rank()) + " was claimed before, by " + who +
         ", with which the others may have gone on";
}

/// Who has counted that set-up for this rank; empty where it has not said so.
std::string Group::claimant(Store& store, int64_t generation) {
  constexpr std::chrono::milliseconds kSpan{2000};
  std::string who;
  contain_and(
      [&] {
        const auto value = store.get(key_in(generation, hello_of(rank())), kSpan);
        if (!value) return;
        const Hello hello = decode(*value, 1).front();
        who = claim_of(hello.pid, printable(hello.host_name));
      },
      [](const std::exception*) {});
  return who;
}

/// What rank 0 says of all ranks. Throws Error if this rank, as it is now, is not among them.
std::vector<Hello> Group::read_table(std::span<const uint8_t> table, uint64_t own_nonce) const {
  std::vector<Hello> hellos = decode(table, size_t(size()));
  if (hellos[size_t(rank())].nonce == own_nonce) return hellos;
  throw Error(Code::kMismatch, "nvx: the store holds the table of another set-up of group " + name() +
                                   ": was it used before, by ranks that it has forgotten?");
}

std::vector<Hello> Group::exchange_hellos(Store& store, const std::string& door, const Deadline& deadline) {
  Hello self = describe_self(rank(), options_.host);
  self.arena = neighbours_->arena().id();
  self.pad_offset = pad_span_.offset;
  self.pad_bytes = pad_span_.bytes;
  std::memcpy(self.door, door.data(), std::min(door.size(), sizeof self.door - 1));
  if (size() == 1) return {self};
  if (rank() == 0 && generation_ > 1) store.set(key(hello_of(0)), encode({&self, 1}));  // for who may have come before
  while (rank() != 0) {
    store.set(key(hello_of(rank())), encode({&self, 1}));
    choose_reader(store, self.host);
    if (const auto table = fetch(store, kHellos, 0, deadline)) {
      try {
        return read_table(*table, self.nonce);
      } catch (const Error&) {
        if (!rank_0_begins_anew(store, deadline)) throw;
      }
    }
    catch_up(store, 0);
  }
  std::vector<Hello> hellos{self};
  for (int r = 1; r < size(); ++r) {
    if (const auto hello = fetch(store, hello_of(r), r, deadline)) {
      hellos.push_back(decode(*hello, 1).front());
      continue;
    }
    catch_up(store, r);
    hellos.resize(1);
    r = 0;
  }
  store.set(key(kHellos), encode(hellos));
  return hellos;
}

void Group::map_peers(Doorway& door, const Deadline& deadline) {
  const ArenaId own = neighbours_->arena().id();
  std::vector<Doorway::Wanted> wanted;
  peers_.resize(here().size());
  for (size_t s = 0; s < peers_.size(); ++s) {
    const Hello& hello = topology_.ranks[size_t(here()[s])];
    if (hello.arena == own || (peers_[s] = neighbours_->find(hello.arena))) continue;
    const auto same = [&](const Doorway::Wanted& w) { return w.id == hello.arena; };
    if (std::none_of(wanted.begin(), wanted.end(), same))
      wanted.push_back({hello.arena, hello.door, pid_t(hello.pid), topology_.describe(here()[s])});
  }
  const auto fetched = door.fetch(wanted, deadline);
  const size_t bytes = kernel::PadLayout(peers_.size()).bytes();
  for (size_t s = 0; s < peers_.size(); ++s) {
    const size_t r = size_t(here()[s]);
    const Hello& hello = topology_.ranks[r];
    if (const auto it = fetched.find(hello.arena); it != fetched.end()) peers_[s] = it->second;
    if (hello.pad_offset % 4096 != 0 || hello.pad_offset > Arena::kBytes || bytes > Arena::kBytes - hello.pad_offset) {
      throw Error(Code::kMismatch, "nvx: " + topology_.describe(int(r)) + " describes memory that it cannot have");
    }
    if (r < options_.global_ranks.size() && peers_[s])
      neighbours_->meet(options_.global_ranks[r], peers_[s], standing_);
    std::byte* arena = peers_[s] ? peers_[s]->at(0) : neighbours_->arena().at(0);
    memory_.push_back({arena, Arena::kBytes, arena + hello.pad_offset});
  }
}

void Group::await_ready(Doorway& door, const Deadline& deadline) {
  signal(own_pad().header().ready.flag, 1);
  for (int s = 0; s < seats(); ++s) {
    const int r = here()[size_t(s)];
    const kernel::PadHeader& header = pad(s).header();
    for (int looks = 0; !reached(header.ready.flag.value.load(std::memory_order_seq_cst), 1); ++looks) {
      if (looks < 200) {
        relax();
        continue;
      }
      door.serve(std::chrono::microseconds(looks < 2000 ? 50 : 1000));
      if (looks % 64 != 0) continue;
      stop_if_unwanted();
      check_seats();
      if (deadline.passed(Clock::now())) {
        throw Error(Code::kTimeout, "nvx: " + topology_.describe(r) + " did not finish setting up group " + name() +
                                        " in time. " + see_log_of(rank_name(r)));
      }
    }
    if (header.group != id_ || header.rank != r) {
      throw Error(Code::kMismatch,
                  "nvx: the memory of " + topology_.describe(r) + " belongs to another group than " + name());
    }
  }
}

/// Throws if any rank of this host cannot become ready: those that wait for it, and for others that wait for it, end
/// alike.
void Group::check_seats() {
  for (int s = 0; s < seats(); ++s) {
    if (s == seat()) continue;
    const kernel::PadHeader& header = pad(s).header();
    const std::string who = "nvx: " + describe_seat(s);
    const std::string advice = ". " + see_log_of(rank_name(here()[size_t(s)]));
    const uint64_t group = header.group;
    const bool of_this_group = group == id_ || group == 0;  // 0: it does not know the name yet
    if (of_this_group && header.failure.readable()) end_as_told(read_note(header.failure));
    const kernel::Presence presence = header.presence.load();
    const bool ready = reached(header.ready.flag.value.load(std::memory_order_seq_cst), 1);
    if (!ready && (!of_this_group || presence != kernel::Presence::kHere))
      throw Error(Code::kPeerLeft, who + " has given up making group " + name() + advice);
    if (dead(s) && presence == kernel::Presence::kHere) {
      throw Error(Code::kPeerDied, who + " ended" + peers_[size_t(s)]->how_it_ended(" (", ")") + " while group " +
                                       name() + " was being set up" + advice);
    }
  }
}

/// A rank gives its address away when its port is open: so nothing can come for a group that is not there yet.
void Group::open_port(Store& store, const Deadline& deadline) {
  const std::shared_ptr<net::Wire> wire = options_.wire ? options_.wire() : net::Wire::here(store.host());
  port_ = std::make_unique<net::Port>(wire, id_, rank(), size());
  std::vector<std::vector<std::byte>> addresses(static_cast<size_t>(size()));
  addresses[size_t(rank())] = wire->address();
  const auto as_value = [](std::span<const std::byte> bytes) {
    const auto* begin = reinterpret_cast<const uint8_t*>(bytes.data());
    return std::vector<uint8_t>(begin, begin + bytes.size());
  };
  const auto address = [&](const std::string& what, int writer) {
    if (auto value = fetch(store, what, writer, deadline)) return *std::move(value);
    throw Error(Code::kPeerFailed, "nvx: " + topology_.describe(writer) + " has begun anew to set up group " + name());
  };
  if (rank() != 0) {
    store.set(key(address_of(rank())), as_value(addresses[size_t(rank())]));
    addresses = decode_addresses(address(kAddresses, 0), size_t(size()));
  } else {
    for (int r = 1; r < size(); ++r) {
      const std::vector<uint8_t> value = address(address_of(r), r);
      const auto* begin = reinterpret_cast<const std::byte*>(value.data());
      addresses[size_t(r)].assign(begin, begin + value.size());
    }
    store.set(key(kAddresses), encode_addresses(addresses));
  }
  for (int r = 0; r < size(); ++r) {
    if (seat_of(r) >= 0) continue;
    try {
      MutexLock lock(port_->mutex());
      port_->connect(r, addresses[size_t(r)]);
      if (size_t(r) < options_.global_ranks.size())
        port_->meet(r, options_.global_ranks[size_t(r)], standing_, topology_.whereabouts(r));
    } catch (const Error& error) {
      throw Error(error.code(), std::string(error.what()) + " (" + topology_.describe(r) + ", seen from " +
                                    topology_.describe(rank()) + ")");
    }
  }
  if (rank() == 0) NVX_LOG(kInfo, "group %s: between hosts: %s", name().c_str(), wire->describe().c_str());
}

}  // namespace nvx
