#include "group/topology.h"

#include <sched.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <sstream>

#include "base/config.h"
#include "base/error.h"
#include "base/hash.h"

namespace nvx {
namespace {

std::string read_line(const char* path) {
  std::ifstream file(path);
  std::string line;
  std::getline(file, line);
  return line;
}

/// Ranks share a host when they share a kernel and a network namespace, or say so.
uint64_t host_hash() {
  if (!config().host_id.empty()) return Hash().add(config().host_id).value();
  struct stat net {};
  stat("/proc/self/ns/net", &net);
  return Hash().add(read_line("/proc/sys/kernel/random/boot_id")).add(uint64_t(net.st_ino)).value();
}

/// What the cgroup's quota leaves of the cores, in whole cores.
uint32_t quota_cores(uint32_t cores) {
  std::istringstream max(read_line("/sys/fs/cgroup/cpu.max"));
  double quota = 0, period = 0;
  if (max >> quota >> period && quota > 0 && period > 0) {
    return std::clamp<uint32_t>(uint32_t(quota / period + 0.5), 1, cores);
  }
  return cores;
}

uint32_t usable_cores() {
  cpu_set_t set;
  CPU_ZERO(&set);
  const uint32_t cores = sched_getaffinity(0, sizeof set, &set) == 0 ? uint32_t(CPU_COUNT(&set)) : 1;
  return quota_cores(std::max<uint32_t>(cores, 1));
}

uint64_t cache_bytes(int index) {
  const std::string path = "/sys/devices/system/cpu/cpu0/cache/index" + std::to_string(index) + "/size";
  return uint64_t(std::strtoull(read_line(path.c_str()).c_str(), nullptr, 10)) << 10;  // "1024K"
}

void put(char* field, size_t size, const std::string& text) {
  const size_t n = std::min(text.size(), size - 1);
  std::memcpy(field, text.data(), n);
  field[n] = '\0';
}

template <size_t N>
bool terminated(const char (&field)[N]) {
  return std::memchr(field, '\0', N) != nullptr;
}

}  // namespace

Hello describe_self(int rank) {
  Hello hello;
  hello.bytes = sizeof(Hello);
  hello.rank = rank;
  hello.pid = int32_t(getpid());
  hello.host = host_hash();
  hello.plan_hash = config().plan_hash();
  hello.cores = usable_cores();
  hello.l2_bytes = cache_bytes(2);
  hello.l3_bytes = cache_bytes(3);
  if (getrandom(&hello.nonce, sizeof hello.nonce, 0) != ssize_t(sizeof hello.nonce))
    throw system_error("getrandom failed");
  char name[48] = {};
  gethostname(name, sizeof name - 1);
  put(hello.host_name, sizeof hello.host_name, config().host_id.empty() ? name : config().host_id);
  put(hello.version, sizeof hello.version, NVX_VERSION);
  return hello;
}

std::vector<uint8_t> encode(std::span<const Hello> hellos) {
  const auto* bytes = reinterpret_cast<const uint8_t*>(hellos.data());
  return {bytes, bytes + hellos.size_bytes()};
}

std::vector<Hello> decode(std::span<const uint8_t> value, size_t count) {
  if (value.size() != count * sizeof(Hello)) {
    throw Error(Code::kMismatch,
                "nvx: the store holds " + std::to_string(value.size()) + " bytes where " +
                    std::to_string(count * sizeof(Hello)) +
                    " were expected: ranks run different versions of nvx, or something else wrote there");
  }
  std::vector<Hello> hellos(count);
  std::memcpy(hellos.data(), value.data(), value.size());
  for (const Hello& hello : hellos) {
    if (hello.magic != Hello::kMagic || hello.wire != Hello::kWire || hello.bytes != sizeof(Hello)) {
      throw Error(Code::kMismatch, "nvx: rank " + std::to_string(hello.rank) + " speaks protocol " +
                                       std::to_string(hello.wire) + ", this rank " + std::to_string(Hello::kWire) +
                                       ": install one version of nvx everywhere");
    }
    if (!terminated(hello.host_name) || !terminated(hello.door) || !terminated(hello.version)) {
      throw Error(Code::kMismatch, "nvx: a rank's description in the store is damaged");
    }
  }
  return hellos;
}

Topology Topology::from(std::vector<Hello> ranks) {
  Topology topology;
  topology.cores = ranks.front().cores;
  topology.l2_bytes = ranks.front().l2_bytes;
  topology.l3_bytes = ranks.front().l3_bytes;
  topology.ranks = std::move(ranks);
  for (size_t i = 0; i < topology.ranks.size(); ++i) {
    const Hello& first = topology.ranks.front();
    const Hello& hello = topology.ranks[i];
    if (hello.rank != int32_t(i))
      throw Error(Code::kMismatch, "nvx: two ranks say that they are rank " + std::to_string(hello.rank));
    if (hello.plan_hash != first.plan_hash) {
      throw Error(Code::kMismatch, "nvx: " + topology.describe(int(i)) + " and " + topology.describe(0) +
                                       " differ in NVX_ALGO or NVX_ONE_SHOT_BYTES; set the same on all ranks");
    }
    if (hello.host != first.host) {
      throw Error(Code::kInvalid, "nvx: " + topology.describe(0) + " and " + topology.describe(int(i)) +
                                      " are on different hosts, and this version of nvx serves ranks of one host only");
    }
    topology.cores = std::min<size_t>(topology.cores, hello.cores);
    topology.l2_bytes = std::min<size_t>(topology.l2_bytes, hello.l2_bytes);
    topology.l3_bytes = std::min<size_t>(topology.l3_bytes, hello.l3_bytes);
  }
  return topology;
}

std::string Topology::describe(int rank) const {
  const Hello& hello = ranks[size_t(rank)];
  return "rank " + std::to_string(rank) + " (pid " + std::to_string(hello.pid) + ", host " + hello.host_name + ")";
}

}  // namespace nvx
