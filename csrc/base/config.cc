#include "base/config.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <numeric>
#include <vector>

#include "base/hash.h"
#include "base/log.h"

extern char** environ;

namespace nvx {
namespace {

constexpr Variable kVariables[] = {
    {"NVX_DEBUG", "warn", "what is written to stderr: warn, info (what was chosen and why), trace (every operation)"},
    {"NVX_HOST_ID", "", "overrides which host this rank is on: ranks with the same text share a host"},
    {"NVX_SOCKET_IFNAME", "",
     "network interfaces between hosts: prefixes of names, names behind '=', what to leave out behind '^'; empty: "
     "GLOO_SOCKET_IFNAME, else NCCL_SOCKET_IFNAME, else UCX's choice"},
    {"NVX_LIBUCP", "",
     "the libucp.so.0 to load, or its folder; empty: one with RDMA where there is RDMA, else the newest"},
    {"NVX_ON_ERROR", "raise", "what a failed operation does: raise a Python exception, or abort the process"},
    {"NVX_TIMEOUT_S", "0", "seconds an operation may wait, instead of the group's timeout; 0 keeps the group's"},
    {"NVX_LIVENESS_S", "10", "seconds after which a rank of another host that is waited for and gives no sign is lost"},
    {"NVX_SPIN_US", "-1", "microseconds a waiter spins before it sleeps; -1: 200, or 0 where ranks outnumber cores"},
    {"NVX_ALGO", "", "forces one_shot or pipelined wherever both are possible"},
    {"NVX_ONE_SHOT_BYTES", "-1",
     "largest message that goes through the one-shot slots (at most 65536); -1: the plan's"},
    {"NVX_STAGING_MB", "32", "most staging memory a process exports for all its groups"},
    {"NVX_LEASE_KB", "0", "staging that one large operation leases; 0: sized from the caches and the rank count"},
    {"NVX_CPU_LEVEL", "",
     "instruction-set level of the copy and reduce loops (base, v3, v4); empty: the best there is"},
    {"NVX_CUDA", "", "read by the build only: 0 builds without CUDA"},
};

std::string text(const char* name) {
  for (const Variable& v : kVariables) {
    if (std::strcmp(v.name, name) != 0) continue;
    const char* set = std::getenv(name);
    return set && *set ? set : v.fallback;
  }
  return "";
}

/// One of these words; the first is the default.
std::string choice(const char* name, std::initializer_list<const char*> words) {
  const std::string set = text(name);
  std::string list;
  for (const char* word : words) {
    if (strcasecmp(set.c_str(), word) == 0) return word;
    if (*word) list += (list.empty() ? "" : ", ") + std::string(word);
  }
  NVX_LOG(kWarn, "%s=%s is none of %s; the default is used", name, set.c_str(), list.c_str());
  return *words.begin();
}

int64_t number(const char* name) {
  const std::string set = text(name);
  char* end = nullptr;
  const int64_t value = std::strtoll(set.c_str(), &end, 10);
  if (end && *end == '\0' && !set.empty()) return value;
  NVX_LOG(kWarn, "%s=%s is not a number; the default is used", name, set.c_str());
  for (const Variable& v : kVariables) {
    if (std::strcmp(v.name, name) == 0) return std::strtoll(v.fallback, nullptr, 10);
  }
  return 0;
}

size_t edit_distance(const std::string& a, const std::string& b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), 0);
  for (size_t i = 1; i <= a.size(); ++i) {
    size_t corner = row[0];
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      const size_t swap = corner + (a[i - 1] != b[j - 1]);
      corner = row[j];
      row[j] = std::min({row[j] + 1, row[j - 1] + 1, swap});
    }
  }
  return row[b.size()];
}

void warn_of_unknown() {
  for (char** entry = environ; entry && *entry; ++entry) {
    const std::string name(*entry, std::strcspn(*entry, "="));
    if (name.rfind("NVX_", 0) != 0 || name.rfind("NVX_TEST_", 0) == 0) continue;
    if (name.rfind("NVX_UCX_", 0) == 0) continue;  // UCX's own: settings for the UCX inside nvx alone
    const Variable* nearest = kVariables;
    for (const Variable& v : kVariables) {
      if (edit_distance(name, v.name) < edit_distance(name, nearest->name)) nearest = &v;
    }
    if (name == nearest->name) continue;
    constexpr size_t kTypo = 2;  // letters
    const bool near = edit_distance(name, nearest->name) <= kTypo;
    const std::string hint = near ? "did you mean " + std::string(nearest->name) + "?" : "`nvx env` lists those it has";
    NVX_LOG(kWarn, "%s is set, but nvx has no such variable; %s", name.c_str(), hint.c_str());
  }
}

Config read() {
  warn_of_unknown();
  return {.debug = choice("NVX_DEBUG", {"warn", "info", "trace"}),
          .host_id = text("NVX_HOST_ID"),
          .socket_ifname = text("NVX_SOCKET_IFNAME"),
          .libucp = text("NVX_LIBUCP"),
          .on_error = choice("NVX_ON_ERROR", {"raise", "abort"}),
          .algorithm = choice("NVX_ALGO", {"", "one_shot", "pipelined"}),
          .cpu_level = text("NVX_CPU_LEVEL"),
          .timeout_s = number("NVX_TIMEOUT_S"),
          .liveness_s = number("NVX_LIVENESS_S"),
          .spin_us = number("NVX_SPIN_US"),
          .staging_mb = number("NVX_STAGING_MB"),
          .lease_kb = number("NVX_LEASE_KB"),
          .one_shot_bytes = number("NVX_ONE_SHOT_BYTES")};
}

}  // namespace

std::span<const Variable> variables() { return kVariables; }

uint64_t Config::plan_hash() const { return Hash().add(algorithm).add(uint64_t(one_shot_bytes)).value(); }

const Config& config() {
  static const Config* const kConfig =
      new Config(read());  // never destroyed: threads may read it while the process exits
  return *kConfig;
}

}  // namespace nvx
