#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace nvx {

/// One `NVX_*` variable. The table in the documentation is generated from these rows.
struct Variable {
  const char* name;
  const char* fallback;
  const char* unset;  ///< the effect of the default, unless its value states it
  const char* meaning;
  const char* takes = "";  ///< the accepted words, or a kind of value, as kWhole; empty: any text
  double least = 0;        ///< of a number
  const char* form = "";   ///< of any text: a description for users; its reader checks the value, not `fault()`
};

std::span<const Variable> variables();

/// The default, with its effect: "0: the group's timeout", "warn".
std::string default_of(const Variable& variable);
/// The values that the variable accepts: "a whole number from -1 on", "warn, info, trace", "a folder".
std::string accepted(const Variable& variable);

/// The reason why the variable's current value is refused: "none of warn, info, trace", "not a whole number", "less
/// than 0". Empty if the value is valid or the variable is not set.
std::string fault(const Variable& variable);

/// A variable that is set and begins with `NVX_`, but is unknown to nvx. `hint` names the likely intention.
struct UnknownVariable {
  std::string name;
  std::string hint;
};
std::vector<UnknownVariable> unknown_variables();

/// An item of `NVX_DELEGATE`: a collective of device tensors, or "send_recv" for messages, that goes to NCCL from this
/// size on.
struct DelegateRule {
  std::string collective;
  uint64_t least_bytes = 0;
};

/// When kernels serve CUDA tensors. They never do if their results are wrong.
enum class Kernels : uint8_t { kNever, kIfFast, kAlways };
Kernels kernels_of(const std::string& word);

/// The variables that affect the choice of an algorithm. Set-up refuses ranks that differ in one of them.
inline constexpr std::array kAgreed = {"NVX_ALGO", "NVX_TUNE", "NVX_DELEGATE", "NVX_KERNELS", "NVX_NVLS"};
using Agreed = std::array<uint64_t, kAgreed.size()>;

/// The environment at the first call of config().
struct Config {
  std::string debug;
  std::string host_id;
  std::string socket_ifname;
  std::string allow_from;
  std::string job_key;  ///< a secret: for net/tcp/job_key.h only
  std::string libucp;
  std::string on_error;
  std::string algorithm;
  std::string cpu_level;
  std::chrono::milliseconds timeout;  ///< 0: the group's timeout
  std::chrono::milliseconds liveness;
  int64_t spin_us;
  int64_t staging_mb;
  std::string tune;  ///< as set; set-up puts the values that it names in its place
  std::vector<DelegateRule> delegate;
  Kernels kernels;
  bool nvls;
  std::string trace;

  /// The values of the variables of `kAgreed`; none has a line break.
  std::array<std::string, kAgreed.size()> agreed_values() const;
  /// Their hashes.
  Agreed agreed() const;
};

/// Whether `NVX_DELEGATE` accepts this collective.
bool may_be_delegated(const std::string& collective);

/// Reads the environment at the first call only, and then warns of unknown `NVX_*` variables.
const Config& config();

}  // namespace nvx
