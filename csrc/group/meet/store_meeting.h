#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "base/error.h"
#include "group/meet/group_options.h"
#include "group/meet/store.h"
#include "group/meet/topology.h"
#include "memory/shm/handout.h"

namespace nvx {

/// A key of one set-up of a group: a store, and a prefix in it, may serve several, one after another.
std::string key_in(int64_t generation, const std::string& what);

/// How a rank meets the others of its group in the store, during set-up. Each rank counts its set-ups there, and all
/// write under the number of the one that they are in, the generation. What waits here looks after the others and the
/// user meanwhile, and throws Error where waiting has become pointless.
class StoreMeeting {
 public:
  StoreMeeting(Store& store, const GroupOptions& options) : store_(store), options_(options) {}

  /// Counts this set-up. Before anything else, as failures are told under its number.
  void begin();
  int64_t generation() const { return generation_; }

  /// What every rank says of itself, by rank. Throws Error if this rank, as it is now, is not among them. The
  /// generation may grow until this returns, and does not after that.
  std::vector<Hello> exchange_hellos(const Hello& own, const Deadline& deadline);
  void say(const std::string& what, const std::vector<uint8_t>& value) { store_.set(key(what), value); }
  /// A value that another rank writes; nothing if that rank has begun anew without it.
  std::optional<std::vector<uint8_t>> fetch(const std::string& what, int writer, const Deadline& deadline);

  /// What this rank reads for the others of its host, if it does; they come for it at its doorway.
  Handout* handout() { return handout_.get(); }
  /// When nothing more will be fetched.
  void stop_sharing();

  /// Throws if a rank has given this set-up up, wherever it is; ...
  void look_for_failures();
  /// ... and has told this of it.
  [[noreturn]] void end_as_told(const Failure& note);
  /// What it has told; nothing where nobody has.
  const std::optional<Failure>& told() const { return told_; }
  /// Throws if the user, or whoever makes the group, does not want it any more.
  void stop_if_unwanted() const;

  /// Leaves a note in every set-up in which somebody may wait for this rank.
  void leave_notes(const Failure& note);

 private:
  using Value = std::vector<uint8_t>;

  std::string key(const std::string& what) const { return key_in(generation_, what); }
  std::optional<Value> take(const std::string& what, std::chrono::milliseconds span);
  void choose_reader(uint64_t host);
  std::vector<Hello> collect_hellos(const Hello& own, const Deadline& deadline);
  std::vector<Hello> read_hellos(const Hello& own, const Deadline& deadline);
  std::vector<Hello> read_table(std::span<const uint8_t> table, uint64_t own_nonce) const;
  void catch_up(int rank);
  void tell_size();
  int64_t set_up_ahead();
  bool rank_0_begins_anew(const Deadline& deadline);
  void look_for_a_double();
  [[noreturn]] void end_as_doubled(int64_t their_generation);
  std::string claimant(int64_t generation);
  std::string earlier_claim();
  std::string missing(int writer);
  int rank() const { return options_.rank; }
  int size() const { return options_.size; }
  std::string rank_name(int rank) const { return nvx::rank_name(rank, options_.global_ranks); }

  Store& store_;
  const GroupOptions& options_;
  int64_t generation_ = 0;            // how often this rank has set the group up in its store, this time included
  int64_t doubled_until_ = 0;         // another process has counted up to here for this rank
  std::optional<Failure> told_;       // what another rank has said of its failure
  std::unique_ptr<Handout> handout_;  // of the rank that reads the store for its host; ...
  std::unique_ptr<Receipt> receipt_;  // ... and of the ranks for which it does
  Clock::time_point next_look_;       // of such a rank into the store
};

/// Throws if a rank that this process has met in another group has ended meanwhile. Of those on other hosts only the
/// one that is waited for is looked after: to ask means to connect.
void look_for_deaths(const GroupOptions& options, int writer);

}  // namespace nvx
