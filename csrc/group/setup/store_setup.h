#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "base/error.h"
#include "group/setup/group_options.h"
#include "group/setup/host_setup.h"
#include "group/setup/inter_host_setup.h"
#include "group/setup/store.h"
#include "group/setup/topology.h"

namespace nvx {

/// The steps of a set-up in the store. Each rank counts its set-ups there; the number of a set-up is its generation,
/// and is part of its keys. Waits check for failures of other ranks and for interrupts, and throw Error if the wait has
/// become pointless.
class StoreSetUp {
 public:
  StoreSetUp(Store& store, const GroupOptions& options)
      : store_(store), options_(options), host_(store, options), inter_host_(store, options) {}

  /// Joins the set-up: first the ranks of this host can see this rank's process, then its hello is in the store, then
  /// the set-up is counted. `settings` follows the hello, for `settings_of()`.
  void begin(const Hello& own, const std::string& settings);
  int64_t generation() const { return generation_; }

  /// The hellos of all ranks, by rank. Throws Error if this rank's current one is not among them. The generation may
  /// grow during this call, and not afterwards.
  std::vector<Hello> exchange_hellos(const Deadline& deadline);
  /// The settings of a rank of this set-up; empty if the store does not hold them.
  std::string settings_of(int rank);
  /// Writes a value that other ranks `fetch()`.
  void publish(const std::string& what, const std::vector<uint8_t>& value);
  /// A value that rank `writer` writes. Empty if that rank has begun another set-up without writing it.
  std::optional<std::vector<uint8_t>> fetch(const std::string& what, int writer, const Deadline& deadline);
  /// For waits elsewhere, which call it repeatedly: throws if the wait has become pointless. Logs from time to time
  /// the ranks that this rank waits for, which `awaited` names.
  void poll(const std::function<std::string()>& awaited);
  /// Called by `poll()` from now on instead of its own check of the processes of this host; throws if one has
  /// ended.
  void watch(std::function<void()> check) { check_host_ = std::move(check); }
  /// Throws the failure of another rank that has caused this one: a connection was closed, or the store has failed,
  /// which one of the ranks may serve.
  void check_for_cause(Code code);

  /// The relay for the values that this rank reads for the others of its host; null if it reads none. Its IPC socket
  /// serves the relay's clients.
  HostRelay* relay() { return host_.relay(); }
  /// Call after the last `fetch()`.
  void stop_sharing() { host_.leave(); }

  [[noreturn]] void throw_note(const Failure& note);
  /// The note of another rank, if this rank has read one.
  const std::optional<Failure>& received_note() const { return received_note_; }

  /// Leaves a note in every set-up in which a rank may wait for this one.
  void leave_notes(const Failure& note);

 private:
  using Value = std::vector<uint8_t>;

  std::string key(const std::string& what) const { return key_in(generation_, what); }
  void enter(int64_t generation);
  std::optional<Value> take(const std::string& what, int writer, std::chrono::milliseconds span);
  std::vector<Hello> collect_hellos(const Deadline& deadline);
  std::vector<Hello> read_hellos(const Deadline& deadline);
  std::vector<Hello> read_table(std::span<const uint8_t> table) const;
  void adopt_generation(int rank);
  void publish_size();
  int64_t set_up_ahead();
  bool rank_0_restarts(const Deadline& deadline);
  void prefer_note(const std::function<void()>& check);
  void check_for_notes();
  void check_duplicate_rank();
  void stop_if_aborted() const;
  [[noreturn]] void throw_duplicate_rank(int64_t their_generation);
  std::string claimant(int64_t generation);
  std::string earlier_claim();
  std::string missing(int writer);
  std::string describe(int rank);
  int64_t live_ranks(const Failure& note, bool joined);
  bool due(Clock::time_point* next, bool often) const;
  int next_pinged(int writer);
  int rank() const { return options_.rank; }
  int size() const { return options_.size; }
  std::string rank_name(int rank) const { return nvx::rank_name(rank, options_.global_ranks); }

  Store& store_;
  const GroupOptions& options_;
  Hello own_;
  std::string settings_;
  HostSetUp host_;
  InterHostSetUp inter_host_;
  std::function<void()> check_host_;      // see watch()
  int64_t generation_ = 0;                // number of set-ups of this rank in its store, including this one
  int64_t doubled_until_ = 0;             // another process has counted up to here for this rank
  std::optional<Failure> received_note_;  // the note of another rank
  const Clock::time_point began_ = Clock::now();
  Clock::time_point next_read_{}, next_count_{}, next_note_{};  // of the store
  Clock::time_point next_deaths_{};                             // the next check_for_deaths()
  int death_checks_ = 0;                                        // calls of check_for_deaths() in fetch()
  Clock::time_point next_reminder_ = began_ + options_.reminder;
};

/// Throws if a rank's process that this process knows from another group has ended, or has destroyed the group of the
/// whole job. Of the ranks of other hosts it checks only `remote`, since a check opens a connection.
void check_for_deaths(const GroupOptions& options, int remote);

}  // namespace nvx
