#include "group/setup/store_bootstrap.h"

#include <algorithm>
#include <cstring>

#include "base/contain.h"
#include "base/error.h"
#include "base/interrupt.h"
#include "base/random.h"
#include "group/setup/store_notes.h"

namespace nvx {
namespace {

/// Precedes a rank's value. Fixed layout, little endian; comes from peers.
struct Header {
  static constexpr uint32_t kMagic = 0x7378766e;  // "nvxs"
  static constexpr uint16_t kVersion = 1;
  uint32_t magic = kMagic;
  uint16_t version = kVersion;
  uint16_t bytes = sizeof(Header);
  int32_t rank = -1;
  uint32_t round = 0;
  uint64_t nonce = 0;  // of the rank's bootstrap: a table with another nonce is stale
  uint64_t length = 0;
};
static_assert(sizeof(Header) == 32);

constexpr uint64_t kMost = uint64_t(1) << 24;  // bytes of a value

}  // namespace

StoreBootstrap::StoreBootstrap(Store& store, Options options)
    : store_(store), options_(std::move(options)), nonce_(random_value<uint64_t>()) {}

std::string StoreBootstrap::key_of(uint32_t round, int rank) const {
  return key(std::to_string(round) + "/" + std::to_string(rank));
}

std::string StoreBootstrap::table_of(uint32_t round) const { return key(std::to_string(round) + "/table"); }

std::vector<std::vector<std::byte>> StoreBootstrap::all_gather(std::span<const std::byte> mine) {
  NVX_CHECK(mine.size() <= kMost, "the message is too large for the store");
  try {
    auto all = exchange(pack(mine));
    // A rank that writes in this round has read the last one's table, so the last keys are unused.
    if (round_ > 0) store_.remove(key_of(round_ - 1, options_.rank));
    if (round_ > 0 && options_.rank == 0) store_.remove(table_of(round_ - 1));
    ++round_;
    return all;
  } catch (const std::exception& error) {
    contain("leaving a note in the store that a rank gives up", [&] { give_up(failure_of(error)); });
    throw;
  }
}

std::vector<std::vector<std::byte>> StoreBootstrap::exchange(const Value& mine) {
  const Deadline deadline = Deadline::after(options_.timeout);
  store_.set(key_of(round_, options_.rank), mine);
  if (options_.rank != 0) return read_table(fetch(table_of(round_), 0, deadline), mine);
  const Value table = collect(mine, deadline);
  auto all = read_table(table, mine);
  store_.set(table_of(round_), table);
  return all;
}

StoreBootstrap::Value StoreBootstrap::collect(const Value& mine, const Deadline& deadline) {
  Value table = mine;
  for (int r = 1; r < options_.ranks; ++r) {
    const Value value = fetch(key_of(round_, r), r, deadline);
    (void)unpack(value, r);
    table.insert(table.end(), value.begin(), value.end());
  }
  return table;
}

/// Waits in slices, and checks in between for ranks that have given up. All ranks check, so a long wait checks the
/// store less often.
StoreBootstrap::Value StoreBootstrap::fetch(const std::string& what, int writer, const Deadline& deadline) {
  constexpr std::chrono::milliseconds kSlice{200};
  for (int slice = 0;; ++slice) {
    if (auto value = store_.get(what, kSlice)) return *std::move(value);
    if (stop_requested())
      throw Error(Code::kInterrupted, "nvx: " + interrupt_text() + " while the ranks exchanged data through the store");
    if (slice < 10 || slice % 5 == 0) check_for_notes();
    options_.watch(writer);
    if (!deadline.passed(Clock::now())) continue;
    check_for_notes();
    throw Error(Code::kTimeout, "nvx: " + missing() + " within " + std::to_string(int64_t(deadline.elapsed_s())) +
                                    " s, in round " + std::to_string(round_) + " of " + options_.prefix +
                                    " in the store");
  }
}

/// The ranks that have written nothing in this round.
std::string StoreBootstrap::missing() {
  std::string ranks;
  for (int r = 0; r < options_.ranks; ++r) {
    if (r == options_.rank || store_.get(key_of(round_, r), std::chrono::milliseconds(0))) continue;
    ranks += (ranks.empty() ? "" : ", ") + options_.name(r);
  }
  if (ranks.empty()) return "rank 0 has not written the table";
  return ranks + " did not join";
}

void StoreBootstrap::check_for_notes() {
  if (const auto note = read_note(store_, key(""), options_.ranks))
    throw Error(with_context(*note, "this is " + options_.name(options_.rank)));
}

void StoreBootstrap::give_up(const Failure& why) {
  if (gave_up_) return;
  gave_up_ = true;
  // `options_.name` may map to ranks of a larger group.
  leave_note(store_, key(""),
             {.code = why.code,
              .cause = options_.name(options_.rank) + " failed: " + why.cause,
              .advice = why.advice,
              .before = why.before});
}

StoreBootstrap::Value StoreBootstrap::pack(std::span<const std::byte> data) const {
  Header header;
  header.rank = options_.rank;
  header.round = round_;
  header.nonce = nonce_;
  header.length = data.size();
  Value value(sizeof header + data.size());
  std::memcpy(value.data(), &header, sizeof header);
  if (!data.empty()) std::memcpy(value.data() + sizeof header, data.data(), data.size());
  return value;
}

std::vector<std::byte> StoreBootstrap::unpack(std::span<const uint8_t> value, int rank) const {
  Header header;
  const bool whole = value.size() >= sizeof header;
  if (whole) std::memcpy(&header, value.data(), sizeof header);
  if (!whole || header.magic != Header::kMagic || header.version != Header::kVersion || header.bytes != sizeof header ||
      header.rank != rank || header.round != round_ || header.length > kMost ||
      header.length != value.size() - sizeof header)
    throw Error(Code::kMismatch,
                "nvx: the message of " + options_.name(rank) + " in the store, of " + std::to_string(value.size()) +
                    " bytes, is damaged or from another version of nvx",
                kOneVersion);
  const auto* begin = reinterpret_cast<const std::byte*>(value.data() + sizeof header);
  return {begin, begin + header.length};
}

std::vector<std::vector<std::byte>> StoreBootstrap::read_table(const Value& table, const Value& mine) const {
  std::vector<std::vector<std::byte>> all;
  std::span<const uint8_t> rest(table);
  for (int r = 0; r < options_.ranks; ++r) {
    Header header;
    if (rest.size() >= sizeof header) std::memcpy(&header, rest.data(), sizeof header);
    const size_t bytes = sizeof header + size_t(std::min(header.length, kMost));
    const std::span<const uint8_t> one = rest.first(std::min(rest.size(), bytes));
    all.push_back(unpack(one, r));
    if (r == options_.rank && !std::equal(one.begin(), one.end(), mine.begin(), mine.end()))
      throw Error(Code::kMismatch, "nvx: the store holds messages of an earlier run under " + options_.prefix,
                  kNewStore);
    rest = rest.subspan(one.size());
  }
  if (!rest.empty())
    throw Error(Code::kMismatch, "nvx: the table of rank 0 in the store is longer than the messages of all ranks");
  return all;
}

}  // namespace nvx
