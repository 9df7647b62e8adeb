#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <span>
#include <string>

namespace nvx::net {

/// A code that only a holder of the key can compute: HMAC-SHA-256.
using Mac = std::array<std::byte, 32>;

/// The secret that only the ranks of a job have. It does not appear in logs, errors or the store.
class JobKey {
 public:
  /// The key in NVX_JOB_KEY, or null if that is not set. Throws Error, also if it is set and empty.
  static const JobKey* instance();

  /// `setting`: the key, or "@" and its file. Throws Error if it is too short or unreadable, or without libcrypto.
  explicit JobKey(const std::string& setting);

  using Part = std::span<const std::byte>;
  /// The code of these parts, whose lengths the purpose fixes. A code for one purpose is not valid for another.
  Mac sign(const char* purpose, std::initializer_list<Part> parts) const;
  /// Whether two codes are equal, in a time that does not depend on their content.
  static bool same(const Mac& a, const Mac& b);

  /// A public number by which ranks compare their keys. Never 0.
  uint64_t tag() const;

 private:
  const std::string secret_;
};

}  // namespace nvx::net
