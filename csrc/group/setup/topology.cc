#include "group/setup/topology.h"

#include <sched.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <map>
#include <optional>
#include <sstream>

#include "base/config.h"
#include "base/error.h"
#include "base/hash.h"
#include "base/random.h"
#include "base/text.h"

namespace nvx {
namespace {

constexpr const char* kBootId = "/proc/sys/kernel/random/boot_id";

/// Hash of the kernel and the network namespace; nothing if this process cannot see them.
std::optional<uint64_t> machine_seen() {
  struct stat net {};
  // Not of the process: its first thread may have ended.
  if (stat("/proc/thread-self/ns/net", &net) != 0) net = {};
  errno = 0;
  const std::string boot = read_line(kBootId);
  if (boot.empty() && (errno == EMFILE || errno == ENFILE)) throw system_error("cannot read the boot id of this host");
  if (boot.empty()) return std::nullopt;
  return Hash().add(boot).add(uint64_t(net.st_ino)).value();
}

/// Ranks with one `NVX_HOST_ID` share a host; without it, ranks that share a kernel and a network namespace, or that
/// cannot read the boot id and share a host name.
uint64_t host_hash(const std::string& name, const std::optional<uint64_t>& machine) {
  if (name.empty() && machine) return *machine;
  return Hash().add(name.empty() ? own_host_name() : name).value();
}

/// Ranks of one host must share memory, so they must be on one machine, whatever `NVX_HOST_ID` is.
bool on_different_machines(const Hello& a, const Hello& b) {
  return a.machine != b.machine && a.machine != 0 && b.machine != 0;
}

/// The number of cores within the quota of the cgroup (version 2, else 1), rounded.
uint32_t quota_cores(uint32_t cores) {
  const std::string v1 = "/sys/fs/cgroup/cpu/cpu.cfs_";
  std::string limits = read_line("/sys/fs/cgroup/cpu.max");
  if (limits.empty()) limits = read_line(v1 + "quota_us") + " " + read_line(v1 + "period_us");
  std::istringstream max(limits);
  double quota = 0, period = 0;
  if (max >> quota >> period && quota > 0 && period > 0) {
    return std::clamp<uint32_t>(uint32_t(quota / period + 0.5), 1, cores);
  }
  return cores;
}

/// Sets `cores` and `affinity`.
void describe_cores(Hello& hello) {
  // A set of the least size holds 1024 cores, and the call fails if the kernel's own set is larger.
  for (std::vector<cpu_set_t> set(1); set.size() <= 64; set.resize(2 * set.size())) {
    const size_t bytes = set.size() * sizeof(cpu_set_t);
    if (sched_getaffinity(0, bytes, set.data()) != 0) continue;
    const uint32_t allowed = uint32_t(CPU_COUNT_S(bytes, set.data()));
    Hash hash;
    for (size_t core = 0; core < 8 * bytes; ++core) {
      if (CPU_ISSET_S(core, bytes, set.data())) hash.add(core);
    }
    hello.cores = quota_cores(allowed);
    hello.affinity = hello.cores < allowed ? 0 : uint32_t(hash.value()) | 1;
    return;
  }
  hello.cores = quota_cores(uint32_t(std::max(sysconf(_SC_NPROCESSORS_ONLN), 1L)));  // the call is refused
}

uint64_t cache_bytes(int index) {
  const std::string path = "/sys/devices/system/cpu/cpu0/cache/index" + std::to_string(index) + "/size";
  return uint64_t(std::strtoull(read_line(path).c_str(), nullptr, 10)) << 10;  // "1024K"
}

template <size_t N>
bool terminated(const char (&field)[N]) {
  return std::memchr(field, '\0', N) != nullptr;
}

/// The items of a list that another one does not have.
std::string only_in(const std::string& list, const std::string& other) {
  constexpr size_t kMost = 200;
  std::vector<std::string> own = items(list);
  const std::vector<std::string> theirs = items(other);
  std::erase_if(own, [&](const std::string& item) { return std::ranges::count(theirs, item) != 0; });
  const std::string text = printable(joined(own));
  return text.size() > kMost ? text.substr(0, kMost) + "..." : text;
}

/// ": rank 0 has lease=1048576, rank 1 has lease=2097152", or nothing if a value is not known.
std::string values_apart(const Hello& a, const std::string& of_a, const Hello& b, const std::string& of_b) {
  const std::string only_a = only_in(of_a, of_b), only_b = only_in(of_b, of_a);
  if (only_a.empty() && only_b.empty()) return "";
  if (only_a.empty()) return ": " + of_rank(b.rank) + " has " + only_b + ", " + of_rank(a.rank) + " does not";
  return ": " + of_rank(a.rank) + " has " + only_a + ", " + of_rank(b.rank) +
         (only_b.empty() ? " does not" : " has " + only_b);
}

/// The variables in which two ranks differ, with their values.
std::string differing(const Hello& a, std::istringstream of_a, const Hello& b, std::istringstream of_b) {
  std::vector<std::string> all;
  for (size_t i = 0; i < kAgreed.size(); ++i) {
    std::string own, other;
    const bool known = std::getline(of_a, own) && std::getline(of_b, other);
    if (a.agreed[i] != b.agreed[i]) all.push_back(kAgreed[i] + (known ? values_apart(a, own, b, other) : ""));
  }
  return joined(all, "; ");
}

/// The error for a rank whose job key is not that of rank 0.
Error different_keys(const Topology& topology, int rank) {
  const bool has = topology.ranks[size_t(rank)].key_tag != 0, first_has = topology.ranks[0].key_tag != 0;
  const std::string name = topology.describe(rank), first = topology.describe(0);
  const std::string what =
      has && first_has ? name + " and " + first + " have different keys in NVX_JOB_KEY"
                       : (has ? name : first) + " has an NVX_JOB_KEY, and " + (has ? first : name) + " has none";
  return {Code::kMismatch, "nvx: " + what, "set the same NVX_JOB_KEY on all ranks, or on none"};
}

}  // namespace

std::string read_line(const std::string& path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

std::string own_host_name(const std::string& host) {
  if (!host.empty()) return host;
  if (!config().host_id.empty()) return config().host_id;
  char name[sizeof Hello::host_name] = {};
  gethostname(name, sizeof name - 1);
  return name;
}

Hello describe_self(int rank, const std::string& host) {
  const std::string& name = host.empty() ? config().host_id : host;
  Hello hello;
  hello.bytes = sizeof(Hello);
  hello.rank = rank;
  hello.pid = int32_t(getpid());
  const std::optional<uint64_t> machine = machine_seen();
  hello.host = host_hash(name, machine);
  hello.machine = machine ? std::max<uint32_t>(uint32_t(*machine), 1) : 0;
  hello.agreed = config().agreed();
  describe_cores(hello);
  hello.l2_bytes = cache_bytes(2);
  hello.l3_bytes = cache_bytes(3);
  hello.nonce = random_value<uint64_t>();
  put(hello.host_name, own_host_name(name));
  return hello;
}

Error different_sizes(const Hello& rank, size_t theirs, const std::string& own, size_t mine) {
  return {Code::kMismatch,
          "nvx: " + described(of_rank(rank.rank), place_of(rank)) + " creates this group with " +
              std::to_string(theirs) + " ranks, " + own + " with " + std::to_string(mine),
          "give all ranks the same world size, or list of ranks"};
}

Error different_members(const Hello& rank, const std::string& group) {
  return {Code::kMismatch,
          "nvx: " + described(of_rank(rank.rank), place_of(rank)) + " creates group " + group +
              " for other global ranks than rank 0 does",
          kSameGroups};
}

std::vector<uint8_t> encode(std::span<const Hello> hellos) {
  const auto* bytes = reinterpret_cast<const uint8_t*>(hellos.data());
  return {bytes, bytes + hellos.size_bytes()};
}

Hello decode_first(std::span<const uint8_t> value) {
  return decode(value.first(std::min(value.size(), sizeof(Hello))), 1).front();
}

std::vector<Hello> decode(std::span<const uint8_t> value, size_t count) {
  if (value.size() != count * sizeof(Hello)) {
    const bool whole = !value.empty() && value.size() % sizeof(Hello) == 0;
    Hello first;
    if (whole) std::memcpy(&first, value.data(), sizeof first);
    first.host_name[sizeof first.host_name - 1] = '\0';
    if (whole && first.magic == Hello::kMagic && first.wire_version == Hello::kWire)
      throw different_sizes(first, value.size() / sizeof(Hello), "this rank", count);
    throw Error(Code::kMismatch,
                "nvx: the store holds " + std::to_string(value.size()) + " bytes where " +
                    std::to_string(count * sizeof(Hello)) +
                    " were expected: ranks run different versions of nvx, or something else wrote there");
  }
  std::vector<Hello> hellos(count);
  std::memcpy(hellos.data(), value.data(), value.size());
  for (const Hello& hello : hellos) {
    if (hello.magic != Hello::kMagic || hello.wire_version != Hello::kWire || hello.bytes != sizeof(Hello)) {
      throw Error(Code::kMismatch,
                  "nvx: rank " + std::to_string(hello.rank) + " uses wire protocol " +
                      std::to_string(hello.wire_version) + ", this rank " + std::to_string(Hello::kWire),
                  kOneVersion);
    }
    if (!terminated(hello.host_name) || !terminated(hello.socket)) {
      throw Error(Code::kMismatch, "nvx: a rank's description in the store is damaged", kOneVersion);
    }
  }
  return hellos;
}

namespace {

/// Precedes the addresses of all ranks; each address follows its length.
struct AddressesHead {
  static constexpr uint32_t kMagic = 0x6178766e;  // "nvxa"
  uint32_t magic = kMagic;
  uint32_t count = 0;
};
constexpr size_t kMostAddress = 16 << 10;

[[noreturn]] void damaged_addresses() {
  throw Error(Code::kMismatch, "nvx: the ranks' addresses in the store are damaged, or of another version of nvx",
              kOneVersion);
}

}  // namespace

std::vector<uint8_t> encode_addresses(const std::vector<std::vector<std::byte>>& addresses) {
  const AddressesHead head{AddressesHead::kMagic, uint32_t(addresses.size())};
  std::vector<uint8_t> value(sizeof head);
  std::memcpy(value.data(), &head, sizeof head);
  for (const std::vector<std::byte>& address : addresses) {
    const uint32_t bytes = uint32_t(address.size());
    const size_t at = value.size();
    value.resize(at + sizeof bytes + bytes);
    std::memcpy(value.data() + at, &bytes, sizeof bytes);
    if (bytes) std::memcpy(value.data() + at + sizeof bytes, address.data(), bytes);
  }
  return value;
}

std::vector<std::vector<std::byte>> decode_addresses(std::span<const uint8_t> value, size_t count) {
  AddressesHead head;
  if (value.size() < sizeof head) damaged_addresses();
  std::memcpy(&head, value.data(), sizeof head);
  if (head.magic != AddressesHead::kMagic || head.count != count) damaged_addresses();
  value = value.subspan(sizeof head);
  std::vector<std::vector<std::byte>> addresses;
  for (size_t i = 0; i < count; ++i) {
    uint32_t bytes = 0;
    if (value.size() < sizeof bytes) damaged_addresses();
    std::memcpy(&bytes, value.data(), sizeof bytes);
    value = value.subspan(sizeof bytes);
    if (bytes > kMostAddress || bytes > value.size()) damaged_addresses();
    const auto* begin = reinterpret_cast<const std::byte*>(value.data());
    addresses.emplace_back(begin, begin + bytes);
    value = value.subspan(bytes);
  }
  if (!value.empty()) damaged_addresses();
  return addresses;
}

size_t Topology::rails() const {
  size_t least = ranks.size();
  for (const std::vector<int>& host : hosts) least = std::min(least, host.size());
  return least;
}

Topology Topology::from(std::vector<Hello> ranks, const std::function<std::string(int rank)>& settings) {
  Topology topology;
  topology.l2_bytes = ranks.front().l2_bytes;
  topology.l3_bytes = ranks.front().l3_bytes;
  topology.ranks = std::move(ranks);
  for (size_t i = 0; i < topology.ranks.size(); ++i) {
    const Hello& first = topology.ranks.front();
    const Hello& hello = topology.ranks[i];
    if (hello.rank != int32_t(i))
      throw Error(Code::kMismatch, "nvx: two processes have rank " + std::to_string(hello.rank));
    if (hello.agreed != first.agreed) {
      const auto values = [&](int rank) { return std::istringstream(settings ? settings(rank) : ""); };
      throw Error(Code::kMismatch,
                  "nvx: " + topology.describe(int(i)) + " and " + topology.describe(0) + " differ in " +
                      differing(first, values(0), hello, values(int(i))),
                  "set the variable to the same value on all ranks, or on none");
    }
    if (hello.key_tag != first.key_tag) throw different_keys(topology, int(i));
    topology.l2_bytes = std::min<size_t>(topology.l2_bytes, hello.l2_bytes);
    topology.l3_bytes = std::min<size_t>(topology.l3_bytes, hello.l3_bytes);
  }
  topology.sort_by_host();
  topology.count_cores();
  return topology;
}

/// Ranks that launchers bind to cores of their own have these cores together; other ranks share theirs. A hello has the
/// number and a hash of its rank's cores, so sets that differ count as disjoint: a core of two of them counts twice.
void Topology::count_cores() {
  for (const std::vector<int>& host : hosts) {
    std::map<uint32_t, size_t> shared;  // by affinity
    for (const int rank : host) {
      const Hello& hello = ranks[size_t(rank)];
      const auto [known, fresh] = shared.emplace(hello.affinity, hello.cores);
      if (!fresh) known->second = std::min<size_t>(known->second, hello.cores);
    }
    size_t all = 0;
    for (const auto& [affinity, count] : shared) all += count;
    cores.push_back(all);
  }
}

void Topology::sort_by_host() {
  std::map<uint64_t, int> known;
  for (size_t i = 0; i < ranks.size(); ++i) {
    const auto [host, fresh] = known.emplace(ranks[i].host, int(hosts.size()));
    if (fresh) hosts.emplace_back();
    std::vector<int>& there = hosts[size_t(host->second)];
    host_of.push_back(host->second);
    local_rank_of.push_back(int(there.size()));
    const size_t first = there.empty() ? i : size_t(there.front());
    there.push_back(int(i));
    if (!on_different_machines(ranks[first], ranks[i])) continue;
    throw Error(Code::kMismatch,
                "nvx: " + describe(int(first)) + " and " + describe(int(i)) +
                    " have the same NVX_HOST_ID, but they run on different machines "
                    "or in different network namespaces, where they cannot share memory",
                "give the ranks of each machine, or container, an NVX_HOST_ID of their own, or unset it");
  }
}

std::vector<AddressPrefix> sources_of(const Hello& rank, const Hello& own) {
  std::vector<AddressPrefix> sources;
  for (const AddressBytes& address : rank.addresses) {
    if (address != AddressBytes{}) sources.push_back(AddressPrefix::of(address));
  }
  if (on_different_machines(rank, own)) return sources;
  const auto loopback = parse_prefixes("127.0.0.0/8,::1");
  sources.insert(sources.end(), loopback->begin(), loopback->end());
  return sources;
}

std::string Topology::host_warning() const {
  for (size_t without_id = 0; without_id < ranks.size(); ++without_id) {
    if (ranks[without_id].machine != 0) continue;
    for (size_t with_id = 0; with_id < ranks.size(); ++with_id) {
      const bool same_name = std::string(ranks[without_id].host_name) == ranks[with_id].host_name;
      if (ranks[with_id].machine == 0 || !same_name || host_of[without_id] == host_of[with_id]) continue;
      return describe(int(without_id)) + " cannot read " + kBootId + ", so it counts as on another host than " +
             describe(int(with_id));
    }
  }
  return "";
}

std::string Topology::describe() const {
  constexpr size_t kMostNamed = 4;
  const auto host_name = [this](size_t host) { return printable(ranks[size_t(hosts[host].front())].host_name); };
  const std::string all = std::to_string(ranks.size()) + (ranks.size() == 1 ? " rank" : " ranks");
  if (hosts.size() == 1) return all + " on host " + host_name(0);
  std::string spread;
  for (size_t h = 0; h < std::min(hosts.size(), kMostNamed); ++h)
    spread += (h ? ", " : "") + std::to_string(hosts[h].size()) + " on " + host_name(h);
  if (hosts.size() > kMostNamed) spread += ", ...";
  return all + " on " + std::to_string(hosts.size()) + " hosts: " + spread;
}

namespace {

/// The global rank, if it differs from the rank.
std::optional<uint64_t> global_name(int rank, const std::vector<uint64_t>& global_ranks) {
  const bool same = size_t(rank) >= global_ranks.size() || global_ranks[size_t(rank)] == uint64_t(rank);
  return same ? std::nullopt : std::optional(global_ranks[size_t(rank)]);
}

std::string in_the_job(uint64_t global) { return "global rank " + std::to_string(global); }

}  // namespace

std::string place_of(const Hello& hello) {
  return "pid " + std::to_string(hello.pid) + ", host " + printable(hello.host_name);
}

std::string described(const std::string& name, const std::string& place) {
  if (place.empty()) return name;
  const bool has_global = name.ends_with(')');
  return (has_global ? name.substr(0, name.size() - 1) + ", " : name + " (") + place + ")";
}

std::string rank_name(int rank, const std::vector<uint64_t>& global_ranks) {
  const std::optional<uint64_t> global = global_name(rank, global_ranks);
  return of_rank(rank) + (global ? " (" + in_the_job(*global) + ")" : "");
}

std::string Topology::describe(int rank, const std::string& more) const {
  return described(rank_name(rank, global_ranks), place_of(ranks[size_t(rank)]) + more);
}

std::string Topology::location(int rank) const { return "(" + place_of(ranks[size_t(rank)]) + ")"; }

}  // namespace nvx
