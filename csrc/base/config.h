#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace nvx {

/// One NVX_* variable: all there is to know about it. The documentation's table is made from these rows.
struct Variable {
  const char* name;
  const char* fallback;
  const char* meaning;
  const char* takes = "";      ///< the words it knows, or that it is a number; empty: any text
  double least = 0, most = 0;  ///< of a number
};

std::span<const Variable> variables();

/// Why what it is set to now is not taken: "none of warn, info, trace", "not a whole number", "less than 0". Empty if
/// it is, or is not set.
std::string fault(const Variable& variable);

/// A variable that is set and looks like one of nvx's, but is none; and what may have been meant.
struct Stray {
  std::string name;
  std::string hint;
};
std::vector<Stray> strays();

/// A collective of devices' tensors that is handed over to torch's own backend from this many bytes on.
struct HandOver {
  std::string collective;
  uint64_t least_bytes = 0;
};

/// The variables that affect which algorithm is chosen. Ranks that differ in one would choose differently, so they are
/// refused.
inline constexpr std::array kAgreed = {"NVX_ALGO", "NVX_ONE_SHOT_BYTES", "NVX_DELEGATE"};
using Agreed = std::array<uint64_t, kAgreed.size()>;

/// The environment as this process first read it.
struct Config {
  std::string debug;
  std::string host_id;
  std::string socket_ifname;
  std::string allow_from;
  std::string libucp;
  std::string on_error;
  std::string algorithm;
  std::string cpu_level;
  std::chrono::milliseconds timeout;  ///< 0: the group's
  std::chrono::milliseconds liveness;
  int64_t spin_us;
  int64_t staging_mb;
  int64_t lease_kb;
  int64_t one_shot_bytes;
  std::vector<HandOver> delegate;

  /// A hash of each of kAgreed.
  Agreed agreed() const;
};

/// Whether NVX_DELEGATE may name a collective.
bool may_be_handed_over(const std::string& collective);

/// Read once. Warns of NVX_* variables that nvx does not know, naming the nearest that it does.
const Config& config();

}  // namespace nvx
