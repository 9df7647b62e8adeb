#pragma once

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "base/text.h"
#include "group/setup/store.h"
#include "memory/gpu/peer_mappings.h"

namespace nvx {

/// A Bootstrap through a store. Each rank writes its value under a key of its own; rank 0 collects the values and
/// writes one table for all. Keys are removed when all ranks have read them, except for those of the last round.
class StoreBootstrap : public Bootstrap {
 public:
  struct Options {
    std::string prefix;  ///< of the keys; the same on all ranks, and unique to this bootstrap
    int rank = 0;
    int ranks = 1;
    std::chrono::milliseconds timeout{60'000};  ///< for each round
    /// The names of ranks in errors.
    RankNames name = of_rank;
    /// Called repeatedly while this rank waits for `rank`; throws Error if the wait has become pointless.
    std::function<void(int rank)> watch = [](int) {};
  };

  StoreBootstrap(Store& store, Options options);

  /// Throws Error: kTimeout names the missing ranks; kMismatch names the rank whose value is not a message of this
  /// bootstrap; kPeerFailed repeats the cause of a rank that has given up.
  std::vector<std::vector<std::byte>> all_gather(std::span<const std::byte> mine) override;
  /// Ranks that wait for this one see the failure within about a second.
  void give_up(const Failure& why) override;

 private:
  using Value = std::vector<uint8_t>;

  std::string key(const std::string& what) const { return options_.prefix + "/" + what; }
  std::string key_of(uint32_t round, int rank) const;
  std::string table_of(uint32_t round) const;
  std::vector<std::vector<std::byte>> exchange(const Value& mine);
  Value collect(const Value& mine, const Deadline& deadline);
  Value fetch(const std::string& what, int writer, const Deadline& deadline);
  void check_for_notes();
  std::string missing();
  Value pack(std::span<const std::byte> data) const;
  std::vector<std::byte> unpack(std::span<const uint8_t> value, int rank) const;
  std::vector<std::vector<std::byte>> read_table(const Value& table, const Value& mine) const;

  Store& store_;
  const Options options_;
  const uint64_t nonce_;
  uint32_t round_ = 0;
  bool gave_up_ = false;
};

}  // namespace nvx
