#include "group/plan/tuning.h"

#include <algorithm>
#include <sstream>

#include "base/error.h"
#include "base/log.h"
#include "base/text.h"

namespace nvx {
namespace {

constexpr uint64_t K = 1 << 10, M = 1 << 20, kUnlimited = uint64_t(1) << 40;
constexpr char kMemory[] = "shared memory", kHosts[] = "hosts", kGpus[] = "GPUs";

constexpr std::array<uint64_t, 4> alike(uint64_t value) { return {value, value, value, value}; }

/// Keys of GPUs have the defaults for NVLink here, and those for other links in `kOtherLinks`. On an H200 a block of a
/// bulk operation sends 16 GB/s with chunks of 8 KiB and 21 GB/s with 16 KiB (`bench/results/gpu_h200.json`, part
/// `bench`), so 24 blocks fill most of the 450 GB/s of NVLink that it has each way. Small messages are as fast with 32
/// blocks as with 16. One shot sends every rank's whole message to every other rank, n / 2 times the bytes of two
/// shots, and saves 1 to 2 us; with two ranks it never sends more. Its limits are derived from published figures for
/// GPUs on NVLink, not measured.
constexpr TuneRow kTuneRows[] = {
    // clang-format off
    {Tune::kAllReduceOneShot, "all_reduce.one_shot", kMemory, {64 * K, 16 * K, 16 * K, 16 * K}, 0, 64 * K, 1,
     "bytes up to which every rank reads all messages; larger ones go in chunks through staging memory"},
    {Tune::kReduceOneShot, "reduce.one_shot", kMemory, {32 * K, 16 * K, 16 * K, 16 * K}, 0, 64 * K, 1, "the same"},
    {Tune::kReduceScatterOneShot, "reduce_scatter.one_shot", kMemory, alike(64 * K), 0, 64 * K, 1, "the same"},
    {Tune::kAllGatherOneShot, "all_gather.one_shot", kMemory, alike(64 * K), 0, 64 * K, 1, "the same"},
    {Tune::kBroadcastOneShot, "broadcast.one_shot", kMemory, alike(64 * K), 0, 64 * K, 1, "the same"},
    {Tune::kLease, "lease", kMemory, alike(0), 256 * K, 1024 * M, 1,
     "staging memory of one large operation; by default from the caches and the ranks"},
    {Tune::kMessageLease, "send.lease", kMemory, alike(2 * M), 256 * K, 64 * M, 1,
     "staging memory of messages to one rank"},
    {Tune::kPastCaches, "past_caches", kMemory, alike(0), 0, kUnlimited, 1,
     "bytes from which results bypass the caches; by default from the last-level cache and the ranks"},
    {Tune::kAllReduceFewestSteps, "all_reduce.fewest_steps", kHosts, alike(16 * K), 0, kUnlimited, 1,
     "bytes up to which the schedule with the fewest steps runs; 16 times as many between two hosts"},
    {Tune::kReduceFewestSteps, "reduce.fewest_steps", kHosts, alike(64 * K), 0, kUnlimited, 1,
     "bytes up to which the schedule with the fewest steps runs"},
    {Tune::kReduceScatterFewestSteps, "reduce_scatter.fewest_steps", kHosts, alike(16 * K), 0, kUnlimited, 1, "the same"},
    {Tune::kAllGatherFewestSteps, "all_gather.fewest_steps", kHosts, alike(16 * K), 0, kUnlimited, 1, "the same"},
    {Tune::kBroadcastFewestSteps, "broadcast.fewest_steps", kHosts, alike(64 * K), 0, kUnlimited, 1, "the same"},
    {Tune::kAllReduceRingHosts, "all_reduce.ring_hosts", kHosts, alike(2), 0, kUnlimited, 1,
     "hosts up to which large messages always go round a ring"},
    {Tune::kReduceScatterRingHosts, "reduce_scatter.ring_hosts", kHosts, alike(2), 0, kUnlimited, 1, "the same"},
    {Tune::kAllGatherDirectHosts, "all_gather.direct_hosts", kHosts, alike(16), 0, kUnlimited, 1,
     "hosts up to which 512 KiB of all ranks go directly to their destinations"},
    {Tune::kAllGatherPacked, "all_gather.packed", kHosts, alike(16 * K), 0, 1 * M, 1,
     "bytes of a rail up to which it is copied instead of gathered by a step inside the host"},
    // Just large enough that headers are negligible: shorter slices overlap the steps inside and between hosts better.
    // Whole TCP segments, so that none is short.
    {Tune::kSlice, "slice", kHosts, alike(8 * 63 * K), 64 * K, 64 * M, K, "bytes of a rail's messages to one host"},
    {Tune::kBlocks, "kernels.blocks", kGpus, alike(24), 1, 256, 1, "blocks of a rank, if its GPU has room for them"},
    {Tune::kPad, "kernels.pad", kGpus, alike(16 * M), 512 * K, 32 * M, K, "bytes of a group's packets and chunks"},
    {Tune::kPackets, "kernels.packets", kGpus, alike(0), 64, 8192, 64,
     "packets from one rank to a block; by default what half of the pad holds"},
    {Tune::kChunkBytes, "kernels.chunk", kGpus, alike(0), 1 * K, 256 * K, 128,
     "bytes of a chunk; by default what half of the pad holds, or more with 2 or 3 ranks"},
    {Tune::kOneShot, "kernels.one_shot", kGpus, {kUnlimited, 64 * K, 32 * K, 16 * K}, 0, kUnlimited, 1,
     "bytes up to which all_reduce and reduce send whole messages as packets"},
    {Tune::kTwoShot, "kernels.two_shot", kGpus, alike(kUnlimited), 0, kUnlimited, 1,
     "bytes up to which all_reduce reduces and gathers slices as packets; larger ones go in chunks"},
    {Tune::kPiece, "kernels.piece", kGpus, alike(kUnlimited), 0, kUnlimited, 1,
     "bytes of a piece up to which reduce_scatter, all_gather and broadcast use packets"},
    // clang-format on
};
static_assert(std::size(kTuneRows) == kTunes);
static_assert([] {
  for (size_t i = 0; i < kTunes; ++i)
    if (size_t(kTuneRows[i].key) != i) return false;
  return true;
}());
/// The defaults that differ from those for NVLink. Over PCIe they follow from the model (`kernel_model.cc`) of PCIe 4.0
/// x16, which carries 26 GB/s: packets send twice the bytes of chunks, and pay for it sooner. Four blocks fill that
/// link, eight also one of PCIe 5.0. Inside a GPU they are measured: the fastest algorithm of each size in
/// `bench/results/gpu_h200.json`.
constexpr struct {
  GpuLink link;
  Tune key;
  std::array<uint64_t, 4> by_ranks;
} kOtherLinks[] = {
    {GpuLink::kOneGpu, Tune::kOneShot, {kUnlimited, 128 * K, 64 * K, 16 * K}},
    {GpuLink::kOneGpu, Tune::kTwoShot, {kUnlimited, kUnlimited, kUnlimited, 256 * K}},
    {GpuLink::kPcie, Tune::kBlocks, alike(8)},
    {GpuLink::kPcie, Tune::kOneShot, {512 * K, 24 * K, 8 * K, 2 * K}},
    {GpuLink::kPcie, Tune::kTwoShot, {512 * K, 384 * K, 320 * K, 256 * K}},
    {GpuLink::kPcie, Tune::kPiece, {512 * K, 192 * K, 96 * K, 32 * K}},
};
/// Hosts with different numbers of ranks choose alike between hosts.
static_assert(std::ranges::all_of(kTuneRows, [](const TuneRow& r) {
  return r.link != kHosts || r.by_ranks == alike(r.by_ranks[0]);
}));

const TuneRow* tune_row(const std::string& name) {
  const auto* row = std::ranges::find_if(kTuneRows, [&](const TuneRow& r) { return r.name == name; });
  return row == std::end(kTuneRows) ? nullptr : row;
}

/// "key = value". Throws Error unless the key is known and the value within its bounds.
std::pair<Tune, uint64_t> setting(const std::string& item, const std::string& source) {
  const size_t sign = item.find('=');
  const std::string name = trimmed(item.substr(0, sign));
  const std::string value = sign == std::string::npos ? "" : trimmed(item.substr(sign + 1));
  const TuneRow* const row = tune_row(name);
  std::string why;
  if (row) {
    const std::optional<uint64_t> number = size_of_text(value);
    if (number && *number >= row->least && *number <= row->most && *number % row->multiple == 0)
      return {row->key, *number};
    why = name + '=' + printable(value) + " is not a number from " + std::to_string(row->least) + " to " +
          std::to_string(row->most) + (row->multiple > 1 ? ", a multiple of " + std::to_string(row->multiple) : "");
  } else {
    std::vector<std::string> keys;
    for (const TuneRow& r : kTuneRows) keys.push_back(r.name);
    const std::optional<std::string> meant = nearest(name, keys);
    why = "there is no key \"" + printable(name) + '"' + (meant ? " (did you mean " + *meant + "?)" : "");
  }
  throw Error(Code::kInvalid, "nvx: " + source + ": " + why, "`NVX_TUNE= nvx explain` lists the keys and their bounds");
}

}  // namespace

std::span<const TuneRow> tune_rows() { return kTuneRows; }

const char* name(GpuLink link) {
  constexpr const char* kNames[] = {"one GPU", "NVLink", "PCIe"};
  return kNames[size_t(link)];
}

const char* name(SetBy by) {
  constexpr const char* kNames[] = {"default", "file", "variable", "option"};
  return kNames[size_t(by)];
}

uint64_t Tuning::of(Tune key, size_t ranks, GpuLink link) const {
  const Set& own = set_[size_t(key)];
  if (own.by != SetBy::kDefault) return own.value;
  const size_t column = ranks <= 2 ? 0 : ranks <= 4 ? 1 : ranks <= 8 ? 2 : 3;
  for (const auto& other : kOtherLinks) {
    if (other.link == link && other.key == key) return other.by_ranks[column];
  }
  return kTuneRows[size_t(key)].by_ranks[column];
}

std::string Tuning::text() const {
  std::vector<std::string> texts;
  for (const TuneRow& row : kTuneRows) {
    const auto& [value, by] = set_[size_t(row.key)];
    if (by != SetBy::kDefault) texts.push_back(row.name + ('=' + std::to_string(value)) + " (" + name(by) + ")");
  }
  return joined(texts);
}

void Overrides::add(const std::string& list, SetBy by, const std::string& source, const Read& read) {
  for (const std::string& item : items(list)) {
    if (item.starts_with('@')) {
      const std::string path = item.substr(1);
      const std::optional<std::string> content = read(path);
      if (!content)
        throw Error(
            Code::kInvalid, "nvx: " + source + " names " + path + ", which cannot be read",
            std::string("give the path of a file of at most 1 MiB that this process can read, on every host, or ") +
                (by == SetBy::kVariable ? "unset NVX_TUNE" : "name no file"));
      add_file(path, *content);
    } else {
      const auto [key, value] = setting(item, source);
      values_[{kAny, key}] = {value, by};
    }
  }
}

/// Lines "key = value", as `nvx tune` writes them. "nvx", "ranks" and "host" record how the file was made.
void Overrides::add_file(const std::string& path, const std::string& content) {
  Values own;
  size_t ranks = kAny;
  std::istringstream lines(content);
  for (std::string line; std::getline(lines, line);) {
    line = line.substr(0, line.find('#'));
    const size_t sign = line.find('=');
    const std::string name = trimmed(line.substr(0, sign));
    const std::string value = sign == std::string::npos ? "" : trimmed(line.substr(sign + 1));
    if (name.empty() || name == "host") continue;
    if (name == "nvx" && value != NVX_VERSION) {
      NVX_LOG(kWarn,
              "%s was written by `nvx tune` of nvx %s and this is nvx " NVX_VERSION
              ": it is ignored. Next: run `nvx tune` again",
              path.c_str(), printable(value).c_str());
      return;
    }
    if (name == "ranks") {
      const std::optional<uint64_t> number = size_of_text(value);
      if (!number || *number == kAny)
        throw Error(Code::kInvalid, "nvx: " + path + ": ranks = " + printable(value) + " is not a number from 1 on",
                    "correct the line, or run `nvx tune` again");
      ranks = size_t(*number);
    } else if (name != "nvx") {
      const auto [key, number] = setting(line, path);
      own[{kAny, key}] = {number, SetBy::kFile};
    }
  }
  for (const auto& [at, value] : own) {
    const auto [known, fresh] = values_.try_emplace({ranks, at.second}, value);
    if (!fresh && known->second.second == SetBy::kFile) known->second = value;
  }
}

/// A file for this number of ranks counts before a file for any.
Tuning Overrides::of(size_t ranks) const {
  Tuning tuning;
  for (const size_t whose : {ranks, kAny}) {
    for (const auto& [at, value] : values_) {
      if (at.first != whose) continue;
      const bool yields = value.second == SetBy::kFile && tuning.set_by(at.second) != SetBy::kDefault;
      if (!yields) tuning.set(at.second, value.first, value.second);
    }
  }
  return tuning;
}

bool Overrides::misses(size_t ranks) const {
  const auto is_file = [](const auto& one) { return one.second.second == SetBy::kFile; };
  return std::ranges::any_of(values_, is_file) && std::ranges::none_of(values_, [&](const auto& one) {
           return is_file(one) && (one.first.first == ranks || one.first.first == kAny);
         });
}

std::string Overrides::text() const {
  std::vector<std::string> texts;
  for (const auto& [at, value] : values_) {
    const std::string where = at.first == kAny ? "" : " for " + std::to_string(at.first) + " ranks";
    texts.push_back(std::string(kTuneRows[size_t(at.second)].name) + '=' + std::to_string(value.first) + where);
  }
  return joined(texts);
}

}  // namespace nvx
