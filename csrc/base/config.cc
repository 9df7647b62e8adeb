#include "base/config.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <vector>

#include <unistd.h>

#include "base/address_prefix.h"
#include "base/hash.h"
#include "base/log.h"
#include "base/text.h"

namespace nvx {
namespace {

constexpr char kWhole[] = "a whole number";
constexpr char kSeconds[] = "a number";  // fractions are allowed
constexpr char kDelegated[] = "all_reduce, reduce, broadcast, all_gather, reduce_scatter, send_recv";
constexpr char kAddresses[] = "addresses and prefixes, separated by commas (10.0.0.7,10.1.0.0/16,fd00::/8)";

constexpr double kMost = 1e9;  // an upper bound where there is no natural one

/// docs/environment.md is made from this: after a change, `tests/gates/run docs --fix` (`make quick` does not check).
constexpr Variable kVariables[] = {
    {"NVX_DEBUG", "warn", "", "messages on stderr: warn, info (choices and their reasons), trace (every collective)",
     "warn, info, trace"},
    {"NVX_TRACE", "", "nothing is recorded",
     "each rank keeps its last calls and waits in a file of 8.5 MiB there; `nvx trace` shows them", "", 0,
     "a folder, made if missing"},
    {"NVX_AS", "", "none", "nvx replaces these backends in a program that does not name nvx; the same on all ranks", "",
     0, "gloo, nccl or gloo,nccl"},
    {"NVX_HOST_ID", "", "by kernel and network namespace",
     "overrides which host this rank is on: ranks with the same text share a host"},
    {"NVX_SOCKET_IFNAME", "",
     "GLOO_SOCKET_IFNAME, else NCCL_SOCKET_IFNAME, else the interface that leads to the host of the TCPStore, and "
     "other cards that are at least as fast",
     "network interfaces between hosts, for groups over several hosts only: a list of prefixes of names; with '=' in "
     "front, of exact names; with '^' in front, of prefixes to exclude (=eth0, ^docker,veth)",
     "", 0, "interfaces, separated by commas"},
    {"NVX_ALLOW_FROM", "", "the hosts of a group only",
     "peers that may connect over TCP, besides the hosts of a group: for those behind address translation", kAddresses},
    {"NVX_JOB_KEY", "", "none: hosts are connected by UCX, without authentication",
     "the job's secret, or the file with it: ranks on different hosts are connected by nvx's own TCP transport, which "
     "admits only processes that hold it; the same on all ranks",
     "", 0, "16 to 4096 characters, or '@' and a path"},
    {"NVX_LIBUCP", "", "one with RDMA if the machine has RDMA, else the newest",
     "the libucp.so.0 to load, or its folder; for groups over several hosts only", "", 0, "a path"},
    {"NVX_ON_ERROR", "raise", "", "effect of a failed operation: raise a Python exception, or abort the process",
     "raise, abort"},
    {"NVX_TIMEOUT_S", "0", "the group's timeout",
     "seconds an operation or a set-up may wait, instead of the group's timeout; a timeout that a call passes wins",
     kSeconds, 0},
    {"NVX_LIVENESS_S", "10", "",
     "seconds without an answer after which a rank of another host that others wait for counts as lost", kSeconds, 1},
    {"NVX_SPIN_US", "-1", "200, or 0 where ranks outnumber cores",
     "microseconds a waiter spins before it sleeps; more than 20000 counts as 20000", kWhole, -1},
    {"NVX_ALGO", "", "size and ranks decide",
     "forces an algorithm. CPU tensors up to 64 KiB inside a host: one_shot or pipelined. CUDA tensors by kernels: "
     "one_shot sends packets in one trip where they fit, pipelined sends chunks at every size. NVX_TUNE sets the "
     "limits between algorithms",
     "one_shot, pipelined"},
    {"NVX_TUNE", "", "the table that `nvx explain` prints",
     "keys of the table of `nvx explain` with other values, and '@' with the path of a file that `nvx tune` wrote "
     "(@two.tune,all_reduce.one_shot=16K); a group with an unknown key or a value out of its bounds fails to "
     "initialise",
     "", 0, "key=value and @path, separated by commas"},
    // 30: 64 groups of two ranks that have all used their staging hold less than 1 MiB each, the peer's share and the
    // pads included.
    {"NVX_STAGING_MB", "30", "",
     "limit in MiB of the staging memory that a process exports, over all its groups; more than 512 counts as 512",
     kWhole, 1},
    {"NVX_CPU_LEVEL", "", "the best that the processor has", "instruction-set level of the copy and reduce loops",
     "base, v3, v4"},
    {"NVX_DELEGATE", "none", "",
     "collectives of CUDA tensors, and send_recv for messages, to run on torch's own NCCL where it can serve all "
     "ranks; each optionally with a minimum total size (all_reduce:64M,broadcast). Untested with a real NCCL",
     kDelegated},
    {"NVX_KERNELS", "auto", "",
     "auto: use nvx's CUDA kernels if they are built and a trial operation takes at most 1 ms; 1: use them however "
     "slow the trial is; 0: copy CUDA tensors through host memory",
     "auto, 0, 1"},
    {"NVX_NVLS", "0", "",
     "1: kernels sum float32, float16 and bfloat16 of all_reduce on the NVSwitch (NVLS), where the GPUs of all ranks "
     "can multicast; the last bits may differ. Untested on a GPU",
     "0, 1"},
    {"NVX_CUDA", "", "the kernels are built where torch has CUDA and an nvcc fits",
     "read by the build only: 1 fails if it cannot build the CUDA kernels, 0 builds none", "", 0, "0, 1"},
};

const Variable& row(const char* name) {
  return *std::ranges::find_if(kVariables, [&](const Variable& v) { return std::strcmp(v.name, name) == 0; });
}

std::string text(const Variable& v) {
  const char* set = std::getenv(v.name);
  return set && *set ? set : v.fallback;
}

std::string text(const char* name) { return text(row(name)); }

/// The accepted word that equals `set` in any case, or nothing.
std::optional<std::string> as_word(const Variable& v, const std::string& set) {
  if (set == v.fallback) return set;
  for (const std::string& one : items(v.takes)) {
    if (strcasecmp(set.c_str(), one.c_str()) == 0) return one;
  }
  return std::nullopt;
}

bool is_number(const Variable& v) { return v.takes == kWhole || v.takes == kSeconds; }

/// Parses a number independently of the locale.
std::optional<double> as_number(const std::string& set) {
  double value = 0;
  const char* const end = set.data() + set.size();
  const auto [stop, error] = std::from_chars(set.data(), end, value);
  if (error != std::errc() || stop != end || !std::isfinite(value)) return std::nullopt;
  return value;
}

std::string decimal(double bound) { return std::to_string(int64_t(bound)); }

std::string fault_of_number(const Variable& v, const std::string& set) {
  const std::optional<double> value = as_number(set);
  if (!value) return "not a number";
  if (v.takes == kWhole && *value != std::floor(*value)) return "not a whole number";
  if (*value < v.least) return "less than " + decimal(v.least);
  if (*value > kMost) return "more than " + decimal(kMost);
  return "";
}

/// Parses a list that names each collective at most once. Returns nothing if any item is wrong.
std::optional<std::vector<DelegateRule>> parse_delegate_rules(const std::string& set) {
  std::vector<DelegateRule> all;
  const std::vector<std::string> known = items(kDelegated), named = items(set);
  if (named == std::vector<std::string>{"none"}) return all;
  for (const std::string& one : named) {
    const size_t sign = one.find(':');
    const std::string name = trimmed(one.substr(0, sign));
    const auto least = sign == std::string::npos ? 0 : size_of_text(trimmed(one.substr(sign + 1)));
    const bool twice = std::ranges::count(all, name, &DelegateRule::collective) != 0;
    if (!least || twice || std::ranges::count(known, name) == 0) return std::nullopt;
    all.push_back({name, *least});
  }
  std::ranges::sort(all, {}, &DelegateRule::collective);  // ranks that list the same collectives in another order agree
  return all;
}

void warn_of_fault(const Variable& v) {
  NVX_LOG(kWarn, "%s=%s is %s; the default (%s) is used. 'nvx env' lists the accepted values", v.name, text(v).c_str(),
          fault(v).c_str(), default_of(v).c_str());
}

/// Uses no default in place of a wrong list: the first link to other hosts refuses it.
std::string addresses(const char* name) {
  const Variable& v = row(name);
  if (const std::string why = fault(v); !why.empty())
    NVX_LOG(kWarn, "%s=%s is %s; groups over several hosts fail", v.name, text(v).c_str(), why.c_str());
  return text(v);
}

std::string choice(const char* name) {
  const Variable& v = row(name);
  if (const std::optional<std::string> known = as_word(v, text(v))) return *known;
  warn_of_fault(v);
  return v.fallback;
}

double number(const char* name) {
  const Variable& v = row(name);
  if (fault(v).empty()) return *as_number(text(v));
  warn_of_fault(v);
  return *as_number(v.fallback);
}

int64_t whole(const char* name) { return int64_t(number(name)); }

/// Rounds up: a span greater than 0 must not become 0.
std::chrono::milliseconds seconds(const char* name) {
  return std::chrono::ceil<std::chrono::milliseconds>(std::chrono::duration<double>(number(name)));
}

std::vector<DelegateRule> delegate_rules(const char* name) {
  const Variable& v = row(name);
  if (auto all = parse_delegate_rules(text(v))) return *std::move(all);
  warn_of_fault(v);
  return {};
}

}  // namespace

std::vector<UnknownVariable> unknown_variables() {
  std::vector<UnknownVariable> all;
  std::vector<std::string> known;
  for (const Variable& v : kVariables) known.push_back(v.name);
  for (char** entry = environ; entry && *entry; ++entry) {
    const std::string name(*entry, std::strcspn(*entry, "="));
    if (name.rfind("NVX_", 0) != 0 || name.rfind("NVX_TEST_", 0) == 0) continue;
    if (name.rfind("NVX_UCX_", 0) == 0) continue;  // settings for the UCX inside nvx alone
    const std::optional<std::string> meant = nearest(name, known);
    if (meant == name) continue;
    all.push_back({name, meant ? "did you mean " + *meant + "?" : "`nvx env` lists all variables"});
  }
  return all;
}

namespace {

Config read() {
  for (const UnknownVariable& one : unknown_variables()) {
    NVX_LOG(kWarn, "%s is set, but nvx knows no such variable; %s", one.name.c_str(), one.hint.c_str());
  }
  return {.debug = choice("NVX_DEBUG"),
          .host_id = text("NVX_HOST_ID"),
          .socket_ifname = text("NVX_SOCKET_IFNAME"),
          .allow_from = addresses("NVX_ALLOW_FROM"),
          .job_key = text("NVX_JOB_KEY"),
          .libucp = text("NVX_LIBUCP"),
          .on_error = choice("NVX_ON_ERROR"),
          .algorithm = choice("NVX_ALGO"),
          .cpu_level = choice("NVX_CPU_LEVEL"),
          .timeout = seconds("NVX_TIMEOUT_S"),
          .liveness = seconds("NVX_LIVENESS_S"),
          .spin_us = whole("NVX_SPIN_US"),
          .staging_mb = whole("NVX_STAGING_MB"),
          .tune = text("NVX_TUNE"),
          .delegate = delegate_rules("NVX_DELEGATE"),
          .kernels = kernels_of(choice("NVX_KERNELS")),
          .nvls = choice("NVX_NVLS") == "1",
          .trace = text("NVX_TRACE")};
}

}  // namespace

std::span<const Variable> variables() { return kVariables; }

Kernels kernels_of(const std::string& word) {
  return word == "0" ? Kernels::kNever : word == "1" ? Kernels::kAlways : Kernels::kIfFast;
}

std::string default_of(const Variable& v) {
  return (*v.fallback ? v.fallback : "unset") + (*v.unset ? std::string(": ") + v.unset : "");
}

std::string accepted(const Variable& v) {
  if (!*v.takes) return *v.form ? v.form : "any text";
  if (v.takes == kDelegated) return "none, or a list of " + std::string(kDelegated) + ", each optionally with a size";
  if (!is_number(v)) return v.takes;
  return std::string(v.takes) + " from " + decimal(v.least) + " on";
}

std::string fault(const Variable& v) {
  if (!*v.takes) return "";
  if (is_number(v)) return fault_of_number(v, text(v));
  if (v.takes == kAddresses) return parse_prefixes(text(v)) ? "" : "not a list of " + std::string(kAddresses);
  if (v.takes == kDelegated) {
    return parse_delegate_rules(text(v)) ? ""
                                         : std::string("neither none nor a list, each once, of ") + kDelegated +
                                               ", each optionally with a size (all_reduce:64M,broadcast)";
  }
  return as_word(v, text(v)) ? "" : "none of " + std::string(v.takes);
}

std::array<std::string, kAgreed.size()> Config::agreed_values() const {
  std::vector<std::string> rules;
  for (const DelegateRule& one : delegate) rules.push_back(one.collective + ":" + std::to_string(one.least_bytes));
  const char* const when = kernels == Kernels::kNever ? "0" : kernels == Kernels::kAlways ? "1" : "auto";
  return {algorithm, tune, joined(rules), when, nvls ? "1" : "0"};
}

Agreed Config::agreed() const {
  Agreed hashes;
  std::ranges::transform(agreed_values(), hashes.begin(), [](const auto& value) { return Hash().add(value).value(); });
  return hashes;
}

bool may_be_delegated(const std::string& collective) {
  const std::vector<std::string> known = items(kDelegated);
  return std::ranges::count(known, collective) != 0;
}

const Config& config() {
  static const Config* const kConfig =
      new Config(read());  // never destroyed: threads may read it while the process exits
  return *kConfig;
}

}  // namespace nvx
