#include "group/setup/store_setup.h"

#include <unistd.h>

#include <algorithm>
#include <bit>
#include <thread>

#include "base/contain.h"
#include "base/interrupt.h"
#include "base/log.h"
#include "base/text.h"
#include "group/setup/store_notes.h"
#include "memory/shm/shm_registry.h"
#include "net/messenger.h"

namespace nvx {
namespace {

constexpr const char* kSize = "size";             // of the group, as written by rank 0
constexpr std::chrono::seconds kBetweenReads{2};  // of the store if another rank reads for this one
constexpr int64_t kMostDoubles = 8;               // set-ups of duplicate processes that get a note
std::string hello_of(int rank) { return std::to_string(rank); }
std::string claim_of(int64_t pid, const std::string& host) { return "pid " + std::to_string(pid) + " on host " + host; }

}  // namespace

void StoreSetUp::begin(const Hello& own, const std::string& settings) {
  own_ = own;
  settings_ = settings;
  if (size() == 1) {
    if (options_.whole_job) publish_world_size(store_, rank(), size(), options_.host);
    return;
  }
  const int64_t next = store_.add(generation_of(rank()), 0) + 1;
  enter(next);
  generation_ = store_.add(generation_of(rank()), 1);
  if (generation_ != next) enter(generation_);  // another process has counted as this rank
  publish_size();
}

/// Lets the ranks of this host, and the first host to arrive, see this process, then writes its hello.
void StoreSetUp::enter(int64_t generation) {
  host_.enter(generation, own_);
  inter_host_.enter(generation, own_, host_.relay() != nullptr);
  const std::string value = std::string(reinterpret_cast<const char*>(&own_), sizeof own_) + settings_;
  store_.set(key_in(generation, hello_of(rank())), {value.begin(), value.end()});
}

std::string StoreSetUp::settings_of(int rank) {
  std::string text;
  contain("reading the settings of a rank from the store", [&] {
    const auto value = store_.get(key(hello_of(rank)), std::chrono::milliseconds(0));
    if (value && value->size() > sizeof(Hello)) text.assign(value->begin() + sizeof(Hello), value->end());
  });
  return text;
}

std::vector<Hello> StoreSetUp::exchange_hellos(const Deadline& deadline) {
  if (size() == 1) return {own_};
  return rank() == 0 ? collect_hellos(deadline) : read_hellos(deadline);
}

/// For rank 0, which writes one table for all ranks.
std::vector<Hello> StoreSetUp::collect_hellos(const Deadline& deadline) {
  std::vector<Hello> hellos{own_};
  for (int r = 1; r < size(); ++r) {
    if (const auto value = fetch(hello_of(r), r, deadline)) {
      const Hello hello = decode_first(*value);
      if (hello.ranks != own_.ranks) throw different_sizes(hello, hello.ranks, "rank 0", own_.ranks);
      if (hello.members != own_.members && hello.members != 0 && own_.members != 0)
        throw different_members(hello, options_.name);
      hellos.push_back(hello);
      continue;
    }
    adopt_generation(r);
    hellos.resize(1);
    r = 0;
  }
  publish(kHellos, encode(hellos));
  return hellos;
}

std::vector<Hello> StoreSetUp::read_hellos(const Deadline& deadline) {
  for (;;) {
    if (const auto table = fetch(kHellos, 0, deadline)) {
      try {
        return read_table(*table);
      } catch (const Error&) {
        if (!rank_0_restarts(deadline)) throw;
      }
    }
    adopt_generation(0);
  }
}

/// The hellos of all ranks, as rank 0 wrote them. Throws Error if this rank's current one is not among them.
std::vector<Hello> StoreSetUp::read_table(std::span<const uint8_t> table) const {
  std::vector<Hello> hellos = decode(table, size_t(size()));
  if (hellos[size_t(rank())].nonce == own_.nonce) return hellos;
  throw Error(Code::kMismatch, "nvx: the store holds the table of an earlier group " + options_.name, kNewStore);
}

/// Counters are equal unless a rank died or gave up and began again, or joins a world that has grown. No rank of this
/// world can have finished the earlier set-up, so a rank that is behind adopts the higher count.
void StoreSetUp::adopt_generation(int rank) {
  check_duplicate_rank();
  const int64_t theirs = store_.add(generation_of(rank), 0);
  generation_ = store_.add(generation_of(this->rank()), theirs - generation_);
  enter(generation_);
  publish_size();
}

/// Lets ranks that have counted fewer set-ups than rank 0 find out whether they belong to this one. There are none at
/// the first set-up.
void StoreSetUp::publish_size() {
  if (rank() != 0 || generation_ <= 1) return;
  const std::string text = std::to_string(size());
  store_.set(key(kSize), {text.begin(), text.end()});
}

/// The set-up that rank 0 has begun after this rank's one, if both have the same number of ranks: the other ranks wait
/// for this rank there, and read its note there. Otherwise 0.
int64_t StoreSetUp::set_up_ahead() {
  constexpr std::chrono::milliseconds kSpan{200};  // rank 0 writes it at once
  if (generation_ == 0 || rank() == 0) return 0;
  const int64_t theirs = store_.add(generation_of(0), 0);
  if (theirs <= generation_) return 0;
  const auto ranks = store_.get(key_in(theirs, kSize), kSpan);
  return ranks && std::string(ranks->begin(), ranks->end()) == std::to_string(size()) ? theirs : 0;
}

/// Whether rank 0 begins another set-up within a few seconds. Worlds of several sizes may be made one after another
/// over one store. A rank that joins has counted fewer set-ups than rank 0, which takes part in all of them: it may
/// find the table of an earlier set-up before rank 0 has begun the one that it belongs to.
bool StoreSetUp::rank_0_restarts(const Deadline& deadline) {
  constexpr std::chrono::milliseconds kSpan{3000}, kPause{50};
  const Deadline limit = Deadline::after(kSpan);
  while (store_.add(generation_of(0), 0) <= generation_) {
    if (limit.passed(Clock::now()) || deadline.passed(Clock::now())) return false;
    stop_if_aborted();
    std::this_thread::sleep_for(kPause);
  }
  return true;
}

void StoreSetUp::publish(const std::string& what, const std::vector<uint8_t>& value) {
  store_.set(key(what), value);
  if (rank() == 0) host_.publish(value);  // the values of rank 0 are for all ranks
}

/// Waits in slices, and checks in between for ranks that have ended or given up.
std::optional<StoreSetUp::Value> StoreSetUp::fetch(const std::string& what, int writer, const Deadline& deadline) {
  constexpr std::chrono::milliseconds kSlice{20}, kSpan{200};
  next_read_ = Clock::now() + kBetweenReads;  // until then, the leader has time to pass this value on
  for (;;) {
    if (auto value = take(what, writer, kSlice)) return value;
    stop_if_aborted();
    if (due(&next_count_, Clock::now() - began_ < std::chrono::seconds(2))) {
      check_duplicate_rank();
      if (store_.add(generation_of(writer), 0) > generation_) return store_.get(key(what), kSpan);
    }
    try {
      poll([&] { return missing(writer); });
      if (Clock::now() >= next_deaths_) {
        next_deaths_ = Clock::now() + size() * std::chrono::microseconds(100);
        const int remote = next_pinged(writer);
        prefer_note([&] {
          // First, because a peer gets one ping a second, and this one also queries the group of the whole job.
          check_for_deaths(options_, inter_host_.knows(remote) ? kNoRank : remote);
          inter_host_.check(remote);
        });
      }
    } catch (const Error& error) {
      // If the value is there, other ranks may have completed the group with it: they would not read a note of this
      // rank.
      if (received_note_ || (error.code() != Code::kPeerDied && error.code() != Code::kPeerLeft)) throw;
      next_read_ = {};  // of the store, not by way of the leader
      if (auto value = take(what, writer, std::chrono::milliseconds(0))) return value;
      throw;
    }
    if (deadline.passed(Clock::now())) {
      NVX_LOG(kInfo, "group %s: the key %s is not in the store", options_.name.c_str(), key(what).c_str());
      throw Error(Code::kTimeout,
                  "nvx: timed out after " + seconds(deadline) + ", waiting for the ranks of group " + options_.name +
                      ": " + missing(writer) + earlier_claim() + "; this is " + rank_name(rank()),
                  "check that every rank runs, with this backend and world size, and creates this group with the same "
                  "list of ranks in new_group(); see the logs of the missing ranks");
    }
  }
}

/// Whether it is time to read the store again: often on the rank that leads its host, for all of that host.
bool StoreSetUp::due(Clock::time_point* next, bool often) const {
  constexpr std::chrono::milliseconds kOften{200}, kSeldom{1000};
  const auto now = Clock::now();
  if (now < *next) return false;
  *next = now + (often || !host_.follows() ? kOften : kSeldom);
  return true;
}

/// The rank to ping next, if it is on another host and a group knows it: by turns the one that this rank waits for
/// and another one. Rank 0 pings all, and each of the others some, as that opens a connection: each rank is pinged by a
/// few, in case rank 0 comes late.
int StoreSetUp::next_pinged(int writer) {
  if (++death_checks_ % 2 != 0) return writer;
  const int turn = death_checks_ / 2;
  return (rank() + (rank() == 0 ? turn : 1 << turn % std::bit_width(unsigned(size() - 1)))) % size();
}

/// A value from the store, or from the rank that reads it for this host. The store is the fallback if another user
/// floods that rank with connections.
std::optional<StoreSetUp::Value> StoreSetUp::take(const std::string& what, int writer, std::chrono::milliseconds span) {
  const bool for_all = writer == 0 && rank() != 0;
  if (for_all && host_.reads_leader()) {
    auto value = host_.next(span);
    if (value || (host_.follows() && Clock::now() < next_read_)) return value;
    next_read_ = Clock::now() + kBetweenReads;
    if (host_.follows() && !(value = store_.get(key(what), std::chrono::milliseconds(0)))) return value;
    host_.read_itself();
    if (value) return value;
  }
  auto value = store_.get(key(what), span);
  if (value && for_all) host_.publish(*value);
  return value;
}

// --- the other ranks

void StoreSetUp::poll(const std::function<std::string()>& awaited) {
  stop_if_aborted();
  if (size() == 1) return;
  if (rank() == 0 && host_.follows()) (void)host_.next(std::chrono::milliseconds(0));  // shows when the leader goes
  const bool left = host_.proceed();
  inter_host_.proceed();
  if (const auto reason = host_.reason()) throw_note(*reason);
  prefer_note([&] { check_host_ ? check_host_() : host_.check(); });
  if (due(&next_note_, /*often=*/false) || left) check_for_notes();
  if (host_.follows() || Clock::now() < next_reminder_) return;
  next_reminder_ += options_.reminder;
  NVX_LOG(kWarn, "group %s of %d ranks is not complete after %s: %s; this is %s (host %s)", options_.name.c_str(),
          size(), seconds(Deadline{began_}).c_str(), awaited().c_str(), rank_name(rank()).c_str(),
          printable(own_.host_name).c_str());
}

/// Calls `check`, which throws if a process has ended. If a rank has left a note by then, throws the note's failure.
void StoreSetUp::prefer_note(const std::function<void()>& check) {
  try {
    check();
  } catch (const Error& error) {
    if (error.code() == Code::kPeerDied) check_for_notes();
    throw;
  }
}

void StoreSetUp::check_for_cause(Code code) {
  if (code == Code::kPeerDied || code == Code::kPeerLeft) {
    check_for_notes();
    check_host_ ? check_host_() : host_.check();
  }
  if (code != Code::kSystem) return;
  constexpr std::chrono::milliseconds kExitDelay{50}, kPause{5};  // between the end of the store and of its process
  for (const auto end = Clock::now() + kExitDelay; Clock::now() < end; std::this_thread::sleep_for(kPause)) {
    if (host_.follows()) (void)host_.next(std::chrono::milliseconds(0));
    if (const auto reason = host_.reason()) throw_note(*reason);
    check_host_ ? check_host_() : host_.check();
    inter_host_.check(0, /*at_once=*/true);
    check_for_deaths(options_, inter_host_.knows(0) ? kNoRank : 0);  // rank 0 usually served the store
  }
}

/// Names the ranks, among the first 256, that have not begun this set-up. A rank first counts its set-up in the store.
std::string StoreSetUp::missing(int writer) {
  constexpr int kMostChecked = 256;
  constexpr size_t kMostNamed = 8;
  std::vector<std::string> ranks;
  for (int r = 0; r < std::min(size(), kMostChecked); ++r) {
    if (store_.add(generation_of(r), 0) >= generation_) continue;
    ranks.push_back(ranks.size() < kMostNamed ? describe(r).substr(5) : "");
  }
  if (ranks.empty()) return describe(writer) + " has joined, but has not written its part";
  std::string named;
  for (size_t i = 0; i < std::min(ranks.size(), kMostNamed); ++i) named += (i ? ", " : "") + ranks[i];
  if (ranks.size() > kMostNamed) named += " and others";
  const auto world = published_world_size(store_);
  const bool joined = world && world->rank < size() && store_.add(generation_of(world->rank), 0) >= generation_;
  const std::string other = world && !joined ? "; " + world->text : "";
  if (ranks.size() == 1) return "rank " + named + " has not joined" + other;
  const bool server_too = ranks.front() == "0";  // torch blocks the serving rank while any rank is missing
  return "ranks " + named + " have not joined" +
         (server_too ? " (if rank 0 serves the store, torch blocks it until all ranks have connected)" : "") + other;
}

/// "rank 3 (pid 4711, host a01, stopped by a signal (state T))", for a rank that an earlier group knows, or
/// that has written its hello.
std::string StoreSetUp::describe(int rank) {
  std::string place;
  if (const auto peer = host_.process_of(rank)) {
    const std::string state = peer->process().state();
    place = "pid " + std::to_string(peer->pid()) + ", host " + own_host_name(options_.host) +
            (state.empty() ? "" : ", " + state);
  }
  if (const auto messenger = messenger_of(options_);
      place.empty() && messenger && size_t(rank) < options_.global_ranks.size()) {
    MutexLock lock(messenger->mutex());
    place = messenger->liveness().location(options_.global_ranks[size_t(rank)]);
    if (!place.empty()) place = place.substr(1, place.size() - 2);
  }
  if (place.empty() && size_t(rank) < options_.processes.size()) place = options_.processes[size_t(rank)].place;
  if (place.empty()) {
    contain_and(
        [&] {
          const auto hello = store_.get(key(hello_of(rank)), std::chrono::milliseconds(0));
          if (hello) place = place_of(decode_first(*hello));
        },
        [](const std::exception*) {});  // it is damaged, which its reader throws
  }
  return described(rank_name(rank), place);
}

/// Throws if another process has counted a set-up as this rank during this set-up. That process waits in a set-up of
/// its own, and gets a note too.
void StoreSetUp::check_duplicate_rank() {
  const int64_t counted = store_.add(generation_of(rank()), 0);
  if (counted > generation_) throw_duplicate_rank(counted);
}

void StoreSetUp::throw_duplicate_rank(int64_t their_generation) {
  doubled_until_ = std::min(their_generation, generation_ + kMostDoubles);
  const std::string own = claim_of(getpid(), own_host_name(options_.host)), other = claimant(their_generation);
  throw Error(Code::kMismatch,
              "nvx: rank " + std::to_string(rank()) + " of group " + options_.name + " was claimed twice: by " + own +
                  " and by " + (other.empty() ? "another process" : other),
              options_.whole_job || options_.global_ranks.empty()
                  ? "give each process a rank of its own (RANK, init_process_group(rank=))"
                  : kSameGroups);
}

/// The earlier process of this rank may have ended, or may have created the group for which this process waits. This
/// process cannot distinguish the two.
std::string StoreSetUp::earlier_claim() {
  const std::string claimed_by = generation_ > 1 ? claimant(generation_ - 1) : "";
  const std::string own_host = own_host_name(options_.host).substr(0, sizeof Hello::host_name - 1);
  if (claimed_by.empty() || claimed_by == claim_of(getpid(), own_host)) return "";
  return "; rank " + std::to_string(rank()) + " was joined before by " + claimed_by +
         ", with which the other ranks may have continued";
}

/// The process that has counted that set-up for this rank. Empty if it has written no hello.
std::string StoreSetUp::claimant(int64_t generation) {
  constexpr std::chrono::milliseconds kSpan{2000};
  std::string claimed_by;
  contain_and(
      [&] {
        const auto value = store_.get(key_in(generation, hello_of(rank())), kSpan);
        if (!value) return;
        const Hello hello = decode_first(*value);
        claimed_by = claim_of(hello.pid, printable(hello.host_name));
      },
      [](const std::exception*) {});
  return claimed_by;
}

void StoreSetUp::check_for_notes() {
  if (generation_ == 0) return;
  if (const auto note = read_note(store_, key(""), size())) throw_note(*note);
}

void StoreSetUp::throw_note(const Failure& note) {
  received_note_ = note;
  throw Error(with_context(note, "this is " + rank_name(rank()) + ", which was creating it"));
}

void StoreSetUp::stop_if_aborted() const {
  if (stop_requested())
    throw Error(Code::kInterrupted,
                "nvx: " + interrupt_text() + " while group " + options_.name + " was being created");
  if (options_.aborted && options_.aborted())
    throw Error(Code::kAborted, "nvx: group " + options_.name + " was aborted on rank " + std::to_string(rank()) +
                                    " while it was being created");
}

void StoreSetUp::leave_notes(const Failure& note) {
  const Store::Hurry hurry(store_);
  host_.give_up(note);
  if (store_.is_lost()) return;
  if (size() > 1 && generation_ == 0) generation_ = store_.add(generation_of(rank()), 1);
  for (int64_t g = generation_; g != 0 && g <= std::max(generation_, doubled_until_); ++g) {
    leave_note(store_, key_in(g, ""), note);
  }
  if (const int64_t ahead = set_up_ahead()) leave_note(store_, key_in(ahead, ""), note);
  // Rank 0 usually serves the store, and the others read it at least once a second.
  constexpr std::chrono::milliseconds kJoin{200}, kMost{800};
  if (rank() != 0 || generation_ == 0 || note.reported_code() == Code::kInterrupted) return;
  await_notes(store_, key(""), live_ranks(note, /*joined=*/false), kJoin);  // some may be about to join
  await_notes(store_, key(""), live_ranks(note, /*joined=*/true), kMost - kJoin);
}

/// The number of ranks that live, of all or of those that have joined this set-up: each of these leaves a note too.
int64_t StoreSetUp::live_ranks(const Failure& note, bool joined) {
  constexpr int kMostChecked = 256;
  int64_t ranks = std::max(0, size() - kMostChecked);
  for (int r = 0; r < std::min(size(), kMostChecked); ++r) {
    const bool named = note.code == Code::kPeerDied && note.lost_rank == r;
    if (!named && !host_.has_ended(r) && (!joined || store_.add(generation_of(r), 0) >= generation_)) ++ranks;
  }
  return ranks;
}

void check_for_deaths(const GroupOptions& options, int remote) {
  const std::shared_ptr<ShmRegistry> shm = ShmRegistry::instance();
  const std::string when = " while group " + options.name + " was being created";
  const auto has_left = [&](int r, const std::string& description) {
    return Error(Failure{.code = Code::kPeerLeft,
                         .cause = description + " has destroyed the group of the whole job," + when,
                         .advice = see_log_of(job_name(options, r)),
                         .lost_rank = r});
  };
  for (int r = 0; r < options.size; ++r) {
    const std::shared_ptr<PeerProcess> process = earlier_process(options, r);
    if (!process) continue;
    const std::string name = job_name(options, r);
    const std::string description =
        name + " (pid " + std::to_string(process->pid()) + ", host " + own_host_name(options.host) + ")";
    if (process->dead()) {
      const ExitStatus status = process->exit_status();
      throw Error(Failure{.code = Code::kPeerDied,
                          .cause = description + " has ended" + text_of(status, " (", ")") + when,
                          .advice = see_log_of(name),
                          .lost_rank = r,
                          .exit_status = status});
    }
    const bool numbered = size_t(r) < options.global_ranks.size();
    if (numbered && !options.whole_job && shm->has_left_job(options.global_ranks[size_t(r)]))
      throw has_left(r, description);
    if (const std::string change = process->process().state_change(); !change.empty())
      NVX_LOG(kWarn, "%s %s; this rank waits for it to create group %s", description.c_str(), change.c_str(),
              options.name.c_str());
  }
  const std::shared_ptr<net::Messenger> messenger = messenger_of(options);
  if (!messenger || size_t(remote) >= options.global_ranks.size()) return;
  MutexLock lock(messenger->mutex());
  net::Liveness& liveness = messenger->liveness();
  const uint64_t global_rank = options.global_ranks[size_t(remote)];
  if (!options.whole_job && liveness.has_left_job(global_rank))
    throw has_left(remote, job_name(options, remote) + " " + liveness.location(global_rank));
  end_if_lost(options, remote, liveness.how_lost(global_rank));
}

}  // namespace nvx
