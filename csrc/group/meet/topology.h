#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/config.h"
#include "memory/shm/arena.h"
#include "net/host_address.h"

namespace nvx {

/// What each rank says of itself when a group is made. Fixed layout, little endian; comes from peers, so nothing in it
/// is believed beyond what decode() checks and what local geometry allows.
struct Hello {
  static constexpr uint32_t kMagic = 0x6f78766e;  // "nvxo"
  static constexpr uint16_t kWire =
      9;  // protocol between ranks; moves when a layout in pad.h, in failure_note.h or here does

  uint32_t magic = kMagic;
  uint16_t wire_version = kWire;
  uint16_t bytes = 0;  // sizeof(Hello)
  int32_t rank = -1;
  int32_t pid = 0;
  uint64_t host = 0;  // hash of what tells hosts apart
  ArenaId arena;
  uint64_t pad_offset = 0;
  uint64_t pad_bytes = 0;
  uint64_t nonce = 0;  // of this set-up; rank 0's names the group
  Agreed agreed = {};  // hashes of the variables that all ranks must agree on
  uint64_t l2_bytes = 0;
  uint64_t l3_bytes = 0;
  uint32_t cores = 0;
  uint32_t machine = 0;  // hash of the kernel and the network namespace that this rank sees
  /// From which this rank's connections to other hosts come; 0 behind the last.
  std::array<AddressBytes, net::kMostAddresses> addresses = {};
  char host_name[48] = {};
  char door[48] = {};
  char version[16] = {};
};
static_assert(sizeof(Hello) == 480);

/// What this process knows of its machine, for a Hello. host: overrides which it is on, unless empty.
Hello describe_self(int rank, const std::string& host = {});
std::string own_host_name(const std::string& host = {});

std::vector<uint8_t> encode(std::span<const Hello> hellos);

/// The hellos in a value that some rank wrote. Throws Error naming what is wrong with it, and by whom.
std::vector<Hello> decode(std::span<const uint8_t> value, size_t count);

/// All ranks' addresses on the wire as one value, and back. Throws Error if it is damaged.
std::vector<uint8_t> encode_addresses(const std::vector<std::vector<std::byte>>& addresses);
std::vector<std::vector<std::byte>> decode_addresses(std::span<const uint8_t> value, size_t count);

/// "rank 3"; where that is another one of the job, "rank 1 (global rank 3)".
std::string rank_name(int rank, const std::vector<uint64_t>& global_ranks);

/// The first line of a file; empty where it cannot be read.
std::string read_line(const std::string& path);

/// Who is where, and what every rank may count on. The same on every rank.
struct Topology {
  std::vector<Hello> ranks;
  std::vector<std::vector<int>> hosts;  ///< the ranks of each, ascending; hosts in the order of their first ranks
  std::vector<int> host_of;             ///< by rank
  std::vector<int> local_rank_of;       ///< by rank: its index among the ranks of its host
  size_t cores = 1;                     ///< of the host, as the rank with the fewest sees it
  size_t l2_bytes = 0;                  ///< least of all
  size_t l3_bytes = 0;
  std::vector<uint64_t> global_ranks;  ///< of the ranks, in the whole job; empty where that is not known

  /// Checks that all ranks speak one protocol and are configured alike, and sorts them by host.
  static Topology from(std::vector<Hello> ranks);
  /// As many ranks as every host has at least: each of them can carry a part of what goes between hosts.
  size_t rails() const;
  /// "rank 3 (pid 4711, host a01)"; where that is another one of the job, "rank 1 (global rank 3, pid 4711, host a01)"
  /// more: what else is to be said of it there, as ", stopped".
  std::string describe(int rank, const std::string& more = "") const;
  std::string whereabouts(int rank) const;  ///< "(pid 4711, host a01)"
  std::string describe() const;             ///< "4 ranks on 2 hosts: 2 on a01, 2 on a02"

 private:
  void sort_by_host();
};

}  // namespace nvx
