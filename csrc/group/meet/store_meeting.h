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

/// A key of one set-up of a group. A store, and a prefix in it, may serve several set-ups one after another.
std::string key_in(int64_t generation, const std::string& what);

/// The steps of a set-up in the store. Each rank counts its set-ups there; the number of a set-up is its generation,
/// and is part of its keys. Waits check for failures of other ranks and for interrupts, and throw Error if the wait has
/// become pointless.
class StoreMeeting {
 public:
  StoreMeeting(Store& store, const GroupOptions& options) : store_(store), options_(options) {}

  /// Counts this set-up. Must be the first step, since failures are recorded under its generation.
  void begin();
  int64_t generation() const { return generation_; }

  /// The hellos of all ranks, by rank. Throws Error if this rank's current one is not among them. The generation may
  /// grow during this call, and not afterwards.
  std::vector<Hello> exchange_hellos(const Hello& own, const Deadline& deadline);
  void say(const std::string& what, const std::vector<uint8_t>& value) { store_.set(key(what), value); }
  /// A value that rank `writer` writes. Empty if that rank has begun another set-up without writing it.
  std::optional<std::vector<uint8_t>> fetch(const std::string& what, int writer, const Deadline& deadline);

  /// The values that this rank reads for the others of its host; null if it does not. Its doorway hands them out.
  Handout* handout() { return handout_.get(); }
  /// Call after the last `fetch()`.
  void stop_sharing();

  /// Throws if a rank of any host has given up this set-up.
  void look_for_failures();
  /// Throws the failure in another rank's note.
  [[noreturn]] void end_as_told(const Failure& note);
  /// The note of another rank, if this rank has read one.
  const std::optional<Failure>& told() const { return told_; }
  /// Throws on an interrupt, or if the caller does not want the group any more.
  void stop_if_unwanted() const;

  /// Leaves a note in every set-up in which a rank may wait for this one.
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
  int64_t generation_ = 0;            // number of set-ups of this rank in its store, including this one
  int64_t doubled_until_ = 0;         // another process has counted up to here for this rank
  std::optional<Failure> told_;       // the note of another rank
  std::unique_ptr<Handout> handout_;  // on the rank that reads the store for its host
  std::unique_ptr<Receipt> receipt_;  // on the other ranks of that host
  Clock::time_point next_look_;       // on the other ranks: the next read of the store
};

/// Throws if a rank's process that this process knows from another group has ended. Of the ranks of other hosts it
/// checks only `writer`, since a check opens a connection.
void look_for_deaths(const GroupOptions& options, int writer);

}  // namespace nvx
