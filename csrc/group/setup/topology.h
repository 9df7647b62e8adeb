#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "base/address_prefix.h"
#include "base/config.h"
#include "base/error.h"
#include "memory/shm/arena.h"
#include "net/header.h"
#include "net/host_address.h"

namespace nvx {

/// A rank's description of itself at set-up. Fixed layout, little endian. It comes from peers: `decode()` checks it,
/// and its users check it against local bounds.
struct Hello {
  static constexpr uint32_t kMagic = 0x6f78766e;  // "nvxo"
  /// The protocol between ranks: 19, which changes with any layout in `pad.h`, in `failure_note.h` or here, and the
  /// version of the messages between hosts.
  static constexpr uint16_t kWire = 19 << 8 | net::MessageHeader::kVersion;

  uint32_t magic = kMagic;
  uint16_t wire_version = kWire;
  uint16_t bytes = 0;  // sizeof(Hello)
  int32_t rank = -1;
  int32_t pid = 0;
  uint64_t host = 0;  // hash of the host's identity
  ArenaId arena;
  uint64_t pad_offset = 0;
  uint64_t members = 0;  // hash of the global ranks of all ranks of the group; 0 if not known
  uint64_t nonce = 0;    // of this set-up; rank 0's names the group
  Agreed agreed = {};    // hashes of the variables that must be equal on all ranks
  uint64_t key_tag = 0;  // of the job's key; 0: none
  uint64_t l2_bytes = 0;
  uint64_t l3_bytes = 0;
  uint32_t cores = 0;     // that this rank may use
  uint32_t machine = 0;   // hash of the kernel and the network namespace that this rank sees; 0 if it cannot see them
  uint32_t ranks = 0;     // of the group, as this rank creates it
  uint32_t affinity = 0;  // hash of these cores; 0 if a quota limits their number
  /// The source addresses of this rank's connections to other hosts; ends with 0.
  std::array<AddressBytes, net::kMostAddresses> addresses = {};
  char host_name[48] = {};
  char socket[48] = {};
  std::array<char, 16> reserved = {};
};
static_assert(sizeof(Hello) == 512);

/// This process and its machine, for a Hello. `host` overrides the detected host unless empty.
Hello describe_self(int rank, const std::string& host = {});
std::string own_host_name(const std::string& host = {});

std::vector<uint8_t> encode(std::span<const Hello> hellos);

/// The hellos in a value that another rank wrote. Throws Error with the defect and the rank.
std::vector<Hello> decode(std::span<const uint8_t> value, size_t count);
/// The same for one hello; more may follow it in the value.
Hello decode_first(std::span<const uint8_t> value);

/// The error of a rank that creates the group with `mine` ranks, where that one creates it with `theirs`.
Error different_sizes(const Hello& rank, size_t theirs, const std::string& own, size_t mine);
inline constexpr const char* kSameGroups =
    "create the same groups, with the same ranks, in the same order on all ranks (new_group)";
/// The error of rank 0 if that rank creates the group for other global ranks.
Error different_members(const Hello& rank, const std::string& group);

/// All ranks' network addresses as one value, and back. Throws Error if it is damaged.
std::vector<uint8_t> encode_addresses(const std::vector<std::vector<std::byte>>& addresses);
std::vector<std::vector<std::byte>> decode_addresses(std::span<const uint8_t> value, size_t count);

/// "rank 3", or "rank 1 (global rank 3)" if the global rank differs.
std::string rank_name(int rank, const std::vector<uint64_t>& global_ranks);

/// "pid 4711, host a01"
std::string place_of(const Hello& hello);

/// "rank 3 (pid 4711, host a01)", or "rank 1 (global rank 3, pid 4711, host a01)", from `rank_name()` and a place. The
/// name alone if the place is empty.
std::string described(const std::string& name, const std::string& place);

/// The source addresses of connections from that rank to this one. A rank of this machine (hosts by `NVX_HOST_ID`), or
/// of one that cannot be distinguished from it, may connect over the loopback interface.
std::vector<AddressPrefix> sources_of(const Hello& rank, const Hello& own);

/// The first line of a file; empty if it cannot be read.
std::string read_line(const std::string& path);

/// The hosts of all ranks, and the resources that every rank has. The same on every rank.
struct Topology {
  std::vector<Hello> ranks;
  std::vector<std::vector<int>> hosts;  ///< the ranks of each host, ascending; hosts in the order of their first ranks
  std::vector<int> host_of;             ///< by rank
  std::vector<int> local_rank_of;       ///< by rank: its index among the ranks of its host
  std::vector<size_t> cores;            ///< by host: those that its ranks may use together
  size_t l2_bytes = 0;                  ///< the least over all ranks
  size_t l3_bytes = 0;
  std::vector<uint64_t> global_ranks;  ///< the ranks' global ranks; empty if not known

  /// Checks that all ranks have one protocol and one configuration, and sorts them by host. `settings`: the values of a
  /// rank's variables of `kAgreed`, for the error, a line each; empty if they are not known.
  static Topology from(std::vector<Hello> ranks, const std::function<std::string(int rank)>& settings = {});
  /// The number of rails: the least number of ranks of any host. Each carries a part of the data between hosts.
  size_t rails() const;
  /// "rank 3 (pid 4711, host a01)", or "rank 1 (global rank 3, pid 4711, host a01)" if the global rank differs. `more`
  /// follows inside the parentheses, such as ", stopped".
  std::string describe(int rank, const std::string& more = "") const;
  std::string location(int rank) const;  ///< "(pid 4711, host a01)"
  /// A warning if ranks with one host name count as two hosts, because one of them cannot read /proc; otherwise empty.
  std::string host_warning() const;
  static constexpr const char* kHostAdvice =
      "if they are on one machine, mount all of /proc for both, or give both the same NVX_HOST_ID";
  std::string describe() const;  ///< "4 ranks on 2 hosts: 2 on a01, 2 on a02"

 private:
  void sort_by_host();
  void count_cores();
};

}  // namespace nvx
