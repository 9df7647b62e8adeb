#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <utility>

namespace nvx {

/// The values that plans decide by, one row of the table in `tuning.cc` each.
enum class Tune : uint8_t {
  kAllReduceOneShot,
  kReduceOneShot,
  kReduceScatterOneShot,
  kAllGatherOneShot,
  kBroadcastOneShot,
  kLease,
  kMessageLease,
  kPastCaches,
  kAllReduceFewestSteps,
  kReduceFewestSteps,
  kReduceScatterFewestSteps,
  kAllGatherFewestSteps,
  kBroadcastFewestSteps,
  kAllReduceRingHosts,
  kReduceScatterRingHosts,
  kAllGatherDirectHosts,
  kAllGatherPacked,
  kSlice,
  kBlocks,
  kPad,
  kPackets,
  kChunkBytes,
  kOneShot,
  kTwoShot,
  kPiece
};
inline constexpr size_t kTunes = size_t(Tune::kPiece) + 1;

/// The link between the GPUs of a group: the slowest that two of its ranks have, the fastest first.
enum class GpuLink : uint8_t { kOneGpu, kNvlink, kPcie };
inline constexpr size_t kGpuLinks = size_t(GpuLink::kPcie) + 1;
const char* name(GpuLink link);

struct TuneRow {
  Tune key;
  const char* name;
  const char* link;                  ///< between the ranks: shared memory, hosts, GPUs
  std::array<uint64_t, 4> by_ranks;  ///< the default for up to 2, 4 and 8 ranks of a host, and for more; 0: derived.
                                     ///< Of GPUs: over NVLink
  uint64_t least, most, multiple;    ///< bounds of a user's value
  const char* meaning;
  bool is_of_gpus() const { return key >= Tune::kBlocks; }
};
std::span<const TuneRow> tune_rows();

/// Where a value comes from. A later one overrides an earlier one.
enum class SetBy : uint8_t { kDefault, kFile, kVariable, kOption };
const char* name(SetBy by);

class Tuning {
 public:
  /// `link`: counts for keys of GPUs only.
  uint64_t of(Tune key, size_t ranks, GpuLink link = GpuLink::kNvlink) const;
  SetBy set_by(Tune key) const { return set_[size_t(key)].by; }
  void set(Tune key, uint64_t value, SetBy by = SetBy::kOption) { set_[size_t(key)] = {value, by}; }
  /// "slice=131072 (variable)": the values that differ from the defaults, for the log.
  std::string text() const;

 private:
  struct Set {
    uint64_t value = 0;
    SetBy by = SetBy::kDefault;
  };
  std::array<Set, kTunes> set_ = {};
};

/// All values that the user has set. Those of a file count only in groups with the file's number of ranks on a host.
class Overrides {
 public:
  using Read = std::function<std::optional<std::string>(const std::string& path)>;

  /// Adds a list such as "@FILE,all_reduce.one_shot=16K". Throws Error for an unknown key, a value out of its bounds,
  /// or a file that `read` does not return. `source`: the list's name in messages. A file of another version of nvx is
  /// ignored, with a warning.
  void add(const std::string& list, SetBy by, const std::string& source, const Read& read);

  /// `ranks`: the most that a host of the group has.
  Tuning of(size_t ranks) const;
  /// Files were read, and none is for so many ranks.
  bool misses(size_t ranks) const;
  /// The same text on every rank whose values are the same.
  std::string text() const;

 private:
  static constexpr size_t kAny = 0;  // ranks
  using Values = std::map<std::pair<size_t, Tune>, std::pair<uint64_t, SetBy>>;

  void add_file(const std::string& path, const std::string& content);

  Values values_;
};

}  // namespace nvx
